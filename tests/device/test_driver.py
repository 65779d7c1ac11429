"""What fences are made of: an event for each device in use, which no other device's work lets pass."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest
import torch

from shmloader.device import driver as drivers
from shmloader.device.driver import ContextDriver, WaitingDriver, find_driver, synchronize_all
from shmloader.device.fence import Quarantine
from shmloader.memory.slots import Slot


def slots(*offsets: int) -> list[Slot]:
    return [Slot(offset, 1) for offset in offsets]


# -- an event behind a whole context ----------------------------------------------------------------------------


class Cuda:
    """Plays libcuda: contexts of several devices, and events that are behind all that a context was given."""

    NOT_READY, INVALID_CONTEXT, CAPTURING = 600, 201, 900
    FIRST = 50

    def __init__(self, devices: int = 3) -> None:
        self.in_use = [False] * devices
        self.given = Counter[int]()
        self.done = Counter[int]()
        self.events: dict[int, tuple[int, int]] = {}
        self.stack: list[int] = []
        self.mode = 0
        self.counts = Counter[str]()
        self.refuses = False
        self.refused_context = 0
        self.initialised = True

    def __getitem__(self, name: str) -> Any:
        method = getattr(self, name)

        def function(*args: Any) -> int:
            self.counts[name] += 1
            return int(method(*args))

        return function

    def cuDeviceGetCount(self, number: Any) -> int:
        number._obj.value = len(self.in_use)
        return 0 if self.initialised else 3

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = self.FIRST + index
        return 0

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> int:
        active._obj.value = self.in_use[device - self.FIRST]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        index = device - self.FIRST
        assert self.in_use[index], "a context would be made"
        context._obj.value = 100 + index
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:
        self.stack.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self.stack.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        assert flags == 3
        event._obj.value = 1000 + len(self.events)
        self.events[event._obj.value] = (self.stack[-1], 0)
        return 0

    def cuCtxRecordEvent(self, context: int, event: int) -> int:
        if self.refuses or context == self.refused_context:
            return self.CAPTURING
        assert self.events[event][0] == context, "an event of another context"
        self.events[event] = (context, self.given[context])
        return 0

    def cuEventQuery(self, event: int) -> int:
        assert self.mode == 2, "in another mode this would break a capture"
        context, work = self.events[event]
        if not self.stack or self.stack[-1] != context:
            return self.INVALID_CONTEXT
        return 0 if work <= self.done[context] else self.NOT_READY

    def cuEventSynchronize(self, event: int) -> int:
        code = self.cuEventQuery(event)
        if code == self.NOT_READY:
            context, work = self.events[event]
            self.done[context] = work
            code = 0
        return code


def test_there_is_one_event_for_each_device_in_use_and_no_context_is_made() -> None:
    cuda = Cuda()
    driver = ContextDriver(cuda)
    cuda.in_use[1] = True
    assert len(driver.record()) == 1
    cuda.in_use[0] = True
    assert len(driver.record()) == 2
    assert cuda.counts["cuDevicePrimaryCtxRetain"] == 2
    assert (cuda.stack, cuda.mode) == ([], 0), "the thread is as it was"


def test_an_event_passes_with_its_own_devices_work() -> None:
    cuda = Cuda()
    cuda.in_use[:2] = [True, True]
    cuda.given.update({100: 1, 101: 5})
    first, second = ContextDriver(cuda).record()
    assert not first.query()
    assert not second.query()
    cuda.done[100] = 1
    assert first.query()
    assert not second.query()
    second.synchronize()
    assert cuda.done[101] == 5
    assert second.query()
    assert (cuda.stack, cuda.mode) == ([], 0)


def test_events_are_used_again_but_only_when_they_have_passed() -> None:
    cuda = Cuda()
    cuda.in_use[0] = True
    driver = ContextDriver(cuda)
    for _ in range(10):
        cuda.given[100] += 1
        (older,) = driver.record()
        (newer,) = driver.record()
        assert not older.query()
        cuda.done[100] = cuda.given[100]
        assert older.query()
        newer.synchronize()
        cuda.given[100] += 1
        (busy,) = driver.record()
        assert older.query(), "it stays over, whatever its event is used for now"
        assert not busy.query()
        busy.synchronize()
    assert len(cuda.events) == 2


def test_an_event_that_could_not_be_recorded_is_no_fence() -> None:
    cuda = Cuda()
    cuda.in_use[0] = True
    driver = ContextDriver(cuda)
    cuda.refuses = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="error 900"):
            driver.record()
    cuda.refuses = False
    driver.record()
    assert len(cuda.events) == 1


def test_errors_of_the_device_are_raised() -> None:
    cuda = Cuda()
    cuda.in_use[0] = True
    cuda.cuEventQuery = cuda.cuEventSynchronize = lambda event: 700  # type: ignore[method-assign]
    (event,) = ContextDriver(cuda).record()
    for ask in (event.query, event.synchronize):
        with pytest.raises(RuntimeError, match="error 700"):
            ask()
    assert (cuda.stack, cuda.mode) == ([], 0)


@pytest.mark.parametrize("initialised", [True, False])
def test_a_driver_that_shows_no_device_in_use_makes_no_fence(initialised: bool) -> None:
    cuda = Cuda()
    cuda.initialised = initialised
    with pytest.raises(RuntimeError):
        ContextDriver(cuda).record()


def test_events_of_a_fence_that_came_to_nothing_are_used_again() -> None:
    cuda = Cuda()
    cuda.in_use[:2] = [True, True]
    driver = ContextDriver(cuda)
    cuda.refused_context = 101
    for _ in range(5):
        with pytest.raises(RuntimeError, match="error 900"):
            driver.record()
    assert len(cuda.events) == 2
    cuda.refused_context = 0
    assert len(driver.record()) == 2
    assert len(cuda.events) == 2


def test_an_older_driver_is_told_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError):
        ContextDriver(type("Older", (Cuda,), {"cuCtxRecordEvent": property()})())
    find_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda())
    assert isinstance(find_driver(), ContextDriver)
    find_driver.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert isinstance(find_driver(), WaitingDriver)
    find_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(drivers, "ContextDriver", lambda library: library.cuCtxRecordEvent)
    assert isinstance(find_driver(), WaitingDriver)
    find_driver.cache_clear()


# -- without such events ----------------------------------------------------------------------------------------


def test_without_events_a_slot_leaves_when_somebody_has_waited_since() -> None:
    waits: list[int] = []
    quarantine = Quarantine(WaitingDriver(lambda: waits.append(1)))
    quarantine.enter(early := slots(0))
    quarantine.enter(late := slots(1))
    assert quarantine.leave() == []
    assert quarantine.wait() == early + late, "one wait is for all that came before it"
    quarantine.enter(slots(2))
    assert quarantine.leave() == []
    assert len(waits) == 1


def test_a_fence_that_is_made_during_a_wait_is_not_what_was_waited_for() -> None:
    driver = WaitingDriver(lambda: made.extend(driver.record()))
    made = driver.record()
    made[0].synchronize()
    assert [event.query() for event in made] == [True, False]


def test_without_events_a_wait_that_fails_lets_nothing_go() -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    quarantine = Quarantine(WaitingDriver(fail))
    quarantine.enter(slots(0))
    assert quarantine.wait() == quarantine.leave() == []


def test_all_devices_in_use_are_waited_for_and_no_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    synchronize_all()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index % 2 == 1, raising=False)
    synchronize_all()
    assert waited == [1, 3]
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext")
    synchronize_all()
    assert waited == [1, 3, 0, 1, 2, 3]
