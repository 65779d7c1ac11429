"""Page-locking: what is locked is unlocked, once each, before its pages go, and a refusal harms nobody."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader.device import locking, pinning
from shmloader.device.pinning import HostRuntime, LockRefused, PageLock, find_runtime, loaded_library
from shmloader.errors import PlatformWarning
from shmloader.memory import pool as pools
from shmloader.memory.budget import PAGE_BYTES
from shmloader.memory.pool import Pool, sweep
from shmloader.memory.slots import Slot
from shmloader.workers.protocol import SlotEvent, SlotState

MIB = 1 << 20
REFUSED = "no more, error 2"


class RecordingRuntime:
    """Page-locks nothing, and fails the test if a range is locked twice or unlocked without being locked.

    Args:
        refused: numbers of the calls, from 0, that it refuses.
    """

    def __init__(self, *refused: int) -> None:
        self.refused = set(refused)
        self.calls = 0
        self.ranges: dict[int, int] = {}

    def _call(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.refused:
            raise LockRefused(REFUSED)

    def register(self, address: int, nbytes: int) -> None:
        self._call()
        assert nbytes > 0
        for start, length in self.ranges.items():
            assert address + nbytes <= start or start + length <= address, "locked twice"
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        self._call()
        del self.ranges[address]


def new_pool(runtime: RecordingRuntime, pages: int = 1024) -> Pool:
    pool = Pool(pages * PAGE_BYTES, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    pool.page_lock(PageLock(runtime, pool.notices))
    return pool


def acquired(pool: Pool) -> Slot:
    slot = pool.acquire(0)
    assert slot is not None
    return slot


def leased(pool: Pool) -> tuple[Slot, Any]:
    slot = acquired(pool)
    pool.ledger.apply(slot, SlotEvent.FILLED)
    return slot, pool.lend(slot)


def pages_of(pool: Pool) -> int:
    """Pages that exist, as the kernel counts them."""
    return os.fstat(pool.segment.fd).st_blocks * 512 // PAGE_BYTES


# -- ranges -----------------------------------------------------------------------------------------------------


def test_what_is_covered_is_registered_as_it_is_and_unregistered_as_a_whole() -> None:
    runtime = RecordingRuntime()
    lock = PageLock(runtime, [])
    lock.cover(3 * MIB, MIB)
    lock.cover(MIB, 2 * MIB)
    assert runtime.ranges == {3 * MIB: MIB, MIB: 2 * MIB}
    assert lock.nbytes == 3 * MIB
    assert lock.uncover(MIB)
    assert runtime.ranges == {3 * MIB: MIB}
    assert lock.nbytes == MIB
    assert lock.uncover(3 * MIB)
    assert (runtime.ranges, lock.nbytes) == ({}, 0)


def test_nothing_is_asked_for_an_empty_range() -> None:
    runtime = RecordingRuntime()
    PageLock(runtime, []).cover(MIB, 0)
    assert runtime.calls == 0


def test_a_copy_may_not_straddle_two_registrations() -> None:
    lock = PageLock(RecordingRuntime(), [])
    for address in (MIB, 2 * MIB, 4 * MIB):
        lock.cover(address, MIB)
    assert lock.covers(MIB, MIB)
    assert lock.covers(MIB + 5, MIB - 5)
    assert lock.covers(2 * MIB, 1)
    assert not lock.covers(2 * MIB - 1, 2), "across the border of two"
    assert not lock.covers(MIB - 1, 2), "begins before"
    assert not lock.covers(3 * MIB, 1), "between two"
    assert not lock.covers(5 * MIB, 1), "behind the last"
    assert not lock.covers(0, 1)


def test_a_range_that_was_never_locked_may_be_given_back() -> None:
    runtime = RecordingRuntime()
    assert PageLock(runtime, []).uncover(MIB)
    assert runtime.calls == 0


def test_a_refused_range_is_warned_of_and_those_that_are_locked_stay() -> None:
    runtime = RecordingRuntime(1)
    notices: list[Warning] = []
    lock = PageLock(runtime, notices)
    lock.cover(MIB, MIB)
    lock.cover(2 * MIB, 2 * MIB)
    (notice,) = notices
    assert isinstance(notice, PlatformWarning)
    assert f"page-lock {2 * MIB} bytes" in str(notice)
    assert f"({REFUSED}) beside the {MIB}" in str(notice)
    assert lock.covers(MIB, MIB)
    assert not lock.covers(2 * MIB, 1)
    assert lock.nbytes == MIB


def test_a_system_that_refuses_is_asked_again_only_when_it_got_something_back_and_warned_of_once() -> None:
    runtime = RecordingRuntime(1, 4)
    notices: list[Warning] = []
    lock = PageLock(runtime, notices)
    lock.cover(MIB, MIB)
    lock.cover(2 * MIB, MIB)
    lock.cover(3 * MIB, MIB)
    assert runtime.calls == 2
    assert lock.uncover(2 * MIB), "nothing was given back by that"
    lock.cover(3 * MIB, MIB)
    assert runtime.calls == 2
    assert lock.uncover(MIB)
    lock.cover(3 * MIB, MIB)
    assert runtime.ranges == {3 * MIB: MIB}
    lock.cover(4 * MIB, MIB)
    assert runtime.calls == 5, "refused, without a second warning"
    assert lock.nbytes == MIB
    assert len(notices) == 1


def test_a_range_that_cannot_be_unlocked_stays_locked() -> None:
    lock = PageLock(RecordingRuntime(1), [])
    lock.cover(MIB, MIB)
    assert not lock.uncover(MIB)
    assert lock.nbytes == MIB
    assert lock.covers(MIB, MIB)


def test_what_is_cut_short_while_it_is_locked_is_unlocked_all_the_same() -> None:
    class Interrupted(RecordingRuntime):
        def register(self, address: int, nbytes: int) -> None:
            super().register(address, nbytes)
            raise KeyboardInterrupt

    runtime = Interrupted()
    lock = PageLock(runtime, [])
    with pytest.raises(KeyboardInterrupt):
        lock.cover(MIB, MIB)
    assert lock.uncover(MIB)
    assert runtime.ranges == {}


def test_in_a_forked_child_nothing_is_asked_of_the_system() -> None:
    runtime = RecordingRuntime()
    lock = PageLock(runtime, [])
    lock.cover(MIB, MIB)
    pid = os.fork()
    if pid == 0:
        lock.cover(2 * MIB, MIB)
        left_alone = not lock.uncover(MIB) and not lock.uncover(2 * MIB)
        os._exit(0 if left_alone and runtime.calls == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_while_the_interpreter_ends_nothing_is_asked_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RecordingRuntime()
    lock = PageLock(runtime, [])
    lock.cover(MIB, MIB)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert not lock.uncover(MIB)
    lock.cover(2 * MIB, MIB)
    assert runtime.calls == 1


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(1, 4)), max_size=40),
    refused=st.sets(st.integers(0, 40)),
)
def test_whatever_is_covered_and_uncovered_the_two_always_agree(
    steps: list[tuple[bool, int, int]], refused: set[int]
) -> None:
    runtime = RecordingRuntime(*refused)
    notices: list[Warning] = []
    lock = PageLock(runtime, notices)
    for cover, at, pages in steps:
        start, nbytes = at * 4 * PAGE_BYTES, pages * PAGE_BYTES
        if cover and start not in runtime.ranges:
            lock.cover(start, nbytes)
        elif not cover:
            assert lock.uncover(start) is (start not in runtime.ranges)
        assert lock.nbytes == sum(runtime.ranges.values())
        for page in range(70):
            inside = any(s <= page * PAGE_BYTES < s + length for s, length in runtime.ranges.items())
            assert lock.covers(page * PAGE_BYTES, PAGE_BYTES) is inside
    assert len(notices) <= 1
    runtime.refused.clear()
    for start in tuple(runtime.ranges):
        assert lock.uncover(start)
    assert (runtime.ranges, lock.nbytes) == ({}, 0)


# -- the slots of a pool ----------------------------------------------------------------------------------------


def test_slots_are_locked_when_they_are_carved_or_when_the_pool_gets_its_lock() -> None:
    runtime = RecordingRuntime()
    pool = Pool(MIB, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    slots = [acquired(pool), acquired(pool)]
    pool.page_lock(PageLock(runtime, pool.notices))
    slots.append(acquired(pool))
    assert runtime.ranges == {pool.segment.address + slot.offset: slot.capacity for slot in slots}
    assert pool.locked_bytes == 3 * PAGE_BYTES
    assert all(pool.locked(pool.segment.address + slot.offset, slot.capacity) for slot in slots)
    pool.abandon()
    pool.close()
    assert runtime.ranges == {}


def test_a_pool_keeps_its_first_lock() -> None:
    first, second = RecordingRuntime(), RecordingRuntime()
    pool = new_pool(first)
    pool.page_lock(PageLock(second, pool.notices))
    pool.ledger.apply(acquired(pool), SlotEvent.FAILED)
    assert (first.calls, second.calls) == (1, 0)
    pool.close()
    assert first.ranges == {}


def test_slots_of_another_size_are_unlocked_before_their_pages_go() -> None:
    runtime = RecordingRuntime()
    pool = new_pool(runtime)
    pool.ledger.apply(acquired(pool), SlotEvent.FAILED)
    pool.ledger.learn(8 * PAGE_BYTES)
    pool.ledger.learn(8 * PAGE_BYTES)
    slot = acquired(pool)
    assert runtime.ranges == {pool.segment.address + slot.offset: 8 * PAGE_BYTES}
    pool.abandon()
    pool.close()
    assert runtime.ranges == {}


def test_a_pool_that_is_closed_with_slots_in_use_is_unlocked_when_they_have_come_back() -> None:
    runtime = RecordingRuntime()
    pool = new_pool(runtime)
    _, held = leased(pool)
    _, dropped = leased(pool)
    del dropped
    pool.close()
    assert len(runtime.ranges) == 1, "what is in use is not unlocked under the device"
    sweep()
    assert len(runtime.ranges) == 1
    del held
    sweep()
    assert (runtime.ranges, pool.locked_bytes) == ({}, 0)


def test_a_range_that_cannot_be_unlocked_keeps_its_pages_and_is_never_used_again() -> None:
    runtime = RecordingRuntime(2)
    pool = new_pool(runtime, pages=3)
    stuck, other = acquired(pool), acquired(pool)
    ctypes.memset(pool.segment.address + stuck.offset, 7, PAGE_BYTES)
    pool.ledger.apply(stuck, SlotEvent.FAILED)
    pool.ledger.apply(other, SlotEvent.FAILED)
    pool.ledger.give_back()
    assert [slot.state for slot in (stuck, other)] == [SlotState.DISSOLVED] * 2
    assert pages_of(pool) == 1
    assert pool.segment.map[stuck.offset : stuck.offset + PAGE_BYTES] == bytes([7]) * PAGE_BYTES
    later = [slot for _ in range(5) if (slot := pool.acquire(0)) is not None]
    assert stuck.offset not in [slot.offset for slot in later]
    assert later
    pool.abandon()
    pool.close()
    assert list(runtime.ranges) == [pool.segment.address + stuck.offset]
    pools._unclosed.remove(pool)  # where it is kept for good: what is mapped there next would be read as what it was


def test_slots_that_the_system_refuses_to_lock_work_unlocked() -> None:
    runtime = RecordingRuntime(1)
    pool = new_pool(runtime)
    locked = acquired(pool)
    unlocked = acquired(pool)
    assert len(pool.notices) == 1
    assert pool.locked(pool.segment.address + locked.offset, PAGE_BYTES)
    assert not pool.locked(pool.segment.address + unlocked.offset, PAGE_BYTES)
    pool.abandon()
    pool.close()
    assert runtime.ranges == {}


def test_what_is_cut_short_while_it_is_locked_costs_no_range() -> None:
    class Interrupted(RecordingRuntime):
        def register(self, address: int, nbytes: int) -> None:
            if not self.calls:
                self.calls = 1
                raise KeyboardInterrupt
            super().register(address, nbytes)

        def unregister(self, address: int) -> None:
            self.ranges.pop(address, None)

    pool = new_pool(Interrupted(), pages=2)
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(0)
    assert pages_of(pool) == 0
    assert [acquired(pool).offset for _ in range(2)] == [0, PAGE_BYTES]


# -- the runtime ------------------------------------------------------------------------------------------------


class Library:
    """Plays libcudart: functions by name, as ctypes has them."""

    def __init__(self, prefix: str = "cuda", code: int = 0) -> None:
        self.prefix, self.code = prefix, code
        self.calls: list[tuple[Any, ...]] = []
        self.mode = 0  # global
        self.error = 0

    def __getitem__(self, name: str) -> Any:
        if not name.startswith(self.prefix):
            raise AttributeError(name)
        method = getattr(self, name.removeprefix(self.prefix))

        def function(*args: Any) -> Any:
            return method(*args)

        return function

    def HostRegister(self, *args: Any) -> int:
        self.calls.append(("register", *args, self.mode))
        self.error = self.code
        return self.code

    def HostUnregister(self, *args: Any) -> int:
        self.calls.append(("unregister", *args, self.mode))
        self.error = self.code
        return self.code

    def GetLastError(self) -> int:
        self.error = 0
        return self.code

    def GetErrorString(self, code: int) -> bytes:
        return b"error text"

    def ThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0


@pytest.mark.parametrize("prefix", ["cuda", "hip"])
def test_the_runtime_registers_for_all_contexts_and_breaks_no_capture(prefix: str) -> None:
    library = Library(prefix)

    @contextmanager
    def ready() -> Iterator[None]:
        library.calls.append(("ready",))
        yield
        library.calls.append(("over",))

    runtime = HostRuntime(library, prefix, ready)
    runtime.register(MIB, 5)
    runtime.unregister(MIB)
    register, unregister = ("register", MIB, 5, 1, 2), ("unregister", MIB, 2)
    assert library.calls == [("ready",), register, ("over",), ("ready",), unregister, ("over",)]
    assert library.mode == 0, "the thread's mode is as it was"


def test_a_refusal_says_why_and_leaves_no_error_to_the_users_next_call() -> None:
    library = Library(code=2)
    runtime = HostRuntime(library, "cuda", nullcontext)
    with pytest.raises(LockRefused, match="error text, error 2"):
        runtime.register(MIB, 5)
    assert library.error == 0
    with pytest.raises(LockRefused, match="error text, error 2"):
        runtime.unregister(MIB)
    assert (library.error, library.mode) == (0, 0)


def test_memory_that_is_not_registered_any_more_counts_as_unregistered() -> None:
    library = Library(code=713)
    HostRuntime(library, "cuda", nullcontext).unregister(MIB)
    assert library.error == 0


def test_where_torch_cannot_use_the_device_registering_is_refused() -> None:
    def ready() -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    library = Library()
    with pytest.raises(LockRefused, match="forked subprocess"):
        HostRuntime(library, "cuda", ready).register(MIB, 5)
    assert library.calls == []


def test_a_function_is_found_in_what_a_loaded_library_was_linked_with() -> None:
    library = loaded_library("libtorch_cpu.so")
    assert library is not None
    assert library["omp_get_max_threads"]() > 0
    assert loaded_library("libnothing.so") is None


@pytest.fixture
def fresh_runtime() -> Iterator[None]:
    pinning._host_runtime.cache_clear()
    yield
    pinning._host_runtime.cache_clear()


@pytest.mark.usefixtures("fresh_runtime")
def test_the_runtime_is_the_one_that_torch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pinning, "loaded_library", lambda name: asked.append(name) or Library())
    monkeypatch.setattr(torch.version, "hip", None)
    assert isinstance(find_runtime(torch.device("cuda")), HostRuntime)
    assert asked == ["libc10_cuda.so"]


@pytest.mark.usefixtures("fresh_runtime")
def test_memory_is_registered_while_its_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    library, current = Library(), []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        library.calls.append(("device", index))
        yield

    monkeypatch.setattr(pinning, "loaded_library", lambda name: library)
    monkeypatch.setattr(torch.cuda, "init", lambda: library.calls.append(("init",)))
    monkeypatch.setattr(torch.cuda, "device", device)
    for found in (find_runtime(torch.device("cuda", 3)), find_runtime(torch.device("cuda"))):
        assert found is not None
        found.register(MIB, 5)
        current.append([call[:2] for call in library.calls])
        library.calls.clear()
    assert current == [[("init",), ("device", 3), ("register", MIB)], [("init",), ("register", MIB)]]


@pytest.mark.usefixtures("fresh_runtime")
def test_a_library_without_the_functions_is_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "loaded_library", lambda name: Library("other"))
    assert find_runtime(torch.device("cuda")) is None


@pytest.mark.usefixtures("fresh_runtime")
def test_other_devices_have_no_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "loaded_library", lambda name: None)
    assert [find_runtime(torch.device(kind)) for kind in ("cpu", "xpu", "cuda", "mps")] == [None] * 4


# -- pools and devices ------------------------------------------------------------------------------------------


def test_a_pool_is_locked_once_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RecordingRuntime()
    monkeypatch.setattr(locking, "find_runtime", lambda device: runtime if device.type == "cuda" else None)
    pool = Pool(MIB, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    locking.lock(pool, torch.device("cpu"))
    pool.ledger.apply(acquired(pool), SlotEvent.FAILED)
    assert pool.locked_bytes == 0
    locking.lock(pool, torch.device("cuda"))
    locking.lock(pool, torch.device("cuda"))
    assert (pool.locked_bytes, runtime.calls) == (PAGE_BYTES, 1)
    pool.close()
    assert runtime.ranges == {}


def test_without_an_accelerator_nothing_is_locked_or_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    pool = new_pool(RecordingRuntime())
    locking.lock(pool)
    slot, held = leased(pool)
    del held
    pool.reclaim()
    assert slot.state is SlotState.FREE
    pool.close()
