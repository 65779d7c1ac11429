"""A pool: one segment, its ledger, and the leases that come back; and the register of all pools of this process.

A pool belongs to one loader and is lent to one live iterator at a time; it outlives iterators, so that the next epoch
finds its slots carved and its pages touched. Leases and iterators hold it, so it outlives its loader if need be.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from shmloader.memory.codec import ALIGN_BYTES
from shmloader.memory.layout import Layout
from shmloader.memory.lease import lease
from shmloader.memory.segment import Segment
from shmloader.memory.slots import Ledger, Slot
from shmloader.workers.protocol import SlotEvent, SlotState

#: What freed slots are filled with under SHMLOADER_DEBUG=1, so that a reader of freed memory sees nonsense at once.
DEBUG_PATTERN = 0xDB

#: Token of a child that somebody else forked: it is never known to be gone.
FOREIGN = object()

#: When so many page-locked slots wait for a device, one of them is waited for instead of one more carved.
MOST_QUARANTINED = 4

#: Every pool of this process. A plain set: a copy of it is one step, whatever other threads do.
_pools: set[weakref.ref[Pool]] = set()
_forking = threading.local()
#: Pools that were closed while some of their slots were page-locked and in use. Unmapped like that, the device would
#: go on reading the old pages under whatever is mapped at the same address next.
_unclosed: set[Pool] = set()
#: For the same reason, those whose ledger may be wrong, for good.
_written_off: set[Pool] = set()


class PageLock(Protocol):
    """Page-locks whole slots, where the system lets it."""

    @property
    def nbytes(self) -> int: ...

    def cover(self, address: int, nbytes: int) -> None: ...

    def uncover(self, address: int) -> bool: ...

    def covers(self, address: int, nbytes: int) -> bool: ...


class Guard(Protocol):
    """Knows until when a device may read slots that were handed out page-locked."""

    def mark(self) -> object: ...

    def captured(self, mark: object) -> bool: ...

    def enter(self, slots: list[Slot]) -> None: ...

    def leave(self) -> list[Slot]: ...

    def wait(self) -> list[Slot]: ...

    def __len__(self) -> int: ...


class _Ranges:
    """Parts of the mapping that come and go: their pages, and where a device reads them, their page-locking."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.lock: PageLock | None = None

    def reserve(self, offset: int, nbytes: int) -> None:
        self._segment.reserve(offset, nbytes)
        if self.lock is not None:
            try:
                self.lock.cover(self._segment.address + offset, nbytes)
            except BaseException:
                self.punch(offset, nbytes)
                raise

    def punch(self, offset: int, nbytes: int) -> bool:
        # First the device: what it has page-locked are the old pages, whatever the range holds later.
        if self.lock is not None and not self.lock.uncover(self._segment.address + offset):
            return False
        self._segment.punch(offset, nbytes)
        return True


class Pool:
    """Slots for one loader.

    Args:
        limit_bytes: size of the mapping, and the most that slots may take.
        available: returns how many bytes the machine has left.
        siblings: the loader's other pools, which live on the same budget.
        most_slots: largest number of slots in circulation, or None.
    """

    def __init__(
        self,
        limit_bytes: int,
        available: Callable[[], int],
        siblings: tuple[Pool, ...] = (),
        most_slots: int | None = None,
    ) -> None:
        self.segment = segment = Segment(limit_bytes, available)
        self._siblings = others = weakref.WeakSet(siblings)

        # Without a reference to the pool: in a cycle its mapping would wait for the garbage collector.
        def limit() -> int:
            return segment.nbytes - sum(other.ledger.carved_bytes for other in others)

        self._ranges = ranges = _Ranges(segment)
        self.ledger = Ledger(limit, ranges.reserve, ranges.punch, most_slots)
        self._guard: Guard | None = None
        #: Warnings to be given between two steps: amid one, where they are errors, they would cost a batch.
        self.notices: list[Warning] = []
        for sibling in siblings:
            sibling._siblings.add(self)
        self._returned: deque[Slot] = deque()
        self._gone: deque[object] = deque()
        self._debug = os.environ.get("SHMLOADER_DEBUG") == "1"
        self._pid = os.getpid()
        _pools.add(weakref.ref(self, _pools.discard))

    @property
    def inherited(self) -> bool:
        """Whether it came over a fork: its slots are the parent's to give out."""
        return self._pid != os.getpid()

    @property
    def tainted(self) -> bool:
        """Whether slots are lost for good to children that somebody else forked."""
        return any(FOREIGN in slot.exposed_to for slot in self.ledger)

    def reclaim(self) -> None:
        """Free the slots whose last reader has gone."""
        while self._gone:
            self.ledger.unexpose(self._gone.popleft())
        if self._guard is not None:
            self._quarantine(self._guard)
        while self._returned:
            self._release(self._returned.popleft())

    def _release(self, slot: Slot) -> None:
        self.ledger.release(slot)
        if self._debug:
            self.spoil(slot)

    def _quarantine(self, guard: Guard) -> None:
        entered = []
        while self._returned:
            slot = self._returned.popleft()
            if slot.moved or not self.locked(self.segment.address + slot.offset, slot.capacity):
                self._release(slot)  # a copy from what is not page-locked has read it before the call returned
            elif guard.captured(slot.mark):
                self.ledger.apply(slot, SlotEvent.CAPTURE)
            else:
                self.ledger.apply(slot, SlotEvent.FENCE)
                entered.append(slot)
        if entered:
            guard.enter(entered)
        for slot in guard.leave():
            self._release(slot)

    def wait_for_device(self) -> bool:
        """Wait until a device has read what it may still read of slots that came back; whether any is free now."""
        freed = self._guard.wait() if self._guard is not None else []
        for slot in freed:
            self._release(slot)
        return bool(freed)

    def acquire(self, nbytes: int, lane: int = 0) -> Slot | None:
        """A slot, as of :meth:`Ledger.acquire`; rather than one more, one that a device is about to be through with."""
        waiting = len(self._guard) if self._guard is not None else 0
        short = waiting and not self.ledger.has_free(lane)
        if short and (waiting >= MOST_QUARANTINED or not self.ledger.has_room(nbytes, lane)):
            self.wait_for_device()
        return self.ledger.acquire(nbytes, lane)

    # -- devices -----------------------------------------------------------------------------------------------

    def page_lock(self, lock: PageLock) -> None:
        """Page-lock all slots, those that there are and those that are to come."""
        if self._ranges.lock is None:
            self._ranges.lock = lock
            for slot in self.ledger:
                lock.cover(self.segment.address + slot.offset, slot.capacity)

    def guard(self, guard: Guard) -> None:
        """From now on, page-locked slots are handed out, which a device may read when nothing else does any more."""
        if self._guard is None:
            self._guard = guard

    def locked(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are page-locked."""
        lock = self._ranges.lock
        return lock is not None and lock.covers(address, nbytes)

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked."""
        return self._ranges.lock.nbytes if self._ranges.lock is not None else 0

    # -- slots -------------------------------------------------------------------------------------------------

    def spoil(self, slot: Slot) -> None:
        """Under SHMLOADER_DEBUG=1, fill a free slot with a pattern."""
        if self._debug and slot.state is SlotState.FREE:
            ctypes.memset(self.segment.address + slot.offset, DEBUG_PATTERN, slot.capacity)

    def let_go(self, offset: int) -> None:
        """A worker no longer refers to the range at ``offset``, which it had kept."""
        slot = self.ledger.at(offset)
        self.ledger.apply(slot, SlotEvent.LET_GO)
        self.spoil(slot)

    def abandon(self) -> None:
        """The workers are gone: whatever they were filling or kept, and what nobody will ask for, is free."""
        for slot in self.ledger:
            if slot.state in (SlotState.FILLING, SlotState.KEPT):
                self.ledger.apply(slot, SlotEvent.LOST)
            elif slot.state is SlotState.READY:
                self.ledger.apply(slot, SlotEvent.DISCARD)

    def lend(self, slot: Slot) -> Any:
        """The memory of ``slot``, which is leased until nothing can read what is built on it."""
        self.ledger.apply(slot, SlotEvent.LEASE)
        slot.moved = False
        if self._guard is not None:
            slot.mark = self._guard.mark()
        return lease(self.segment.map, slot.offset, slot.capacity, slot, self._returned)

    def copy_batch(self, slot: Slot, layout: Layout) -> np.ndarray[Any, Any]:
        """The batch's bytes in private memory; the slot's state stays as it is."""
        copy = private_buffer(layout.extent)
        ctypes.memmove(copy.ctypes.data, self.segment.address + slot.offset, layout.extent)
        return copy

    def read(self, slot: Slot, offset: int, nbytes: int) -> bytes:
        """A part of a slot, copied."""
        start = slot.offset + offset
        return self.segment.map[start : start + nbytes]

    def close(self) -> None:
        """Give back every page that nobody can read. What is leased stays valid until it is dropped."""
        if self.inherited:
            return
        self.reclaim()
        while self.wait_for_device():
            pass
        self.ledger.give_back()
        self.segment.close()
        if self.locked_bytes:
            _unclosed.add(self)
        else:
            _unclosed.discard(self)


class Lender:
    """The pools of one loader under one budget: one is kept between epochs, more exist while iterators overlap.

    Args:
        budget: returns the bytes that all pools together may take; asked when a pool is made.
        available: returns how many bytes the machine has left.
        most_slots: as for :class:`Pool`.
    """

    def __init__(self, budget: Callable[[], int], available: Callable[[], int], most_slots: int | None) -> None:
        self._budget, self._available, self._most_slots = budget, available, most_slots
        self._idle: Pool | None = None
        # Held: a pool that the garbage collector found together with its iterator would lose its descriptor and its
        # place in the register, and then come back from the iterator's finalizer.
        self._lent: set[Pool] = set()
        self._closed = False

    def lend(self) -> Pool:
        """A pool for one iterator, the one of the last epoch if it is free.

        Raises:
            PoolMemoryError: no address space is left.
        """
        sweep()
        pool, self._idle = self._idle, None
        if pool is not None and pool.inherited:
            pool = None
        if pool is not None and pool.tainted:
            # Its lost slots come back with the last process that maps it; a fresh pool has none.
            pool.close()
            pool = None
        if pool is None:
            siblings = tuple(other for other in self._lent if not other.inherited)
            pool = Pool(self._budget(), self._available, siblings, self._most_slots)
        self._lent.add(pool)
        return pool

    def take_back(self, pool: Pool) -> None:
        """The iterator has ended: keep its pool for the next, or close it if there is one already."""
        self._lent.discard(pool)
        pool.reclaim()
        pool.ledger.settle()
        if self._closed or self._idle is not None:
            pool.close()
        else:
            self._idle = pool

    def write_off(self, pool: Pool) -> None:
        """The iterator was cut short, perhaps in a step of the ledger: nothing is carved from this pool any more."""
        self._lent.discard(pool)
        pool.segment.close()
        if pool.locked_bytes:
            _written_off.add(pool)

    def close(self) -> None:
        """Give back what is idle; what is lent is closed when it comes back."""
        self._closed = True
        pool, self._idle = self._idle, None
        if pool is not None:
            pool.close()
        sweep()


def sweep() -> None:
    """Close for good what could not be closed before because it was in use."""
    for pool in tuple(_unclosed):
        pool.close()


def private_buffer(nbytes: int) -> np.ndarray[Any, Any]:
    """Private memory, aligned as slots are."""
    raw = np.empty(nbytes + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + nbytes]


# -- forks ------------------------------------------------------------------------------------------------------


@contextmanager
def forking(token: object) -> Iterator[None]:
    """A fork inside belongs to ``token``, whose end :func:`gone` will report."""
    _forking.token = token
    try:
        yield
    finally:
        _forking.token = FOREIGN


def _all_pools() -> list[Pool]:
    # Another thread may make a pool meanwhile; an error from that inside the fork's hook would reach nobody.
    return [pool for ref in _pools.copy() if (pool := ref()) is not None]


def gone(token: object) -> None:
    """The child that was forked under ``token`` has ended and reads nothing any more.

    It is only posted: other pools belong to other threads, and this may come in the middle of one's own step.
    """
    for pool in _all_pools():
        if pool.ledger.exposes(token):
            pool._gone.append(token)


def _expose_leased() -> None:
    # A forked child has copies of the parent's leases, but their ends are nobody's business in the parent: without
    # this the slot would be refilled under a child that still reads it.
    token = getattr(_forking, "token", FOREIGN)
    for pool in _all_pools():
        pool.ledger.expose(token)


# Again after the fork, for what another thread was handed between the two.
os.register_at_fork(before=_expose_leased, after_in_parent=_expose_leased)
