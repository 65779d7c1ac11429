"""What fences are made of: events of the driver's behind all that a device was given, or waiting for the device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shmloader.device.accelerator import Event
from shmloader.device.fence import Driver
from shmloader.device.pinning import RELAXED

SUCCESS, NOT_READY = 0, 600
#: Flags of an event: who waits sleeps, and there is no clock to be read.
BLOCKING_SYNC, DISABLE_TIMING = 1, 2


# -- where the driver has an event behind a whole context -------------------------------------------------------


class ContextDriver:
    """CUDA's driver, with one event for the primary context of every device that is in use.

    Primary contexts are what torch works in, as do all that use CUDA's runtime. Contexts that somebody creates beside
    them are not seen.

    Args:
        library: finds functions by name.

    Raises:
        AttributeError: the driver is older than CUDA 12.5.
    """

    def __init__(self, library: Any) -> None:
        def function(name: str, *arguments: Any) -> Callable[..., int]:
            found = library[name]
            found.restype, found.argtypes = ctypes.c_int, arguments
            checked: Callable[..., int] = found
            return checked

        handle, out_handle, out_int = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
        self._record_event = function("cuCtxRecordEvent", handle, handle)
        self._count_devices = function("cuDeviceGetCount", out_int)
        self._get_device = function("cuDeviceGet", out_int, ctypes.c_int)
        self._context_state = function("cuDevicePrimaryCtxGetState", ctypes.c_int, out_int, out_int)
        self._retain_context = function("cuDevicePrimaryCtxRetain", out_handle, ctypes.c_int)
        self._push = function("cuCtxPushCurrent_v2", handle)
        self._pop = function("cuCtxPopCurrent_v2", out_handle)
        self._exchange_mode = function("cuThreadExchangeStreamCaptureMode", out_int)
        self._create_event = function("cuEventCreate", out_handle, ctypes.c_uint)
        self._query_event = function("cuEventQuery", handle)
        self._wait_for_event = function("cuEventSynchronize", handle)
        self._devices: list[int] = []
        #: Contexts in use, by device. Never released, so that their handles stay good.
        self._contexts: dict[int, int] = {}
        #: Events that can be recorded again, by context.
        self._spare: dict[int, list[int]] = {}

    def record(self) -> list[Event]:
        made: list[_ContextEvent] = []
        try:
            made.extend(self._recorded(context) for context in self._in_use())
        except RuntimeError:
            for event in made:
                event.give_back()
            raise
        if not made:
            # What is page-locked was so in some context. Not to see it must not mean that there is nothing to wait for.
            raise RuntimeError("the CUDA driver shows no device in use")
        return list(made)

    def _in_use(self) -> list[int]:
        if not self._devices:
            self._devices = self._find_devices()
        flags, active = ctypes.c_int(), ctypes.c_int()
        for device in self._devices:
            if device not in self._contexts:
                _check(self._context_state(device, ctypes.byref(flags), ctypes.byref(active)))
                if active.value:
                    context = ctypes.c_void_p()
                    _check(self._retain_context(ctypes.byref(context), device))
                    self._contexts[device] = context.value or 0
        return list(self._contexts.values())

    def _find_devices(self) -> list[int]:
        number, device = ctypes.c_int(), ctypes.c_int()
        _check(self._count_devices(ctypes.byref(number)))
        found = []
        for index in range(number.value):
            _check(self._get_device(ctypes.byref(device), index))
            found.append(device.value)
        return found

    def _recorded(self, context: int) -> _ContextEvent:
        event = self._spare[context].pop() if self._spare.get(context) else self._created(context)
        made = _ContextEvent(self, context, event)
        try:
            _check(self._record_event(context, event))
        except RuntimeError:
            made.give_back()
            raise
        return made

    def _created(self, context: int) -> int:
        event = ctypes.c_void_p()
        with self.inside(context):
            _check(self._create_event(ctypes.byref(event), BLOCKING_SYNC | DISABLE_TIMING))
        return event.value or 0

    @contextmanager
    def inside(self, context: int) -> Iterator[None]:
        """What is asked inside is asked in ``context``, and breaks no capture of another thread's.

        Raises:
            RuntimeError: the context is gone.
        """
        popped, mode = ctypes.c_void_p(), ctypes.c_int(RELAXED)
        _check(self._push(context))
        try:
            self._exchange_mode(ctypes.byref(mode))
            try:
                yield
            finally:
                self._exchange_mode(ctypes.byref(mode))
        finally:
            self._pop(ctypes.byref(popped))


class _ContextEvent:
    """Behind everything that was enqueued in one context."""

    __slots__ = ("_context", "_driver", "_event", "_over")

    def __init__(self, driver: ContextDriver, context: int, event: int) -> None:
        self._driver, self._context, self._event = driver, context, event
        self._over = False

    def query(self) -> bool:
        if not self._over:
            with self._driver.inside(self._context):
                code = self._driver._query_event(self._event)
            if code == NOT_READY:
                return False
            _check(code)
            self.give_back()
        return True

    def synchronize(self) -> None:
        if not self._over:
            with self._driver.inside(self._context):
                code = self._driver._wait_for_event(self._event)
            _check(code)
            self.give_back()

    def give_back(self) -> None:
        """The event is over and can be recorded anew."""
        self._over = True
        self._driver._spare.setdefault(self._context, []).append(self._event)


def _check(code: int) -> None:
    if code != SUCCESS:
        raise RuntimeError(f"the CUDA driver answers error {code}")


# -- where it has not -------------------------------------------------------------------------------------------


class WaitingDriver:
    """Fences that pass only when somebody waits for all that the devices have to do.

    Args:
        synchronize: waits until every device in use has done what it was given; raises RuntimeError.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._made = self._over = 0

    def record(self) -> list[Event]:
        self._made += 1
        return [_Turn(self, self._made)]

    def is_over(self, turn: int) -> bool:
        """Whether somebody has waited since the fence of ``turn`` was made."""
        return turn <= self._over

    def wait(self) -> None:
        """Wait for the devices.

        Raises:
            RuntimeError: a device is out of order.
        """
        made = self._made
        self._synchronize()
        self._over = made


@dataclass(frozen=True, slots=True)
class _Turn:
    _driver: WaitingDriver
    _number: int

    def query(self) -> bool:
        return self._driver.is_over(self._number)

    def synchronize(self) -> None:
        if not self.query():
            self._driver.wait()


def synchronize_all() -> None:
    """Wait until every CUDA or ROCm device that this process uses has done what it was given.

    Raises:
        RuntimeError: a device is out of order.
    """
    if not torch.cuda.is_initialized():
        return
    used = getattr(torch._C, "_cuda_hasPrimaryContext", lambda index: True)
    for index in range(torch.cuda.device_count()):
        if used(index):
            torch.cuda.synchronize(index)


@functools.cache
def find_driver() -> Driver:
    """The driver of this process's CUDA or ROCm devices."""
    if not torch.version.hip:
        with contextlib.suppress(OSError, AttributeError):
            return ContextDriver(ctypes.CDLL("libcuda.so.1"))  # as CUDA's runtime finds it
    return WaitingDriver(synchronize_all)
