"""What a worker is made from, and how it gets there.

A forked worker simply has it. For spawn and forkserver the data set and the functions are pickled once, into an
anonymous file that all workers map privately: nothing large goes through the start pipe (more than 64 KiB there blocks
``start()`` until the child has imported everything), and tensors and arrays stay pages of that one file until a worker
writes to them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any

from shmloader.memory.codec import Encoded, dismantle, join, pieces


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker of an iterator has in common."""

    dataset_kind: int
    dataset: Any
    auto_collation: bool
    #: One for whole batches; two, for inputs and for targets, where targets may come late.
    collate_fns: tuple[Callable[[Any], Any], ...]
    drop_last: bool
    worker_init_fn: Callable[[int], None] | None
    base_seed: int
    num_workers: int
    seed_batches: bool


class FdParcel:
    """A descriptor on its way to a child: pickled while the child is started, it arrives as a descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _arrived, (reduction.DupFd(self.fd),)


def _arrived(parcel: Any) -> FdParcel:
    return FdParcel(parcel.detach())


class Payload:
    """A :class:`Job` in an anonymous file, for children that are not forked from this process.

    Raises:
        Exception: whatever pickling the data set or a function raises.
    """

    def __init__(self, job: Job) -> None:
        inherited = _Inherited()
        # Locks, queues and shared tensors refuse to be pickled unless a child is being started. Standing in for it
        # lets one pickle serve all workers: the descriptors are collected here and passed to each.
        context.set_spawning_popen(inherited)  # type: ignore[arg-type]
        self._file, self._fds = -1, inherited.fds
        try:
            encoded = dismantle(job, keep_shared=True)
            context.set_spawning_popen(None)
            self._file, self._nbytes = _write(encoded)
        except BaseException:
            self.close()
            raise
        finally:
            context.set_spawning_popen(None)

    def __reduce__(self) -> Any:
        return _load, (FdParcel(self._file), self._nbytes, [FdParcel(fd) for fd in self._fds])

    def close(self) -> None:
        """Close the descriptors; the workers have their own."""
        for fd in (self._file, *self._fds):
            if fd >= 0:
                os.close(fd)
        self._file, self._fds = -1, []


class _Inherited:
    """Plays the part of the child's popen while the job is pickled."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1

    @staticmethod
    def DupFd(number: int) -> _InheritedFd:  # noqa: N802 - multiprocessing looks for this name
        return _InheritedFd(number)


class _InheritedFd:
    """A descriptor inside the job's pickle: its number among those that came along."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        return os.dup(_arriving[self._number])


#: Descriptors that came along with the job that is being unpickled.
_arriving: list[int] = []


def _write(encoded: Encoded) -> tuple[int, int]:
    file = os.memfd_create("shmloader-job", os.MFD_CLOEXEC)
    nbytes = 0
    for piece in pieces(encoded):
        view = memoryview(piece)
        while view.nbytes:
            written = os.pwrite(file, view, nbytes)
            view, nbytes = view[written:], nbytes + written
    return file, nbytes


def _load(file: FdParcel, nbytes: int, fds: list[FdParcel]) -> Unopened:
    return Unopened(file.fd, nbytes, [parcel.fd for parcel in fds])


class Unopened:
    """The job as it arrives in a child, not yet unpickled: that may import the world, and may fail."""

    def __init__(self, file: int, nbytes: int, fds: list[int]) -> None:
        self._file, self._nbytes, self._fds = file, nbytes, fds

    def open(self) -> Job:
        """Unpickle the job. Its tensors and arrays are private copy-on-write pages of the file."""
        pages = mmap.mmap(self._file, self._nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(self._file)
        _arriving[:] = self._fds
        try:
            job: Job = join(pages)
            return job
        finally:
            _arriving.clear()
            for fd in self._fds:
                os.close(fd)
