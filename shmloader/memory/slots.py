"""The ledger: which slots there are, in which state, and whose turn the free ones are.

It is the only writer of slot states, through :data:`~shmloader.workers.protocol.SLOT_TABLE`, and knows nothing of
processes. A *range* is a part of the mapping; a *slot* is a range with a state. Slots are carved out of free ranges
when a batch needs one and none is free, and dissolved when their size no longer fits what batches need. Batches whose
halves travel apart use a *lane* of slots for each: inputs and targets differ in size, and each must circulate.
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

#: Lane 0 is that of whole batches and of inputs, lane 1 that of late targets.
LANES = 2

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
    lane: int = 0
    #: Who may still read the bytes besides the consumer: one token per child that was forked during the lease.
    exposed_to: set[object] = field(default_factory=set)
    #: What the guard of page-locked slots noted when the lease began.
    mark: object = None
    #: Whether only copies to a device that held the lease until they had completed could read the bytes.
    moved: bool = False


@dataclass(slots=True)
class _Lane:
    """The slots of one kind of part, and which sizes it comes in."""

    free: dict[int, Slot] = field(default_factory=dict)  # by offset, in the order in which they were freed
    #: Number of slots in any state.
    carved: int = 0
    peak_slots: int = 0
    largest_bytes: int = 0
    outliers: int = 0
    typical_bytes: int = 0


class Ledger:
    """The slots of one pool.

    Args:
        limit: returns how many bytes of slots there may be now.
        reserve: makes the pages of a new range exist; raises :class:`PoolMemoryError`. After an exception there are
            none.
        punch: gives the pages of a range back; returns whether the range can be used again.
        most_slots: largest number of slots in circulation in each lane, or None.
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
        self._lanes = tuple(_Lane() for _ in range(LANES))
        self._slots: dict[int, Slot] = {}
        self._gaps: list[tuple[int, int]] = []
        self._top = 0
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

    def typical_bytes(self, lane: int = 0) -> int:
        """The usual size of the lane's slots; 0 until anything is known of its batches."""
        return self._lanes[lane].typical_bytes

    def has_free(self, lane: int = 0) -> bool:
        """Whether any slot of the lane is free."""
        return bool(self._lanes[lane].free)

    def has_room(self, nbytes: int = 0, lane: int = 0) -> bool:
        """Whether a slot of at least ``nbytes`` (0: of the usual size) could still be carved."""
        return self._room_for(size_class(max(nbytes, self._lanes[lane].typical_bytes, 1)), lane)

    def full(self, lane: int = 0) -> bool:
        """Whether the lane may have no more slots, whatever room there is."""
        return self._most_slots is not None and self._circulating(lane) >= self._most_slots

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

    def spares(self, count: int, lane: int = 0) -> bool:
        """Whether there is a slot beside those that ``count`` batches are going to ask for."""
        own = self._lanes[lane]
        short = count + 1 - len(own.free)
        if short <= 0:
            return True
        return self._room_for(size_class(own.typical_bytes), lane) and self._carvable(lane) >= short

    def circulates_without(self, slot: Slot) -> bool:
        """Whether, with ``slot`` leased for good, some other of its lane comes free without the consumer's help."""
        lane = slot.lane
        own = self._lanes[lane]
        if own.free:
            return True
        if any(other is not slot and other.lane == lane and other.state in _CIRCULATING for other in self):
            return True
        return self._room_for(size_class(own.typical_bytes), lane)

    # -- getting and moving slots ------------------------------------------------------------------------------

    def acquire(self, nbytes: int = 0, lane: int = 0) -> Slot | None:
        """A slot of at least ``nbytes`` (0: of the usual size), assigned; None while none can be had."""
        own = self._lanes[lane]
        usual = max(nbytes, own.typical_bytes)
        if not usual:
            return None
        slot = self._take_free(nbytes, own) or self._carve(size_class(usual), lane)
        if slot is None and nbytes:
            slot = self._carve_anew(nbytes, lane)
        if slot is not None:
            self.apply(slot, SlotEvent.ASSIGN)
            own.peak_slots = max(own.peak_slots, own.carved - len(own.free))
        return slot

    def _carve_anew(self, nbytes: int, lane: int) -> Slot | None:
        """A slot where others were: a worker waits for it, and they are free."""
        if not self.fits(nbytes):
            return None
        own = self._lanes[lane]
        if not self.full(lane):
            for other in self._lanes:
                if other is not own and other.free:
                    self._dissolve(other.free.values())
            slot = self._carve(size_class(max(nbytes, own.typical_bytes)), lane)
            if slot is not None:
                return slot
        if nbytes <= own.typical_bytes:
            return None
        self._dissolve(own.free.values())
        return self._carve(size_class(nbytes), lane)

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

    def learn(self, nbytes: int, lane: int = 0) -> bool:
        """Note that a batch asked for ``nbytes``; True if it is an outlier, larger than slots usually are."""
        if not self.fits(nbytes):
            return True  # slots of such a size could never be carved, and there would be none for any other batch
        own = self._lanes[lane]
        own.largest_bytes = max(own.largest_bytes, nbytes)
        if nbytes <= own.typical_bytes:
            return False
        if own.typical_bytes:
            own.outliers += OUTLIER_SPACING
            if own.outliers <= OUTLIER_SPACING:
                return True
        self._resize(own, size_class(own.largest_bytes))
        return False

    def note_filled(self, nbytes: int, lane: int = 0) -> None:
        """A batch of ``nbytes`` arrived."""
        own = self._lanes[lane]
        if nbytes > own.largest_bytes and self.fits(nbytes):
            own.largest_bytes = nbytes
        if own.outliers:
            own.outliers -= 1

    def settle(self) -> None:
        """An epoch ended: keep as many slots as it used at once, of the size that it used."""
        for own in self._lanes:
            usual = size_class(own.largest_bytes) if own.largest_bytes else own.typical_bytes
            if usual * 2 <= own.typical_bytes:
                self._resize(own, usual)
            surplus = max(0, own.carved - max(own.peak_slots, 1))
            self._dissolve(itertools.islice(own.free.values(), surplus))
            own.peak_slots = own.largest_bytes = 0

    def give_back(self) -> int:
        """Dissolve every free slot; returns how many bytes that gave back."""
        before = self.carved_bytes
        for own in self._lanes:
            self._dissolve(own.free.values())
        return before - self.carved_bytes

    def _resize(self, own: _Lane, nbytes: int) -> None:
        own.typical_bytes = nbytes
        own.outliers = 0
        self._dissolve(slot for slot in own.free.values() if slot.capacity != nbytes)

    # -- ranges ------------------------------------------------------------------------------------------------

    def _taken(self, slot: Slot, after: SlotState) -> None:
        own = self._lanes[slot.lane]
        del own.free[slot.offset]
        if after is _DISSOLVED:
            del self._slots[slot.offset]
            own.carved -= 1
            self.carved_bytes -= slot.capacity
            if self._punch(slot.offset, slot.capacity):
                self._join_gap(slot.offset, slot.capacity)

    def _freed(self, slot: Slot, before: SlotState) -> None:
        if slot.exposed_to:
            # A fork in another thread may have marked it while it was being released, when nobody could read it.
            slot.exposed_to.clear()
        own = self._lanes[slot.lane]
        own.free[slot.offset] = slot
        # One that was sidelined may have been made good meanwhile.
        surplus = (
            before in _SIDELINED and self._most_slots is not None and self._circulating(slot.lane) > self._most_slots
        )
        if surplus or slot.capacity != own.typical_bytes:
            self.apply(slot, SlotEvent.RECARVE)

    def _take_free(self, nbytes: int, own: _Lane) -> Slot | None:
        # The last one freed comes first: its pages are the likeliest to be in a cache.
        for slot in reversed(own.free.values()):
            if slot.capacity >= nbytes:
                return slot
        return None

    def _dissolve(self, slots: Iterable[Slot]) -> None:
        for slot in tuple(slots):
            self.apply(slot, SlotEvent.RECARVE)

    def _room_for(self, capacity: int, lane: int) -> bool:
        if self.full(lane):
            return False
        fits = any(length >= capacity for _, length in self._gaps) or self._top + capacity <= self._limit()
        return fits and self.carved_bytes + capacity <= self._limit()

    def _carvable(self, lane: int) -> int:
        """How many slots of the lane's usual size may still be carved."""
        by_bytes = (self._limit() - self.carved_bytes) // size_class(self._lanes[lane].typical_bytes)
        return by_bytes if self._most_slots is None else min(by_bytes, self._most_slots - self._circulating(lane))

    def _circulating(self, lane: int) -> int:
        return self._lanes[lane].carved - sum(slot.state in _SIDELINED for slot in self if slot.lane == lane)

    def _carve(self, capacity: int, lane: int) -> Slot | None:
        if not self._room_for(capacity, lane):
            return None
        offset = self._take_gap(capacity)
        try:
            self._reserve(offset, capacity)
        except BaseException as error:
            self._join_gap(offset, capacity)
            if not isinstance(error, PoolMemoryError) or not self._slots:
                raise
            return None
        slot = self._slots[offset] = Slot(offset, capacity, lane=lane)
        own = self._lanes[lane]
        own.carved += 1
        self.carved_bytes += capacity
        own.free[offset] = slot
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
