"""One shared mapping: created, reserved page by page, mapped in workers, given back.

The file is anonymous (``memfd_create``): it has no name that could leak or collide, lies outside ``/dev/shm``'s size
limit, and the kernel frees it when the last process that maps it is gone. It is sparse: only reserved ranges cost
memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

from shmloader.errors import PoolMemoryError

PAGE_BYTES = mmap.PAGESIZE
#: Pages are reserved in steps, and what is left is read again before each: other ranks reserve at the same time,
#: and a reservation past a cgroup's limit does not fail, it gets this process killed.
STEP_BYTES = 32 << 20
#: What a reservation leaves to the rest of the machine.
MARGIN_BYTES = 64 << 20
#: Where address space itself is limited (RLIMIT_AS) the mapping shrinks down to this before it gives up.
LEAST_BYTES = 1 << 20

_SUPPORTED = hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate") and hasattr(mmap, "MADV_REMOVE")


def supported() -> bool:
    """Whether this platform has anonymous shared files."""
    return _SUPPORTED


class Segment:
    """``nbytes`` of shared address space. Never pickled: workers get the descriptor and attach.

    Args:
        nbytes: size of the mapping; a multiple of the page size. It shrinks when address space is limited.
        available: returns how many bytes the machine and its cgroup have left; asked before each step.

    Raises:
        PoolMemoryError: not even :data:`LEAST_BYTES` of address space can be had.
    """

    def __init__(self, nbytes: int, available: Callable[[], int]) -> None:
        self._available = available
        self._credit_bytes = 0
        fd = os.memfd_create("shmloader-pool", os.MFD_CLOEXEC)
        self.nbytes, self.map = _map_largest(fd, nbytes)  # closes the descriptor if it fails
        self.fd = fd
        self.address = address_of(self.map)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map an existing segment in a worker; takes over ``fd``."""
        segment = cls.__new__(cls)
        segment._available = lambda: 0
        segment._credit_bytes = 0
        segment.fd, segment.nbytes = fd, nbytes
        segment.map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        segment.address = address_of(segment.map)
        return segment

    def reserve(self, offset: int, nbytes: int) -> None:
        """Make sure that the pages of a range exist, so that writing to them cannot end in a SIGBUS.

        Raises:
            PoolMemoryError: the machine or the cgroup has too little left; nothing of the range stays reserved.
        """
        end = offset + nbytes
        for start in range(offset, end, STEP_BYTES):
            step = min(STEP_BYTES, end - start)
            try:
                self._check(step)
                os.posix_fallocate(self.fd, start, step)
            except (OSError, PoolMemoryError) as error:
                self.punch(offset, start - offset)
                if isinstance(error, PoolMemoryError):
                    raise
                raise PoolMemoryError(f"could not reserve {step} bytes for the slot pool: {error}") from error

    def _check(self, step: int) -> None:
        # Reading the limits costs near a millisecond; one reading is good for one step, however small the slots are.
        if step > self._credit_bytes:
            left = self._available()
            if left - MARGIN_BYTES < step:
                raise PoolMemoryError(
                    f"the slot pool needs {step} more bytes, but only {left} are left on this machine or in its "
                    f"container ({MARGIN_BYTES} are kept back); lower memory_limit, prefetch_factor or num_workers"
                )
            self._credit_bytes = STEP_BYTES
        self._credit_bytes -= step

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the pages of a range back. Nobody may read the range; later reads would see zeros."""
        if nbytes:
            self.map.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last lease on it does. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
            self.fd = -1

    def __reduce__(self) -> str:
        raise TypeError("a Segment cannot be pickled; pass its descriptor and size, and attach")


def _map_largest(fd: int, nbytes: int) -> tuple[int, mmap.mmap]:
    """Map ``nbytes``, or where they are too many, a half to a quarter of what there is: the process needs some, too."""
    wanted = nbytes
    while True:
        try:
            os.ftruncate(fd, nbytes)
            pages = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
            if nbytes in (wanted, LEAST_BYTES):
                return nbytes, pages
            pages.close()
            wanted = nbytes = _half(nbytes)
        except (OSError, MemoryError, ValueError) as error:
            if nbytes <= LEAST_BYTES:
                os.close(fd)
                raise PoolMemoryError(f"no address space for a slot pool of {nbytes} bytes: {error}") from error
            nbytes = _half(nbytes)


def _half(nbytes: int) -> int:
    return max(LEAST_BYTES, nbytes // 2 // PAGE_BYTES * PAGE_BYTES)


def address_of(buffer: mmap.mmap | bytearray) -> int:
    """The address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
