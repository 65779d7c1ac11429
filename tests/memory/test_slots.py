"""The ledger: every step along its table, no byte twice, nothing handed out that anybody may still touch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmloader.errors import PoolMemoryError, ProtocolError
from shmloader.memory.budget import PAGE_BYTES, size_class
from shmloader.memory.slots import LANES, OUTLIER_SPACING, Ledger, Slot
from shmloader.workers.protocol import SLOT_TABLE, SlotEvent, SlotState

E, S = SlotEvent, SlotState
KIB = 1 << 10
LARGEST_LIMIT_BYTES = 64 * PAGE_BYTES

SIZES = st.integers(1, 12 * PAGE_BYTES)
TOKENS = st.sampled_from(["child", "worker", "foreign"])


#: How a slot that is being filled gets to a state.
WAYS: dict[SlotState, list[SlotEvent]] = {
    S.FILLING: [],
    S.READY: [E.FILLED],
    S.LEASED: [E.FILLED, E.LEASE],
    S.KEPT: [E.FILLED_KEPT],
    S.EXPOSED: [E.FILLED, E.LEASE, E.EXPOSE],
    S.QUARANTINED: [E.FILLED, E.LEASE, E.FENCE],
    S.RETIRED: [E.FILLED, E.LEASE, E.CAPTURE],
    S.FREE: [E.FAILED],
}


class Pages:
    """Plays the segment: which pages exist, and how much memory is left."""

    def __init__(self, limit_bytes: int = LARGEST_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.left = True
        self.reserved: dict[int, int] = {}
        self.ledger: Ledger = Ledger(lambda: self.limit_bytes, self.reserve, self.punch)

    def reserve(self, offset: int, nbytes: int) -> None:
        """What the ledger asks for before it carves."""
        assert nbytes > 0
        assert offset % PAGE_BYTES == nbytes % PAGE_BYTES == 0
        assert offset + nbytes <= LARGEST_LIMIT_BYTES, "beyond the mapping"
        assert self.ledger.carved_bytes + nbytes <= self.limit_bytes, "more than the limit"
        assert all(offset + nbytes <= start or start + length <= offset for start, length in self.reserved.items())
        if not self.left:
            raise PoolMemoryError("no pages")
        self.reserved[offset] = nbytes

    def punch(self, offset: int, nbytes: int) -> bool:
        """What the ledger gives back: never a part of a live slot."""
        assert self.reserved.pop(offset) == nbytes
        assert offset not in {slot.offset for slot in self.ledger}
        return True


def ledger_of(limit_bytes: int = LARGEST_LIMIT_BYTES, most_slots: int | None = None) -> Ledger:
    pages = Pages(limit_bytes)
    pages.ledger._most_slots = most_slots
    return pages.ledger


def acquired(ledger: Ledger, nbytes: int = 0) -> Slot:
    slot = ledger.acquire(nbytes)
    assert slot is not None
    return slot


def put(ledger: Ledger, slot: Slot, state: SlotState) -> Slot:
    """Move a slot that is being filled to ``state``."""
    for event in WAYS[state]:
        ledger.apply(slot, event)
    return slot


LANE = st.integers(0, LANES - 1)


class LedgerLife(RuleBasedStateMachine):
    """Whatever happens to slots, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages()
        self.ledger = self.pages.ledger
        self.expected: dict[Slot, SlotState] = {}
        self.readers: dict[Slot, set[str]] = {}

    @initialize(most_slots=st.sampled_from([None, None, 1, 3]), first_bytes=SIZES)
    def options(self, most_slots: int | None, first_bytes: int) -> None:
        self.ledger._most_slots = most_slots
        self.ledger.learn(first_bytes)

    def pick(self, data: st.DataObject, state: SlotState) -> Slot:
        slots = sorted((slot for slot, its in self.expected.items() if its is state), key=lambda slot: slot.offset)
        return data.draw(st.sampled_from(slots))

    def has(self, *states: SlotState) -> bool:
        return any(state in states for state in self.expected.values())

    def step(self, slot: Slot, event: SlotEvent) -> None:
        """One step along the table; the ledger may dissolve a slot of the wrong size as soon as it is free."""
        self.ledger.apply(slot, event)
        self.note(slot, SLOT_TABLE[self.expected[slot], event])

    def note(self, slot: Slot, state: SlotState) -> None:
        if state is S.FREE:
            assert slot.state in (S.FREE, S.DISSOLVED)
            del self.expected[slot]
        else:
            assert slot.state is state
            self.expected[slot] = state

    # -- sizes, limits, memory ---------------------------------------------------------------------------------

    @rule(nbytes=SIZES, lane=LANE)
    def learn(self, nbytes: int, lane: int) -> None:
        others = [self.ledger.typical_bytes(other) for other in range(LANES) if other != lane]
        typical = self.ledger.typical_bytes(lane)
        outlier = self.ledger.learn(nbytes, lane)
        now = self.ledger.typical_bytes(lane)
        if self.ledger.fits(nbytes):
            assert outlier is (0 < typical < nbytes and now == typical)
        else:
            assert outlier
            assert now == typical
        assert now >= typical
        assert others == [self.ledger.typical_bytes(other) for other in range(LANES) if other != lane]

    @rule(nbytes=SIZES, lane=LANE)
    def note_filled(self, nbytes: int, lane: int) -> None:
        self.ledger.note_filled(nbytes, lane)

    @rule()
    def settle(self) -> None:
        self.ledger.settle()

    @rule()
    def give_back(self) -> None:
        before = self.ledger.carved_bytes
        assert self.ledger.give_back() == before - self.ledger.carved_bytes
        assert self.ledger.count(S.FREE) == 0

    @rule(pages=st.integers(0, 64))
    def change_limit(self, pages: int) -> None:
        self.pages.limit_bytes = pages * PAGE_BYTES

    @rule(left=st.sampled_from([True, True, False]))
    def change_memory(self, left: bool) -> None:
        self.pages.left = left

    # -- a slot's way ------------------------------------------------------------------------------------------

    @rule(nbytes=st.one_of(st.just(0), SIZES), lane=LANE)
    def acquire(self, nbytes: int, lane: int) -> None:
        try:
            slot = self.ledger.acquire(nbytes, lane)
        except PoolMemoryError:
            assert not self.pages.left
            assert not list(self.ledger)
            return
        if slot is None:
            return
        assert slot not in self.expected
        assert slot.state is S.FILLING
        assert slot.lane == lane
        assert slot.capacity >= nbytes
        assert not slot.exposed_to
        self.expected[slot], self.readers[slot] = S.FILLING, set()
        if self.ledger._most_slots is not None:
            sidelined = (S.EXPOSED, S.KEPT, S.RETIRED)
            circulating = [slot for slot in self.ledger if slot.lane == lane and slot.state not in sidelined]
            assert len(circulating) <= self.ledger._most_slots

    @rule(states=st.lists(st.sampled_from([S.READY, S.LEASED, S.LEASED, S.KEPT, S.QUARANTINED]), max_size=6), lane=LANE)
    def fill_several(self, states: list[SlotState], lane: int) -> None:
        before = set(self.expected)
        for state in states:
            self.acquire(0, lane)
            for slot in set(self.expected) - before:
                for event in WAYS[state]:
                    self.step(slot, event)
            before = set(self.expected)

    @precondition(lambda self: self.has(S.FILLING))
    @rule(
        data=st.data(),
        event=st.sampled_from(
            [E.FILLED, E.FILLED, E.FILLED, E.NEED, E.GRANT, E.FILLED_KEPT, E.FAILED, E.REPLACED, E.EXHAUSTED, E.LOST]
        ),
    )
    def answer(self, data: st.DataObject, event: SlotEvent) -> None:
        self.step(self.pick(data, S.FILLING), event)

    @precondition(lambda self: self.has(S.READY))
    @rule(data=st.data(), event=st.sampled_from([E.LEASE, E.LEASE, E.COPY_OUT, E.DISCARD]))
    def deliver(self, data: st.DataObject, event: SlotEvent) -> None:
        self.step(self.pick(data, S.READY), event)

    @precondition(lambda self: self.has(S.LEASED))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_one(self.pick(data, S.LEASED))

    def release_one(self, slot: Slot) -> None:
        self.ledger.release(slot)
        self.note(slot, S.EXPOSED if self.readers[slot] else S.FREE)

    @precondition(lambda self: self.has(S.LEASED))
    @rule(data=st.data(), event=st.sampled_from([E.FENCE, E.CAPTURE]))
    def leave_to_a_device(self, data: st.DataObject, event: SlotEvent) -> None:
        slot = self.pick(data, S.LEASED)
        if not self.readers[slot]:
            self.step(slot, event)

    @precondition(lambda self: self.has(S.QUARANTINED))
    @rule(data=st.data())
    def fence_passes(self, data: st.DataObject) -> None:
        self.step(self.pick(data, S.QUARANTINED), E.FENCED)

    @precondition(lambda self: self.has(S.KEPT))
    @rule(data=st.data(), event=st.sampled_from([E.LET_GO, E.LOST]))
    def worker_lets_go(self, data: st.DataObject, event: SlotEvent) -> None:
        self.step(self.pick(data, S.KEPT), event)

    @rule(token=TOKENS, released_after=st.booleans())
    def fork(self, token: str, released_after: bool) -> None:
        self.ledger.expose(token)
        for slot, state in tuple(self.expected.items()):
            if state is S.LEASED:
                self.readers[slot].add(token)
                if released_after:
                    self.release_one(slot)

    @rule(token=st.sampled_from(["child", "worker"]))
    def child_ends(self, token: str) -> None:
        self.ledger.unexpose(token)
        for slot, state in tuple(self.expected.items()):
            self.readers[slot].discard(token)
            if state is S.EXPOSED and not self.readers[slot]:
                self.note(slot, S.FREE)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), event=st.sampled_from(SlotEvent))
    def try_what_the_table_lacks(self, data: st.DataObject, event: SlotEvent) -> None:
        slot = self.pick(data, data.draw(st.sampled_from(sorted(set(self.expected.values()), key=str))))
        if (slot.state, event) not in SLOT_TABLE:
            before = slot.state
            with pytest.raises(ProtocolError, match=f"{slot.offset}: no step {event.name} from {before.name}"):
                self.ledger.apply(slot, event)
            assert slot.state is before

    # -- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def states_are_as_expected(self) -> None:
        live = list(self.ledger)
        assert {slot for slot in live if slot.state is not S.FREE} == set(self.expected)
        for slot, state in self.expected.items():
            assert slot.state is state
            assert slot.exposed_to == self.readers[slot]
            assert self.ledger.at(slot.offset) is slot

    @invariant()
    def bytes_add_up(self) -> None:
        live = list(self.ledger)
        for state in SlotState:
            slots = [slot for slot in live if slot.state is state]
            inside = len(slots), sum(slot.capacity for slot in slots)
            assert self.ledger.summary().get(state.name, (0, 0)) == inside
        assert self.ledger.carved_bytes == sum(self.pages.reserved.values())
        assert {slot.offset: slot.capacity for slot in live} == self.pages.reserved
        assert sum(nbytes for _, nbytes in self.ledger.summary().values()) == self.ledger.carved_bytes

    @invariant()
    def free_slots_have_the_usual_size(self) -> None:
        free = [slot for slot in self.ledger if slot.state is S.FREE]
        assert all(slot.capacity == self.ledger.typical_bytes(slot.lane) for slot in free)

    @invariant()
    def ranges_and_gaps_cover_what_was_ever_used(self) -> None:
        pieces = sorted([*self.ledger._gaps, *self.pages.reserved.items()])
        end = 0
        for start, length in pieces:
            assert start == end
            end = start + length
        assert end == self.ledger._top


LedgerLife.TestCase.settings = settings(max_examples=75, stateful_step_count=60)
TestLedgerLife = pytest.mark.slow(LedgerLife.TestCase)


# -- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", SlotEvent, ids=lambda event: event.name)
def test_a_step_that_the_table_lacks_is_an_error_naming_slot_state_and_event(event: SlotEvent) -> None:
    for state in (S.FILLING, S.READY, S.LEASED, S.KEPT, S.EXPOSED, S.QUARANTINED, S.RETIRED):
        ledger = ledger_of()
        slot = put(ledger, acquired(ledger, 1), state)
        if (state, event) in SLOT_TABLE:
            continue
        with pytest.raises(ProtocolError, match=f"slot at {slot.offset}: no step {event.name} from {state.name}"):
            ledger.apply(slot, event)
        assert slot.state is state


def test_there_is_no_slot_where_none_was_carved() -> None:
    with pytest.raises(ProtocolError, match="no slot at 4096"):
        ledger_of().at(4096)


# -- getting slots ----------------------------------------------------------------------------------------------


def test_before_any_size_is_known_there_is_no_slot() -> None:
    assert ledger_of().acquire() is None


@pytest.mark.parametrize("most_slots", [4, None])
def test_a_slot_that_may_still_be_carved_is_promised_once(most_slots: int | None) -> None:
    ledger = ledger_of(4 * PAGE_BYTES, most_slots=most_slots)
    ledger.learn(100)
    for taken in range(4):
        assert [ledger.spares(count) for count in range(5)] == [count < 4 - taken for count in range(5)]
        slot = acquired(ledger)
    ledger.apply(slot, E.FAILED)
    assert [ledger.spares(count) for count in range(3)] == [True, False, False]


def test_the_last_slot_freed_is_the_first_handed_out_again() -> None:
    ledger = ledger_of()
    ledger.learn(100)
    first, second, third = (acquired(ledger) for _ in range(3))
    for slot in (first, third, second):
        ledger.apply(slot, E.FAILED)
    assert [acquired(ledger) for _ in range(3)] == [second, third, first]


@pytest.mark.parametrize("state", [S.LEASED, S.EXPOSED, S.KEPT, S.QUARANTINED, S.RETIRED, S.READY, S.FILLING])
def test_a_slot_that_anybody_may_touch_is_not_handed_out(state: SlotState) -> None:
    ledger = ledger_of(4 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    held = put(ledger, acquired(ledger), state)
    others = [ledger.acquire() for _ in range(5)]
    assert held not in others
    assert others[3:] == [None, None]


def test_a_sidelined_slot_does_not_count_against_the_number_of_slots_but_a_leased_one_does() -> None:
    ledger = ledger_of(most_slots=2)
    ledger.learn(PAGE_BYTES)
    put(ledger, acquired(ledger), S.LEASED)
    put(ledger, acquired(ledger), S.KEPT)
    assert ledger.acquire() is not None
    assert ledger.acquire() is None


def test_a_sidelined_slot_that_comes_back_after_it_was_made_good_is_one_too_many() -> None:
    ledger = ledger_of(most_slots=2)
    ledger.learn(PAGE_BYTES)
    kept, other = put(ledger, acquired(ledger), S.KEPT), acquired(ledger)
    made_good = acquired(ledger)
    ledger.apply(kept, E.LET_GO)
    assert kept.state is S.DISSOLVED
    assert set(ledger) == {other, made_good}


def test_when_no_pages_can_be_had_existing_slots_go_on_and_a_first_one_says_why() -> None:
    pages = Pages()
    pages.left = False
    pages.ledger.learn(PAGE_BYTES)
    with pytest.raises(PoolMemoryError, match="no pages"):
        pages.ledger.acquire()
    pages.left = True
    slot = acquired(pages.ledger)
    pages.left = False
    assert pages.ledger.acquire() is None
    assert pages.ledger.carved_bytes == slot.capacity


def test_free_slots_that_are_too_small_make_room_for_a_larger_one() -> None:
    ledger = ledger_of(4 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    for slot in [acquired(ledger) for _ in range(4)]:
        ledger.apply(slot, E.FAILED)
    assert acquired(ledger, 3 * PAGE_BYTES).capacity == 3 * PAGE_BYTES


def test_a_range_between_two_held_slots_is_used_again() -> None:
    ledger = ledger_of()
    ledger.learn(2 * PAGE_BYTES)
    low, middle, high = (put(ledger, acquired(ledger), S.LEASED) for _ in range(3))
    ledger.release(middle)
    ledger.give_back()
    again = acquired(ledger)
    assert (low.offset, again.offset, high.offset) == (0, 2 * PAGE_BYTES, 4 * PAGE_BYTES)


# -- circulation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [S.FREE, S.FILLING, S.READY])
def test_a_slot_can_be_leased_for_good_while_another_circulates(state: SlotState) -> None:
    ledger = ledger_of(2 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    due, other = acquired(ledger), acquired(ledger)
    put(ledger, due, S.READY)
    put(ledger, other, state)
    assert ledger.circulates_without(due)


@pytest.mark.parametrize("state", [S.LEASED, S.EXPOSED, S.KEPT, S.QUARANTINED, S.RETIRED])
def test_the_last_slot_in_circulation_must_not_be_leased(state: SlotState) -> None:
    ledger = ledger_of(2 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    due, other = acquired(ledger), acquired(ledger)
    put(ledger, due, S.READY)
    put(ledger, other, state)
    assert not ledger.circulates_without(due)


def test_room_for_one_more_slot_is_as_good_as_one_in_circulation() -> None:
    ledger = ledger_of(2 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    due = put(ledger, acquired(ledger), S.READY)
    assert ledger.circulates_without(due)
    ledger._most_slots = 1
    assert not ledger.circulates_without(due)


# -- sizes ------------------------------------------------------------------------------------------------------


def test_the_first_batch_sets_the_size() -> None:
    ledger = ledger_of()
    assert ledger.learn(3 * PAGE_BYTES + 1) is False
    assert acquired(ledger).capacity == size_class(3 * PAGE_BYTES + 1)


def test_one_outlier_gets_a_range_of_its_own_and_does_not_grow_the_pool() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    usual = acquired(ledger)
    assert ledger.learn(9 * PAGE_BYTES) is True
    outlier = acquired(ledger, 9 * PAGE_BYTES)
    assert ledger.typical_bytes() == PAGE_BYTES
    for slot in (usual, outlier):
        ledger.apply(slot, E.FAILED)
    assert outlier.state is S.DISSOLVED
    assert [slot.capacity for slot in ledger] == [PAGE_BYTES]


def test_rare_outliers_stay_outliers() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    for _ in range(5):
        assert ledger.learn(9 * PAGE_BYTES) is True
        for _ in range(OUTLIER_SPACING):
            ledger.note_filled(PAGE_BYTES)
    assert ledger.typical_bytes() == PAGE_BYTES


def test_two_outliers_close_together_grow_the_slots_and_free_ones_are_carved_anew() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    leased, free = acquired(ledger), acquired(ledger)
    put(ledger, leased, S.LEASED)
    put(ledger, free, S.FREE)
    assert ledger.learn(3 * PAGE_BYTES) is True
    assert ledger.learn(2 * PAGE_BYTES) is False
    assert ledger.typical_bytes() == 3 * PAGE_BYTES
    assert free.state is S.DISSOLVED
    assert leased.state is S.LEASED
    assert acquired(ledger).capacity == 3 * PAGE_BYTES
    ledger.release(leased)
    assert leased.state is S.DISSOLVED


def test_a_batch_that_could_never_have_a_slot_changes_nothing_about_the_others() -> None:
    ledger = ledger_of(8 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    slot = put(ledger, acquired(ledger), S.FREE)
    for _ in range(3):
        assert ledger.learn(9 * PAGE_BYTES) is True
        assert ledger.acquire(9 * PAGE_BYTES) is None
        ledger.note_filled(9 * PAGE_BYTES)
    ledger.settle()
    assert ledger.typical_bytes() == PAGE_BYTES
    assert acquired(ledger) is slot


def test_settling_keeps_what_the_epoch_used_at_once() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    for slot in [acquired(ledger) for _ in range(6)]:
        ledger.apply(slot, E.FAILED)
    ledger.settle()
    assert ledger.count(S.FREE) == 6
    for slot in [acquired(ledger) for _ in range(2)]:
        ledger.apply(slot, E.FAILED)
    ledger.settle()
    assert ledger.count(S.FREE) == 2


def test_settling_shrinks_the_slots_when_batches_have_become_half_as_large() -> None:
    ledger = ledger_of()
    ledger.learn(8 * PAGE_BYTES)
    ledger.note_filled(8 * PAGE_BYTES)
    put(ledger, acquired(ledger), S.FREE)
    ledger.settle()
    assert ledger.typical_bytes() == 8 * PAGE_BYTES
    ledger.note_filled(5 * PAGE_BYTES)
    ledger.settle()
    assert ledger.typical_bytes() == 8 * PAGE_BYTES
    ledger.note_filled(4 * PAGE_BYTES)
    ledger.settle()
    assert ledger.typical_bytes() == 4 * PAGE_BYTES
    assert acquired(ledger).capacity == 4 * PAGE_BYTES


def test_settling_after_an_epoch_without_batches_changes_no_size() -> None:
    ledger = ledger_of()
    ledger.learn(8 * PAGE_BYTES)
    ledger.settle()
    ledger.settle()
    assert ledger.typical_bytes() == 8 * PAGE_BYTES


def test_settling_leaves_leased_slots_alone() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    held = [put(ledger, acquired(ledger), S.LEASED) for _ in range(3)]
    ledger.settle()
    ledger.settle()
    assert {slot.state for slot in held} == {S.LEASED}


# -- exposure ---------------------------------------------------------------------------------------------------


def test_a_slot_leased_at_a_fork_comes_back_only_when_every_child_is_gone() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    slot = put(ledger, acquired(ledger), S.LEASED)
    later: Any = acquired(ledger)
    ledger.expose("first")
    ledger.expose("second")
    ledger.release(slot)
    ledger.unexpose("first")
    assert slot.state is S.EXPOSED
    ledger.unexpose("second")
    assert slot.state is S.FREE
    assert not later.exposed_to


def test_a_child_that_is_gone_before_the_lease_ends_costs_nothing() -> None:
    ledger = ledger_of()
    ledger.learn(PAGE_BYTES)
    slot = put(ledger, acquired(ledger), S.LEASED)
    ledger.expose("child")
    ledger.unexpose("child")
    ledger.release(slot)
    assert slot.state is S.FREE


# -- what is cut short ------------------------------------------------------------------------------------------


def test_a_reservation_that_any_exception_cuts_short_leaves_its_range_to_others() -> None:
    ledger = ledger_of(2 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    reserve, ledger._reserve = ledger._reserve, lambda offset, nbytes: pytest.fail("a warning that is an error")
    with pytest.raises(pytest.fail.Exception):
        ledger.acquire()
    ledger._reserve = reserve
    assert [acquired(ledger).offset for _ in range(2)] == [0, PAGE_BYTES]


def test_lanes_keep_sizes_of_their_own() -> None:
    ledger = ledger_of()
    ledger.learn(8 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES, 1)
    slots = ledger.acquire(), ledger.acquire(lane=1)
    assert [slot and (slot.lane, slot.capacity) for slot in slots] == [(0, 8 * PAGE_BYTES), (1, PAGE_BYTES)]


def test_a_lane_that_is_waited_for_gets_the_room_of_anothers_free_slots() -> None:
    ledger = ledger_of(4 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    for slot in [acquired(ledger) for _ in range(4)]:
        ledger.apply(slot, E.FAILED)
    ledger.learn(2 * PAGE_BYTES, 1)
    assert ledger.acquire(0, 1) is None  # looking ahead takes nothing from anybody
    slot = ledger.acquire(2 * PAGE_BYTES, 1)
    assert slot is not None
    assert slot.lane == 1


def test_most_slots_count_each_lane_by_itself() -> None:
    ledger = ledger_of(most_slots=1)
    ledger.learn(PAGE_BYTES)
    ledger.learn(PAGE_BYTES, 1)
    assert ledger.acquire() is not None
    assert ledger.acquire() is None
    assert ledger.acquire(0, 1) is not None
    assert ledger.acquire(PAGE_BYTES, 1) is None


def test_a_lease_circulates_by_the_slots_of_its_own_lane() -> None:
    ledger = ledger_of(2 * PAGE_BYTES)
    ledger.learn(PAGE_BYTES)
    ledger.learn(PAGE_BYTES, 1)
    here = acquired(ledger)
    there = ledger.acquire(0, 1)
    assert there is not None
    ledger.apply(there, E.FAILED)
    assert ledger.has_free(1)
    assert not ledger.has_free(0)
    assert not ledger.circulates_without(here)
