"""The ledger: which slots there are, in which state, and whose turn the free ones are.

It is the only writer of slot states, through :data:`~shmloader.workers.protocol.SLOT_TABLE`, and knows nothing of
processes. A *range* is a part of the mapping; a *slot* is a range with a state. Slots are carved out of free ranges
when a batch needs one and none is free, and dissolved when their size no longer fits what batches need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shmloader.errors import PoolMemoryError, ProtocolError
from shmloader.memory.budget import size_class
from shmloader.workers.protocol import SLOT_TABLE, SlotEvent, SlotState

#: A batch larger than the slots gets a range of its own. One outlier must not make every slot as large as it is;
#: two within about this many batches mean that the sizes have really grown.
OUTLIER_SPACING = 8

#: Slots in these states take part in the circulation: they are free or will be before the consumer lets anything go.
_CIRCULATING = frozenset({SlotState.FREE, SlotState.FILLING, SlotState.READY})
#: Slots in these states are out of circulation through no fault of the consumer; ``slots=`` does not count them.
#: One that a device is about to be through with does count: it is faster to wait for it than to page-lock another.
_SIDELINED = frozenset({SlotState.EXPOSED, SlotState.KEPT, SlotState.RETIRED})
#: A member of an enum takes longer to look up than most steps take.
_FREE, _DISSOLVED = SlotState.FREE, SlotState.DISSOLVED


@dataclass(slots=True, eq=False)
class Slot:
    """A range of the pool and its state. Only the ledger writes ``state``."""

    offset: int
    capacity: int
    state: SlotState = SlotState.FREE
    #: Who may still read the bytes besides the consumer: one token per child that was forked during the lease.
    exposed_to: set[object] = field(default_factory=set)
    #: What the guard of page-locked slots noted when the lease began.
    mark: object = None
    #: Whether only copies to a device that held the lease until they had completed could read the bytes.
    moved: bool = False


class Ledger:
    """The slots of one pool.

    Args:
        limit: returns how many bytes of slots there may be now.
        reserve: makes the pages of a new range exist; raises :class:`PoolMemoryError`. After an exception there are
            none.
        punch: gives the pages of a range back; returns whether the range can be used again.
        most_slots: largest number of slots in circulation, or None.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        reserve: Callable[[int, int], None],
        punch: Callable[[int, int], bool],
        most_slots: int | None = None,
    ) -> None:
        self._limit, self._reserve, self._punch = limit, reserve, punch
        self._most_slots = most_slots
        self._free: dict[int, Slot] = {}  # by offset, in the order in which they were freed
        self._slots: dict[int, Slot] = {}
        self._gaps: list[tuple[int, int]] = []
        self._top = 0
        self._outliers = 0
        self._largest_bytes = 0
        self._peak_slots = 0
        self.typical_bytes = 0
        #: Bytes in slots of any state.
        self.carved_bytes = 0

    # -- reading -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Slot]:
        return iter(tuple(self._slots.values()))

    def count(self, *states: SlotState) -> int:
        """Number of slots in any of ``states``."""
        return sum(slot.state in states for slot in self)

    def summary(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the slots in each state that has any."""
        found: dict[str, tuple[int, int]] = {}
        for slot in self:
            number, nbytes = found.get(slot.state.name, (0, 0))
            found[slot.state.name] = number + 1, nbytes + slot.capacity
        return found

    @property
    def has_free(self) -> bool:
        """Whether any slot is free."""
        return bool(self._free)

    def has_room(self, nbytes: int = 0) -> bool:
        """Whether a slot of at least ``nbytes`` (0: of the usual size) could still be carved."""
        return self._room_for(size_class(max(nbytes, self.typical_bytes, 1)))

    def at(self, offset: int) -> Slot:
        """The slot that begins at ``offset``.

        Raises:
            ProtocolError: there is none.
        """
        if offset not in self._slots:
            raise ProtocolError(f"no slot at {offset}")
        return self._slots[offset]

    def fits(self, nbytes: int) -> bool:
        """Whether a batch of ``nbytes`` could have a slot if no other batch had one."""
        return size_class(nbytes) <= self._limit()

    def spares(self, count: int) -> bool:
        """Whether there is a slot beside those that ``count`` batches are going to ask for."""
        short = count + 1 - len(self._free)
        return short <= 0 or (self._room_for(size_class(self.typical_bytes)) and self._carvable() >= short)

    def circulates_without(self, slot: Slot) -> bool:
        """Whether, with ``slot`` leased for good, some other slot still comes free without the consumer's help."""
        if self._free or any(other is not slot and other.state in _CIRCULATING for other in self):
            return True
        return self._room_for(size_class(self.typical_bytes))

    # -- getting and moving slots ------------------------------------------------------------------------------

    def acquire(self, nbytes: int = 0) -> Slot | None:
        """A slot of at least ``nbytes`` (0: of the usual size), assigned; None while none can be had."""
        if not (nbytes or self.typical_bytes):
            return None
        slot = self._take_free(nbytes) or self._carve(size_class(max(nbytes, self.typical_bytes)))
        if slot is None and nbytes > self.typical_bytes and self.fits(nbytes):
            self._dissolve(self._free.values())
            slot = self._carve(size_class(nbytes))
        if slot is not None:
            self.apply(slot, SlotEvent.ASSIGN)
            self._peak_slots = max(self._peak_slots, len(self._slots) - len(self._free))
        return slot

    def apply(self, slot: Slot, event: SlotEvent) -> None:
        """Move ``slot`` along its table.

        Raises:
            ProtocolError: the table has no such step.
        """
        before = slot.state
        after = SLOT_TABLE.get((before, event))
        if after is None:
            raise ProtocolError(f"slot at {slot.offset}: no step {event.name} from {before.name}")
        slot.state = after
        if before is _FREE:
            self._taken(slot, after)
        elif after is _FREE:
            self._freed(slot, before)

    def release(self, slot: Slot) -> None:
        """Neither this process nor a device reads the slot any more; it is free unless a forked child may read it."""
        fenced = slot.state is SlotState.QUARANTINED
        self.apply(slot, SlotEvent.EXPOSE if slot.exposed_to else SlotEvent.FENCED if fenced else SlotEvent.RELEASE)

    def expose(self, token: object) -> None:
        """A child is being forked: whatever is leased now can be read by it until it is known to be gone."""
        for slot in self:
            if slot.state is SlotState.LEASED:
                slot.exposed_to.add(token)

    def exposes(self, token: object) -> bool:
        """Whether any slot may be read by the child of ``token``."""
        return any(token in slot.exposed_to for slot in self)

    def unexpose(self, token: object) -> None:
        """The child of ``token`` is gone."""
        for slot in self:
            if token in slot.exposed_to:
                slot.exposed_to.discard(token)
                if slot.state is SlotState.EXPOSED and not slot.exposed_to:
                    self.apply(slot, SlotEvent.UNEXPOSE)

    # -- sizes -------------------------------------------------------------------------------------------------

    def learn(self, nbytes: int) -> bool:
        """Note that a batch asked for ``nbytes``; True if it is an outlier, larger than slots usually are."""
        if not self.fits(nbytes):
            return True  # slots of such a size could never be carved, and there would be none for any other batch
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if nbytes <= self.typical_bytes:
            return False
        if self.typical_bytes:
            self._outliers += OUTLIER_SPACING
            if self._outliers <= OUTLIER_SPACING:
                return True
        self._resize(size_class(self._largest_bytes))
        return False

    def note_filled(self, nbytes: int) -> None:
        """A batch of ``nbytes`` arrived."""
        if nbytes > self._largest_bytes and self.fits(nbytes):
            self._largest_bytes = nbytes
        self._outliers = max(0, self._outliers - 1)

    def settle(self) -> None:
        """An epoch ended: keep as many slots as it used at once, of the size that it used."""
        usual = size_class(self._largest_bytes) if self._largest_bytes else self.typical_bytes
        if usual * 2 <= self.typical_bytes:
            self._resize(usual)
        surplus = max(0, len(self._slots) - max(self._peak_slots, 1))
        self._dissolve(itertools.islice(self._free.values(), surplus))
        self._peak_slots = self._largest_bytes = 0

    def give_back(self) -> int:
        """Dissolve every free slot; returns how many bytes that gave back."""
        before = self.carved_bytes
        self._dissolve(self._free.values())
        return before - self.carved_bytes

    def _resize(self, nbytes: int) -> None:
        self.typical_bytes = nbytes
        self._outliers = 0
        self._dissolve(slot for slot in self._free.values() if slot.capacity != nbytes)

    # -- ranges ------------------------------------------------------------------------------------------------

    def _taken(self, slot: Slot, after: SlotState) -> None:
        del self._free[slot.offset]
        if after is _DISSOLVED:
            del self._slots[slot.offset]
            self.carved_bytes -= slot.capacity
            if self._punch(slot.offset, slot.capacity):
                self._join_gap(slot.offset, slot.capacity)

    def _freed(self, slot: Slot, before: SlotState) -> None:
        if slot.exposed_to:
            # A fork in another thread may have marked it while it was being released, when nobody could read it.
            slot.exposed_to.clear()
        self._free[slot.offset] = slot
        # One that was sidelined may have been made good meanwhile.
        surplus = before in _SIDELINED and self._most_slots is not None and self._circulating() > self._most_slots
        if surplus or slot.capacity != self.typical_bytes:
            self.apply(slot, SlotEvent.RECARVE)

    def _take_free(self, nbytes: int) -> Slot | None:
        # The last one freed comes first: its pages are the likeliest to be in a cache.
        for slot in reversed(self._free.values()):
            if slot.capacity >= nbytes:
                return slot
        return None

    def _dissolve(self, slots: Iterable[Slot]) -> None:
        for slot in tuple(slots):
            self.apply(slot, SlotEvent.RECARVE)

    def _room_for(self, capacity: int) -> bool:
        if self._most_slots is not None and self._circulating() >= self._most_slots:
            return False
        fits = any(length >= capacity for _, length in self._gaps) or self._top + capacity <= self._limit()
        return fits and self.carved_bytes + capacity <= self._limit()

    def _carvable(self) -> int:
        """How many slots of the usual size may still be carved."""
        by_bytes = (self._limit() - self.carved_bytes) // size_class(self.typical_bytes)
        return by_bytes if self._most_slots is None else min(by_bytes, self._most_slots - self._circulating())

    def _circulating(self) -> int:
        return len(self._slots) - self.count(*_SIDELINED)

    def _carve(self, capacity: int) -> Slot | None:
        if not self._room_for(capacity):
            return None
        offset = self._take_gap(capacity)
        try:
            self._reserve(offset, capacity)
        except BaseException as error:
            self._join_gap(offset, capacity)
            if not isinstance(error, PoolMemoryError) or not self._slots:
                raise
            return None
        slot = self._slots[offset] = Slot(offset, capacity)
        self.carved_bytes += capacity
        self._free[offset] = slot
        return slot

    def _take_gap(self, capacity: int) -> int:
        for index, (start, length) in enumerate(self._gaps):
            if length >= capacity:
                self._gaps[index : index + 1] = [(start + capacity, length - capacity)] if length > capacity else []
                return start
        start, self._top = self._top, self._top + capacity
        return start

    def _join_gap(self, offset: int, length: int) -> None:
        gaps = sorted([*self._gaps, (offset, length)])
        joined: list[tuple[int, int]] = []
        for start, size in gaps:
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((start, size))
        if joined and sum(joined[-1]) == self._top:
            self._top = joined.pop()[0]
        self._gaps = joined
