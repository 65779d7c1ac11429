"""torch's collate, allocating inside the slot.

In a worker, ``default_collate`` (and PyG's, tensordict's, and most custom collates built on it) get the memory of their
output from ``UntypedStorage._new_shared``. While the *final* collate function runs, that allocation comes out of the
granted range, so torch's own code stacks the samples right where the training loop will read them. At any other time,
and when the range is full, it is ordinary private memory: never a file in ``/dev/shm``, which may be tiny, and never
the range for the data set itself, which may cache what it collates.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate

from shmloader.memory.codec import aligned
from shmloader.memory.columns import Room
from shmloader.memory.lease import lease
from shmloader.memory.pool import private_buffer
from shmloader.memory.segment import Segment
from shmloader.memory.stack import stack

#: So many places in the pool are remembered, each with what writes to it.
MOST_ROOMS = 64


class Arena:
    """The range that the current batch was granted, handed out front to back.

    What is handed out sits on a lease of its own per batch, so that a collate function that keeps a part of what it
    returned is noticed: see :meth:`close`.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._lease: Any = None
        self._leases = itertools.count()
        self._token: tuple[int, int] = (0, 0)
        #: The thread that collates now, or 0. Other threads (the data set's, the collate function's) get private
        #: memory: they know nothing of when a batch begins and ends.
        self._collator = 0
        #: Ranges that nothing refers to any more, in no order: (offset, number of the lease).
        self.returned: deque[tuple[int, int]] = deque()
        #: False once something was kept: from then on batches are collated outside and copied in.
        self.direct = True
        self.offset = self.capacity = self.used = 0
        self._rooms: dict[int, Room] = {}

    @property
    def address(self) -> int:
        """Address of the range in this process."""
        return self._segment.address + self.offset

    def open(self, offset: int, capacity: int) -> None:
        """Begin a batch in this range; a capacity of 0 means that there is none yet."""
        self.offset, self.capacity, self.used = offset, capacity, 0

    def close(self) -> bool:
        """End the batch, which the caller has dropped; True if something still refers to its range."""
        if self._lease is None:
            return False
        self._lease = None
        try:
            # The finalizer has run by now if this was the last reference.
            self.returned.remove(self._token)
        except ValueError:
            self.direct = False
            return True
        return False

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage for one output of the collate function: in the range if it is the moment and fits."""
        start = self._take(nbytes)
        if start is None:
            return torch.UntypedStorage(nbytes)
        return torch.frombuffer(self._lease, dtype=torch.uint8, count=nbytes, offset=start).untyped_storage()

    def find_room(self, nbytes: int) -> Room:
        """Where a batch of ``nbytes`` is to be stacked: in the range if it fits."""
        if nbytes > self.capacity - self.used:
            buffer = private_buffer(nbytes)
            return Room(buffer, 0, buffer.ctypes.data)
        offset = self.offset + self.used
        self.used = min(aligned(self.used + nbytes), self.capacity)
        room = self._rooms.get(offset)
        if room is None:
            if len(self._rooms) >= MOST_ROOMS:
                self._rooms.clear()
            room = self._rooms[offset] = Room(self._segment.map, offset, self._segment.address)
        return room

    def _take(self, nbytes: int) -> int | None:
        """Where in the range the next ``nbytes`` go; None if they cannot go there now."""
        if not (self.direct and 0 < nbytes <= self.capacity - self.used and self._collator == get_ident()):
            return None
        if self._lease is None:
            self._token = self.offset, next(self._leases)
            self._lease = lease(self._segment.map, self.offset, self.capacity, self._token, self.returned)
        start = self.used
        self.used = min(aligned(start + nbytes), self.capacity)
        return start

    def collating(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``collate_fn``, with its allocations in the range."""

        def collate(samples: Any) -> Any:
            self._collator = get_ident()
            try:
                return collate_fn(samples)
            finally:
                self._collator = 0

        if collate_fn is default_collate:
            return lambda samples: stack(samples, self.find_room, collate)
        return collate


@contextmanager
def allocating_in(arena: Arena) -> Iterator[None]:
    """Let ``arena`` provide what torch would allocate in shared memory for the CPU."""
    original: Callable[..., torch.UntypedStorage] = torch.UntypedStorage._new_shared

    def new_shared(size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        kind = device.type if isinstance(device, torch.device) else torch.device(device).type
        return arena.allocate(size) if kind == "cpu" else original(size, device=device)

    torch.UntypedStorage._new_shared = staticmethod(new_shared)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage._new_shared = original  # type: ignore[method-assign]
