"""Batches that are copied one at a time: what one of them comes to costs no other anything."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmloader.device import transfer as transfers
from shmloader.device.carried import Carried, Carrier
from shmloader.device.staging import RING
from shmloader.device.transfer import SMALL_BYTES, Flight
from tests.device.batches import Broken
from tests.fakes import FakeAccelerator


@pytest.fixture(autouse=True)
def under_way(monkeypatch: pytest.MonkeyPatch) -> set[Flight]:
    """The flights of this test that are not through."""
    flights: set[Flight] = set()
    monkeypatch.setattr(transfers, "_under_way", flights)
    return flights


def large(number: int) -> torch.Tensor:
    """It crosses by itself, and is worth a wait for the ring."""
    return torch.full((3 << 18,), float(number))


def fails_to_move(number: int) -> Any:
    return [large(number), Broken(torch.ones(1), 9)]


def fails_to_be_copied(number: int) -> Any:
    return [large(number), torch.ones(SMALL_BYTES, dtype=torch.uint8)]


@pytest.mark.parametrize("make", [fails_to_move, fails_to_be_copied])
def test_what_fails_holds_nothing_and_nothing_behind_it_up(make: Callable[[int], Any], under_way: set[Flight]) -> None:
    with FakeAccelerator() as fake:
        carrier = Carrier(fake)
        for number in range(4 * RING):
            if make is fails_to_be_copied:
                fake.fails.add(len(fake.copies) + 2)
            with pytest.raises((RuntimeError, ValueError), match=r"not now|the device fails"):
                carrier.carry(make(number))
            arrived = carrier.carry(large(number))
            assert float(fake.fetch(arrived)[0]) == number
        taken = [block.nbytes for block in fake.locked_blocks]
        assert all(taken.count(nbytes) <= RING for nbytes in taken)
        fake.run_all()
        carrier.finish()
        assert not under_way


def test_an_iterator_that_could_not_be_made_dies_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(stream: Any = None) -> Any:
        raise RuntimeError("the device fails")

    fake = FakeAccelerator()
    monkeypatch.setattr(fake, "new_stream", refuse)
    with pytest.raises(RuntimeError, match="the device fails"):
        Carried(iter([]), fake)
    gc.collect()  # and what it raises is an error here


def test_what_ends_with_the_interpreter_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeAccelerator() as fake:
        carrier = Carrier(fake)
        carrier.carry(large(1))
        with monkeypatch.context() as patch:
            patch.setattr(sys, "is_finalizing", lambda: True)
            patch.setattr(fake, "asked", lambda: pytest.fail("the device was asked"))
            carrier.finish()
        fake.run_all()
