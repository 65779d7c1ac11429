"""Exceptions out of nowhere, such as a Ctrl-C, anywhere in the device path: nothing read too early, nothing stuck."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from shmloader.device import transfer as transfers
from shmloader.device.transfer import SMALL_BYTES, Flight, Transfer
from tests.device.batches import Graph
from tests.device.test_transfer import Slot
from tests.fakes import FakeAccelerator

BATCHES = 4
#: Of the places that an interruption may come at, every so many-th is tried; prime, so that none is always left out.
STRIDE = 211


class Interruption(BaseException):
    """What a signal handler raises."""


class Interrupter:
    """Raises in the device path, once, after so many steps."""

    def __init__(self, place: int) -> None:
        self.left = place

    @property
    def came(self) -> bool:
        """Whether it has."""
        return self.left <= 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the steps are counted."""
        sys.settrace(self._enter)
        try:
            yield
        except Interruption:
            pass
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if "/shmloader/device/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise Interruption
        return self._step


def plain(number: int) -> list[Any]:
    return [torch.full((SMALL_BYTES,), number), torch.tensor(number), torch.tensor(2 * number)]


def with_a_graph(number: int) -> list[Any]:
    return [*plain(number), Graph(torch.tensor(3 * number))]


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> set[Flight]:
    """The flights of this test that are not through."""
    flights: set[Flight] = set()
    monkeypatch.setattr(transfers, "_under_way", flights)
    return flights


class Consumer:
    """Takes batches, one of them ahead, and whatever is interrupted is given up."""

    def __init__(self, fake: FakeAccelerator, make: Callable[[int], list[Any]], interrupter: Interrupter) -> None:
        self.fake, self.make, self.interrupter = fake, make, interrupter
        self.transfer = Transfer(fake, fake.runtime.covers, [])
        self.slots = [Slot(fake) for _ in range(BATCHES)]
        self.ahead: Flight | None = None
        self.readings: list[tuple[int, list[Any]]] = []

    def take(self, number: int) -> None:
        """The batch that was sent ahead, while this one is sent."""
        flight, self.ahead = self.ahead, None
        batch = self.slots[number].lend(self.make(number))
        with self.interrupter.watching():
            self.ahead = self.transfer.send(batch)
        del batch
        if flight is not None:
            with self.interrupter.watching():
                arrived = self.transfer.arrive(flight)
                self.readings.append((number - 1, [self.fake.read(x) for x in arrived[:3]]))
                del arrived
            with self.interrupter.watching():
                self.transfer.drop(flight)
            self.transfer.drop(flight)


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, with_a_graph])
def test_an_interruption_anywhere_lets_nothing_go_early_and_holds_no_later_batch_up(
    make: Callable[[int], list[Any]], under_way: set[Flight]
) -> None:
    place, came = 1, True
    while came:
        came = interrupted_at(place, make, under_way)
        place += STRIDE


def interrupted_at(place: int, make: Callable[[int], list[Any]], under_way: set[Flight]) -> bool:
    """Whether an interruption came, in which case all has gone well."""
    under_way.clear()
    interrupter = Interrupter(place)
    with FakeAccelerator(place) as fake:
        consumer = Consumer(fake, make, interrupter)
        for number in range(BATCHES):
            consumer.take(number)
            fake.step()
            for slot in consumer.slots:
                assert slot.came_back in (True, False)  # and if it has, it is filled with something else
        fake.run_all()
        with interrupter.watching():
            consumer.transfer.finish()
        consumer.ahead = None
        consumer.transfer.finish()
        gc.collect()
        for number, found in consumer.readings:
            expected = make(number)[:3]
            assert all(torch.equal(x.value, y) for x, y in zip(found, expected)), f"wrong after {place} steps"
        assert len(consumer.readings) >= BATCHES - 3
        assert sum(not slot.came_back for slot in consumer.slots) <= interrupter.came, f"stuck after {place} steps"
        assert len(under_way) <= interrupter.came, f"stuck after {place} steps"
    return interrupter.came
