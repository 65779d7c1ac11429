"""Whole loaders whose batches are delivered on a device that completes its copies late and out of order."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shmloader import DataLoader
from shmloader.device import locking
from shmloader.device.pinning import LockRefused, PageLock
from shmloader.errors import PlatformWarning
from shmloader.iterator import AHEAD, ShmIter
from shmloader.loader import _home
from shmloader.memory.pool import Pool
from shmloader.workers.protocol import SlotState
from tests.datasets import Rows
from tests.device.batches import Broken, Graph
from tests.equal import assert_same
from tests.fakes import FakeAccelerator

COUNT, BATCH_SIZE, WIDTH = 48, 4, 20_000  # 320 kB a batch
MODES = pytest.mark.parametrize("late", [False, True], ids=["by hand", "late"])
LOCKS = pytest.mark.parametrize("locks", [False, True], ids=["not locked", "locked"])


class WholePool:
    """Page-locks every slot with the fake's runtime."""

    def __init__(self, fake: FakeAccelerator) -> None:
        self._runtime = fake.runtime

    @property
    def nbytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(self._runtime.ranges.values())

    def cover(self, address: int, nbytes: int) -> None:
        """Page-lock a slot."""
        self._runtime.register(address, nbytes)

    def uncover(self, address: int) -> bool:
        """Undo it."""
        self._runtime.unregister(address)
        return True

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are page-locked."""
        return self._runtime.covers(address, nbytes)


class NoMemory:
    """A runtime that page-locks nothing."""

    def register(self, address: int, nbytes: int) -> None:
        """Refuse."""
        raise LockRefused("no more")

    def unregister(self, address: int) -> None:
        """Nothing can be unlocked."""
        raise AssertionError("a range was unlocked that was not locked")


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are freed hold nonsense at once."""
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")


def delivered(loader: Any, fake: FakeAccelerator, locks: bool | None = True) -> ShmIter:
    """An iterator whose batches are delivered on the fake, from slots that are page-locked, or are not, or (None) that
    the system refuses to lock.
    """

    def lock(pool: Pool, device: torch.device) -> None:
        if locks is None:
            pool.page_lock(PageLock(NoMemory(), pool.notices))
        elif locks:
            pool.page_lock(WholePool(fake))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locking, "lock", lock)
        return ShmIter(loader, replace(_home(loader).terms(loader), accelerator=fake))


def rows(number: int) -> torch.Tensor:
    """The rows of that batch."""
    first = number * BATCH_SIZE
    return torch.arange(first, first + BATCH_SIZE).float()[:, None].expand(-1, WIDTH)


def mixed(samples: list[Any]) -> Any:
    """A batch of several parts, one of which moves itself."""
    x = torch.stack([row for row, _ in samples])
    return {"x": x, "small": [torch.tensor([n for _, n in samples]), x[1, :3]], "graph": Graph(x[:, 0].clone())}


def broken_now_and_then(samples: list[Any]) -> Any:
    """Every third batch does not move."""
    first = samples[0][1]
    return [torch.tensor([first]), Broken(torch.ones(1), 9 if first % 3 == 0 else 0)]


def loader_of(collate_fn: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(COUNT, WIDTH), BATCH_SIZE, num_workers=2, collate_fn=collate_fn, **options)


@MODES
@LOCKS
@pytest.mark.parametrize(
    "options", [{}, {"memory_limit": 1 << 20}, {"slots": 3}, {"copy": True}, {"in_order": False}], ids=repr
)
def test_every_batch_arrives_whatever_the_room_for_it(options: dict[str, Any], locks: bool, late: bool) -> None:
    with FakeAccelerator(3, late) as fake, loader_of(**options) as loader:
        readings = []
        for x, y in delivered(loader, fake, locks):
            readings.append((fake.read(x), fake.read(y)))
            del x, y
            if not late:
                fake.step()
        fake.synchronize()
        found = sorted((int(y.value[0]), x.value) for x, y in readings)
        assert [first for first, _ in found] == [*range(0, COUNT, BATCH_SIZE)]
        for number, (_, x) in enumerate(found):
            assert torch.equal(x, rows(number))
        fake.run_all()


@MODES
def test_batches_are_those_on_the_cpu_and_may_all_be_kept(late: bool) -> None:
    with FakeAccelerator(5, late) as fake, loader_of(mixed, memory_limit=2 << 20) as loader:
        kept = list(delivered(loader, fake))
        fake.synchronize()
        for ours, theirs in zip(kept, loader_of(mixed), strict=True):
            assert torch.equal(ours.pop("graph").x, theirs.pop("graph").x)
            assert_same(ours, theirs)
        fake.run_all()


def test_batches_are_copied_before_they_are_asked_for() -> None:
    with FakeAccelerator() as fake, loader_of() as loader:
        batches = delivered(loader, fake)
        next(batches)
        while batches.poke() < 4:  # all that are assigned
            pass
        late = loader.stats().late_copies
        for _ in range(2):
            copied = len(fake.copies)
            next(batches)
            assert len(fake.copies) <= copied + 2 * AHEAD  # of those that come next
        assert loader.stats().late_copies == late


def test_how_long_the_step_waited_for_copies_is_told() -> None:
    with FakeAccelerator() as fake, loader_of() as loader:
        for batch in delivered(loader, fake):
            fake.fetch(batch[1])
        stats = loader.stats()
        # Every fetch makes the device come to the batch at once, and only then copy it.
        assert stats.copy_wait_s >= 0.001 * (stats.batches - 1)
        assert stats.as_dict()["copy_wait_s"] == stats.copy_wait_s
        fake.run_all()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_iterator_that_is_dropped_in_the_middle_lets_go_of_everything(after: int) -> None:
    with FakeAccelerator() as fake, loader_of() as loader:
        batches: Iterator[Any] = delivered(loader, fake)
        for _ in range(after):
            next(batches)
        del batches
        gc.collect()
        assert not loader.stats().slots.get(SlotState.LEASED.name)
        fake.run_all()


def test_the_read_out_keeps_no_page_locked_memory() -> None:
    with FakeAccelerator() as fake, loader_of(mixed) as loader:
        batches: Iterator[Any] = delivered(loader, fake, locks=False)
        next(batches)
        assert loader.stats().memory.staging > 0
        del batches
        gc.collect()
        assert loader.stats().memory.staging == 0
        fake.run_all()


def test_persistent_workers_begin_anew_in_the_middle_of_an_epoch() -> None:
    with FakeAccelerator() as fake, loader_of(persistent_workers=True) as loader:
        batches = delivered(loader, fake)
        for _ in range(3):
            for number in range(2):
                x, _ = next(batches)
                assert torch.equal(fake.fetch(x), rows(number))
            batches._reset(loader)
        assert [torch.equal(fake.fetch(x), rows(number)) for number, (x, _) in enumerate(batches)] == [True] * 12
        batches._shutdown_workers()


def test_batches_that_nobody_wants_any_more_hold_up_no_later_epoch() -> None:
    with FakeAccelerator() as fake, loader_of(mixed, persistent_workers=True) as loader:
        batches = delivered(loader, fake)
        transfer: Any = batches._transfer
        for _ in range(3):
            next(batches)
            while len(transfer._waiting) < AHEAD:
                batches.poke()
            batches._reset(loader)
            fake.run_all()
            batches.poke()
            assert len(transfer._flights) + len(transfer._waiting) <= AHEAD
        batches._shutdown_workers()


@pytest.mark.parametrize("options", [{}, {"slots": 3}], ids=repr)
def test_a_batch_that_does_not_move_is_an_error_and_those_behind_it_come(options: dict[str, Any]) -> None:
    with FakeAccelerator() as fake, loader_of(broken_now_and_then, **options) as loader:
        batches, found = delivered(loader, fake), []
        while True:
            try:
                found.append(int(fake.fetch(next(batches)[0])))
            except ValueError:
                found.append(-1)
            except StopIteration:
                break
        assert found == [n if n % 3 else -1 for n in range(0, COUNT, BATCH_SIZE)]
        fake.run_all()
        assert not loader.stats().slots.get(SlotState.LEASED.name)


@pytest.mark.parametrize("options", [{}, {"slots": 3}, {"in_order": False, "persistent_workers": True}], ids=repr)
@pytest.mark.parametrize("refused", ["slots", "staging", "both"])
def test_where_warnings_are_errors_no_batch_is_lost_and_no_slot(refused: str, options: dict[str, Any]) -> None:
    with FakeAccelerator() as fake, loader_of(**options) as loader:
        fake.refuses_memory = refused != "slots"
        batches = delivered(loader, fake, locks=False if refused == "staging" else None)
        found, warned = [], 0
        while True:
            try:
                x, y = next(batches)
            except PlatformWarning:  # as which it comes in all tests
                warned += 1
            except StopIteration:
                break
            else:
                found.append(int(fake.fetch(y)[0]))
                assert torch.equal(fake.fetch(x), rows(found[-1] // BATCH_SIZE))
        assert sorted(found) == [*range(0, COUNT, BATCH_SIZE)]
        assert warned == (2 if refused == "both" else 1)
        fake.run_all()
        batches._shutdown_workers()
        assert not loader.stats().slots.get(SlotState.LEASED.name)


def test_a_capture_costs_the_batch_that_was_asked_for_and_no_other() -> None:
    with FakeAccelerator() as fake, loader_of() as loader:
        batches = delivered(loader, fake)
        next(batches)
        fake.captures = True
        with pytest.raises(RuntimeError, match="captured"):
            next(batches)
        loader.poke()
        fake.captures = False
        assert [int(fake.fetch(y)[0]) for _, y in batches] == [*range(2 * BATCH_SIZE, COUNT, BATCH_SIZE)]
