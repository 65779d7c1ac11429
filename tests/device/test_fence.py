"""Slots that a device may still read: none comes back before everything that was enqueued until then is through."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader.device import captures, locking
from shmloader.device.fence import Quarantine
from shmloader.device.locking import SlotGuard
from shmloader.device.pinning import LockRefused, PageLock
from shmloader.errors import PlatformWarning
from shmloader.memory.budget import PAGE_BYTES
from shmloader.memory.pool import MOST_QUARANTINED, Lender, Pool, sweep
from shmloader.memory.slots import Slot
from shmloader.workers.protocol import SlotEvent, SlotState

S = SlotState


class ManualEvent:
    """Passes when the test says so, or when somebody waits for it."""

    def __init__(self, driver: ManualDriver, work: int) -> None:
        self.driver, self.work = driver, work

    def query(self) -> bool:
        self.driver.ask()
        return self.work <= self.driver.done

    def synchronize(self) -> None:
        self.driver.ask()
        self.driver.done = max(self.driver.done, self.work)
        self.driver.waits += 1


class ManualDriver:
    """A device whose work is numbered: an event is behind all that was given so far."""

    def __init__(self) -> None:
        self.given = self.done = self.waits = self.records = 0
        self.refuses = self.broken = False

    def ask(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def record(self) -> list[ManualEvent]:
        self.ask()
        if self.refuses:
            raise RuntimeError("a stream is being captured")
        self.records += 1
        return [ManualEvent(self, self.given), ManualEvent(self, self.given)]


class Quiet:
    """Plays the watch on captures."""

    def __init__(self) -> None:
        self.capturing = False

    @contextmanager
    def held_off(self) -> Iterator[bool]:
        yield not self.capturing


def slots(*offsets: int) -> list[Slot]:
    return [Slot(offset, PAGE_BYTES, S.QUARANTINED) for offset in offsets]


# -- groups -----------------------------------------------------------------------------------------------------


def test_slots_leave_when_what_was_enqueued_before_they_came_back_is_through() -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    early, late = slots(0, 1), slots(2)
    driver.given = 1
    quarantine.enter(early)
    driver.given = 2
    quarantine.enter(late)
    assert len(quarantine) == 3
    assert quarantine.leave() == []
    driver.done = 1
    assert quarantine.leave() == early
    assert len(quarantine) == 1
    driver.done = 2
    assert quarantine.leave() == late
    assert quarantine.leave() == []
    assert (len(quarantine), driver.records, driver.waits) == (0, 2, 0)


def test_waiting_is_for_the_oldest_fence_only() -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    for group in (early := slots(0), late := slots(1)):
        driver.given += 1
        quarantine.enter(group)
    assert quarantine.wait() == early
    assert driver.done == 1
    assert quarantine.wait() == late
    assert quarantine.wait() == []
    assert len(quarantine) == 0


def test_waiting_brings_all_that_has_passed_meanwhile() -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    for group in (early := slots(0), late := slots(1)):
        quarantine.enter(group)
    assert quarantine.wait() == early + late


def test_a_fence_that_is_refused_is_made_later_and_is_then_behind_what_came_meanwhile() -> None:
    driver = ManualDriver()
    driver.refuses = True
    quarantine = Quarantine(driver)
    quarantine.enter(first := slots(0))
    assert quarantine.leave() == quarantine.wait() == []
    driver.given = 3
    quarantine.enter(second := slots(1))
    driver.refuses = False
    driver.done = 2
    assert quarantine.leave() == []
    assert driver.records == 1
    driver.done = 3
    assert quarantine.leave() == first + second


def test_while_a_capture_is_under_way_nothing_is_asked_of_the_device() -> None:
    driver, quiet = ManualDriver(), Quiet()
    quarantine = Quarantine(driver, quiet.held_off)
    quarantine.enter(early := slots(0))
    quiet.capturing = driver.broken = True  # broken: to be asked would show
    quarantine.enter(late := slots(1))
    assert quarantine.leave() == quarantine.wait() == []
    assert driver.records == 1
    quiet.capturing = driver.broken = False
    assert quarantine.wait() == early + late
    assert driver.records == 2


def test_a_device_that_is_out_of_order_gets_to_keep_the_slots_without_an_error_here() -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    quarantine.enter(slots(0))
    driver.broken = True
    quarantine.enter(slots(1))
    assert quarantine.leave() == quarantine.wait() == []
    assert len(quarantine) == 2


def test_in_a_forked_child_no_slot_leaves_and_nothing_is_asked_of_the_device() -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    quarantine.enter(slots(0))
    pid = os.fork()
    if pid == 0:
        quarantine.enter(slots(1))
        os._exit(0 if quarantine.leave() == quarantine.wait() == [] and driver.records == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(quarantine.leave()) == 1


def test_while_the_interpreter_ends_no_slot_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ManualDriver()
    quarantine = Quarantine(driver)
    quarantine.enter(slots(0))
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    driver.broken = True  # to be asked would show
    assert quarantine.leave() == quarantine.wait() == []


STEPS = st.lists(st.sampled_from(["work", "enter", "enter", "leave", "wait", "pass", "refuse", "capture"]), max_size=60)


@given(steps=STEPS)
def test_whatever_happens_no_slot_leaves_early_and_each_leaves_once(steps: list[str]) -> None:
    driver, quiet = ManualDriver(), Quiet()
    quarantine = Quarantine(driver, quiet.held_off)
    needs: dict[int, int] = {}
    inside: list[Slot] = []

    def let_go(left: list[Slot]) -> None:
        for slot in left:
            inside.remove(slot)
            assert needs[slot.offset] <= driver.done

    for step in steps:
        match step:
            case "work":
                driver.given += 1
            case "enter":
                group = slots(len(needs), len(needs) + 1)
                needs |= {slot.offset: driver.given for slot in group}
                inside += group
                quarantine.enter(group)
            case "leave":
                before = driver.waits
                let_go(quarantine.leave())
                assert driver.waits == before
            case "wait":
                may_wait = bool(inside) and not quiet.capturing and not (driver.refuses and not quarantine._groups)
                left = quarantine.wait()
                assert bool(left) is may_wait
                let_go(left)
            case "pass":
                driver.done = min(driver.done + 1, driver.given)
            case "refuse":
                driver.refuses = not driver.refuses
            case "capture":
                quiet.capturing = not quiet.capturing
        assert len(quarantine) == len(inside)
    driver.refuses = quiet.capturing = False
    while left := quarantine.wait():
        let_go(left)
    assert (len(quarantine), inside) == (0, [])


# -- a pool whose slots are handed out page-locked --------------------------------------------------------------


class Ranges:
    """A runtime that counts, and refuses to unlock while it is told to."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.refuses = False

    def register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise LockRefused("no more")
        assert address not in self.held
        self.held.add(address)

    def unregister(self, address: int) -> None:
        self.held.remove(address)


class Device:
    """A device, and a pool that is page-locked for it."""

    def __init__(self, pages: int = 64, most_slots: int | None = None) -> None:
        self.driver, self.ranges = ManualDriver(), Ranges()
        self.pool = Pool(pages * PAGE_BYTES, lambda: 1 << 40, most_slots=most_slots)
        self.pool.ledger.learn(PAGE_BYTES)
        self.pool.guard(SlotGuard(self.driver))
        self.pool.page_lock(PageLock(self.ranges, self.pool.notices))

    def lend(self) -> tuple[Slot, Any]:
        slot = self.pool.acquire(0)
        assert slot is not None
        self.pool.ledger.apply(slot, SlotEvent.FILLED)
        return slot, self.pool.lend(slot)

    def step(self) -> Slot:
        """A training step: a batch is taken, its copy enqueued, and dropped."""
        slot, held = self.lend()
        self.driver.given += 1
        del held
        self.pool.reclaim()
        return slot

    def end(self) -> None:
        self.pool.abandon()
        self.pool.close()
        assert self.ranges.held == set()


@pytest.fixture
def no_capture() -> Iterator[None]:
    """Undoes what a test pretends about captures."""
    yield
    captures._under_way.clear()


def test_a_page_locked_slot_that_was_dropped_is_free_only_behind_the_fence() -> None:
    device = Device()
    slot = device.step()
    assert slot.state is S.QUARANTINED
    other = device.pool.acquire(0)
    assert other not in (slot, None)
    device.driver.done = 1
    device.pool.reclaim()
    assert slot.state is S.FREE
    assert device.pool.acquire(0) is slot
    device.end()


def test_a_slot_that_is_not_page_locked_is_free_at_once() -> None:
    device = Device()
    device.ranges.refuses = True
    slot = device.step()
    assert [type(notice) for notice in device.pool.notices] == [PlatformWarning]
    assert slot.state is S.FREE
    assert device.driver.records == 0
    device.end()


@pytest.mark.usefixtures("no_capture")
def test_a_slot_that_was_leased_when_a_capture_began_is_retired_for_good() -> None:
    device = Device()
    captured, held = device.lend()
    captures._begun += 1
    later, unharmed = device.lend()
    del held, unharmed
    device.pool.reclaim()
    assert (captured.state, later.state) == (S.RETIRED, S.FREE)
    assert captured not in [device.pool.acquire(0) for _ in range(70)]
    assert device.pool.ledger.carved_bytes == 64 * PAGE_BYTES
    device.pool.abandon()
    device.pool.close()
    assert device.ranges.held == {device.pool.segment.address + captured.offset}, "the graph reads it at every replay"
    device.pool.ledger._slots.clear()
    assert device.pool._ranges.punch(captured.offset, captured.capacity)
    sweep()


@pytest.mark.usefixtures("no_capture")
def test_a_slot_that_was_handed_out_during_a_capture_is_retired() -> None:
    device = Device()
    captures._under_way.add(1)
    slot, held = device.lend()
    captures._under_way.clear()
    del held
    device.pool.reclaim()
    assert slot.state is S.RETIRED
    device.pool._ranges.punch(slot.offset, slot.capacity)
    device.end()


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.usefixtures("no_capture")
def test_a_slot_that_was_leased_before_the_pool_was_guarded_is_guarded(captured: bool) -> None:
    driver, ranges = ManualDriver(), Ranges()
    pool = Pool(64 * PAGE_BYTES, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    slot = pool.acquire(0)
    assert slot is not None
    pool.ledger.apply(slot, SlotEvent.FILLED)
    held = pool.lend(slot)
    pool.guard(SlotGuard(driver))
    pool.page_lock(PageLock(ranges, []))
    captures._begun += captured
    driver.given = 1
    del held
    pool.reclaim()
    assert slot.state is (S.RETIRED if captured else S.QUARANTINED)
    pool._ranges.punch(slot.offset, slot.capacity) if captured else None
    pool.close()
    assert ranges.held == set()


@pytest.mark.usefixtures("no_capture")
def test_a_pool_that_is_closed_during_a_capture_is_unlocked_after_it() -> None:
    device = Device()
    device.step()
    captures._under_way.add(1)
    device.pool.close()
    assert len(device.ranges.held) == 1
    captures._under_way.clear()
    sweep()
    assert device.ranges.held == set()
    assert device.driver.waits > 0


def test_closing_waits_for_the_device_before_it_unlocks() -> None:
    device = Device()
    for _ in range(3):
        device.step()
    assert device.driver.done == 0
    device.end()
    assert device.driver.done == 3


def test_a_pool_whose_slots_are_in_use_at_the_end_leaves_nothing_locked_when_they_have_come_back() -> None:
    device = Device()
    lender = Lender(lambda: 64 * PAGE_BYTES, lambda: 1 << 40, None)
    lender._lent.add(device.pool)
    _, held = device.lend()
    device.step()
    lender.close()
    lender.take_back(device.pool)
    assert len(device.ranges.held) == 1
    device.driver.given += 1
    del held
    sweep()
    assert device.ranges.held == set()
    assert device.driver.done == device.driver.given


def test_rather_than_page_lock_ever_more_a_device_is_waited_for() -> None:
    device = Device()
    for _ in range(50):
        device.step()
    assert device.pool.locked_bytes == MOST_QUARANTINED * PAGE_BYTES
    assert device.driver.given - device.driver.done == MOST_QUARANTINED
    device.end()


def test_a_given_number_of_slots_is_kept_and_none_is_page_locked_anew() -> None:
    device = Device(most_slots=2)
    first = {device.step().offset for _ in range(2)}
    for _ in range(20):
        assert device.step().offset in first
    assert device.pool.locked_bytes == 2 * PAGE_BYTES
    device.end()


def test_where_the_memory_ends_a_device_is_waited_for() -> None:
    device = Device(pages=3)
    for _ in range(20):
        device.step()
    assert device.pool.locked_bytes == 3 * PAGE_BYTES
    device.end()


def test_a_slot_that_a_forked_child_may_read_comes_back_after_both() -> None:
    device = Device()
    slot, held = device.lend()
    device.pool.ledger.expose("child")
    device.driver.given = 1
    del held
    device.pool.reclaim()
    device.pool._gone.append("child")
    device.pool.reclaim()
    assert slot.state is S.QUARANTINED
    device.driver.done = 1
    device.pool.reclaim()
    assert slot.state is S.FREE
    again, held = device.lend()
    device.pool.ledger.expose("child")
    device.driver.given = 2
    del held
    device.pool.reclaim()
    device.driver.done = 2
    device.pool.reclaim()
    assert again.state is S.EXPOSED
    device.pool._gone.append("child")
    device.pool.reclaim()
    assert again.state is S.FREE
    device.end()


# -- whole pools ------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """An accelerator whose memory can be page-locked."""
    ranges, driver = Ranges(), ManualDriver()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(locking, "find_runtime", lambda device: ranges)
    monkeypatch.setattr(locking, "find_driver", lambda: driver)
    monkeypatch.setattr(captures, "watch", lambda: True)
    return ranges


def pool_after_a_batch() -> tuple[Pool, Slot]:
    pool = Pool(64 * PAGE_BYTES, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    slot = pool.acquire(0)
    assert slot is not None
    pool.ledger.apply(slot, SlotEvent.FAILED)
    return pool, slot


def test_pages_that_are_handed_out_locked_are_guarded(pretended: Ranges) -> None:
    pool, slot = pool_after_a_batch()
    locking.lock(pool)
    locking.lock(pool)
    assert pretended.held == {pool.segment.address + slot.offset}
    assert isinstance(pool._guard, SlotGuard)
    pool.close()
    assert pretended.held == set()


def test_where_captures_cannot_be_seen_nothing_is_handed_out_locked(
    pretended: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "watch", lambda: False)
    pool, _ = pool_after_a_batch()
    locking.lock(pool)
    assert (pretended.held, pool._guard) == (set(), None)
    pool.close()


def test_where_memory_cannot_be_page_locked_nothing_is_guarded(
    pretended: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locking, "find_runtime", lambda device: None)
    pool, _ = pool_after_a_batch()
    locking.lock(pool)
    assert pool._guard is None
    pool.close()
