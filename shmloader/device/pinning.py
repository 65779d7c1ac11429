"""How host memory is page-locked, so that a device reads it by itself while the training thread goes on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from shmloader.errors import PlatformWarning

#: Flag of a registration: for every context of the process, not only for the one that is current.
PORTABLE = 1
#: The error "this memory is not registered", of CUDA and of HIP.
NOT_REGISTERED = 713
#: The capture mode in which a thread may allocate and register while another one captures a graph.
RELAXED = 2


class LockRefused(Exception):
    """The system does not page-lock, or does not unlock, a range; the text says why."""


class Runtime(Protocol):
    """What page-locks ranges of addresses."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range.

        Raises:
            LockRefused: it is not page-locked.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo it for the range that begins at ``address``.

        Raises:
            LockRefused: the device may go on reading these pages.
        """
        ...


class HostRuntime:
    """CUDA's or HIP's runtime, through one library handle.

    Args:
        library: finds functions by name. It has to be the copy that torch calls: an error belongs to the copy in which
            it arose, and one that is left there is raised by the user's next call of torch's.
        prefix: what the functions' names begin with, ``"cuda"`` or ``"hip"``.
        ready: inside, torch is initialised (which tells forked children that they cannot use the device) and the
            device is current: whichever is, gets a context, and that takes memory of it.

    Raises:
        AttributeError: the library lacks a function.
    """

    def __init__(self, library: Any, prefix: str, ready: Callable[[], AbstractContextManager[Any]]) -> None:
        self._ready = ready

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = library[prefix + name]
            found.restype, found.argtypes = result, arguments
            return found

        self._register = function("HostRegister", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = function("HostUnregister", ctypes.c_int, ctypes.c_void_p)
        self._last_error = function("GetLastError", ctypes.c_int)
        self._error_text = function("GetErrorString", ctypes.c_char_p, ctypes.c_int)
        self._exchange_mode = function("ThreadExchangeStreamCaptureMode", ctypes.c_int, ctypes.POINTER(ctypes.c_int))

    def register(self, address: int, nbytes: int) -> None:
        with self._inside():
            self._check(self._register(address, nbytes, PORTABLE))

    def unregister(self, address: int) -> None:
        with self._inside():
            self._check(self._unregister(address), harmless=NOT_REGISTERED)

    def _check(self, code: int, harmless: int = 0) -> None:
        if code:
            self._last_error()  # clears it
            if code != harmless:
                raise LockRefused(f"{self._error_text(code).decode(errors='replace')}, error {code}")

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            with self._ready(), self._relaxed():
                yield
        except RuntimeError as error:
            raise LockRefused(str(error)) from error

    @contextmanager
    def _relaxed(self) -> Iterator[None]:
        # Otherwise a registration would break a graph that another thread captures meanwhile.
        mode = ctypes.c_int(RELAXED)
        self._exchange_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_mode(ctypes.byref(mode))


def find_runtime(device: torch.device) -> Runtime | None:
    """What page-locks memory for ``device`` in this process, or None.

    None is what other devices than CUDA's and ROCm's have, and builds of torch that hide the runtime in themselves.
    """
    return _host_runtime("hip" if torch.version.hip else "cuda", device.index) if device.type == "cuda" else None


@functools.cache
def _host_runtime(prefix: str, index: int | None) -> Runtime | None:
    # A function is looked for in a library and in what that was linked with: here, in the copy of the runtime that
    # torch calls, whatever it is named and whatever other copies this process has loaded.
    library = loaded_library(f"libc10_{prefix}.so")
    if library is None:
        return None
    try:
        return HostRuntime(library, prefix, functools.partial(_device_current, index))
    except AttributeError:
        return None


def _device_current(index: int | None) -> AbstractContextManager[Any]:
    torch.cuda.init()
    return torch.cuda.device(index) if index is not None else nullcontext()


def loaded_library(name: str) -> ctypes.CDLL | None:
    """A library that this process has loaded, by the beginning of its file name; None if it has not."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    # The sixth field, which may hold spaces.
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    for path in paths:
        if os.path.basename(path).startswith(name):
            with contextlib.suppress(OSError):  # mapped by somebody who only reads it
                return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return None


class PageLock:
    """The ranges of one pool that are page-locked. In a forked child, where there is no device, it does nothing.

    One registration for each range that is covered, which is a slot: a copy may not straddle two registrations, and a
    slot is given back as a whole.

    Args:
        runtime: what page-locks them.
        notices: gets a warning of the first refusal.
    """

    def __init__(self, runtime: Runtime, notices: list[Warning]) -> None:
        self._runtime, self._notices = runtime, notices
        self._lengths: dict[int, int] = {}  # by address
        self._addresses: list[int] = []  # sorted
        self._refused = self._warned = False
        self._pid = os.getpid()
        #: Bytes that are page-locked.
        self.nbytes = 0

    def cover(self, address: int, nbytes: int) -> None:
        """Page-lock a range.

        A system that refuses one is not asked again until another has been given back: every refusal takes its time,
        and what is refused has only to be copied once more, by whoever sends it to the device.
        """
        if self._refused or not nbytes or not self._may_call():
            return
        # Noted first: of what is cut short in between, too much is undone rather than too little.
        self._note(address, nbytes)
        try:
            self._runtime.register(address, nbytes)
        except LockRefused as refusal:
            self._forget(address)
            self._refused = True
            self._warn(nbytes, refusal)

    def uncover(self, address: int) -> bool:
        """Undo it for the range that begins at ``address``; whether its pages may be given back now.

        If not, the device keeps them, and reads them whatever lies at these addresses later.
        """
        if not self._may_call():
            return False
        if address not in self._lengths:
            return True
        try:
            self._runtime.unregister(address)
        except LockRefused:
            return False
        self._forget(address)
        self._refused = False
        return True

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether a range lies within one that is page-locked, so that one copy can read it."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return False
        start = self._addresses[place]
        return address + nbytes <= start + self._lengths[start]

    def _may_call(self) -> bool:
        return self._pid == os.getpid() and not sys.is_finalizing()

    def _note(self, address: int, nbytes: int) -> None:
        self._lengths[address] = nbytes
        insort(self._addresses, address)
        self.nbytes += nbytes

    def _forget(self, address: int) -> None:
        self._addresses.remove(address)
        self.nbytes -= self._lengths.pop(address)

    def _warn(self, nbytes: int, refusal: LockRefused) -> None:
        if not self._warned:
            self._warned = True
            text = (
                f"the system refuses to page-lock {nbytes} bytes of the slot pool ({refusal}) beside the {self.nbytes} "
                "that it has; batches in them are copied once more on their way to the device. "
                "Look at `ulimit -l`, or lower memory_limit"
            )
            self._notices.append(PlatformWarning(text))
