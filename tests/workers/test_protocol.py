"""The tables: complete, without dead ends, and every row of use; the packets' head."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from shmloader.workers import protocol
from shmloader.workers.protocol import (
    HEAD,
    INLINE_BYTES,
    NO_LAYOUT,
    SLOT_TABLE,
    WORKER_TABLE,
    Flag,
    SlotEvent,
    SlotState,
    Tag,
    WorkerEvent,
    WorkerState,
)

TABLES: dict[str, tuple[Mapping[tuple[Any, Any], Any], type[Enum], type[Enum], Enum, set[Enum]]] = {
    "slots": (SLOT_TABLE, SlotState, SlotEvent, SlotState.FREE, {SlotState.DISSOLVED, SlotState.RETIRED}),
    "workers": (WORKER_TABLE, WorkerState, WorkerEvent, WorkerState.STARTING, {WorkerState.GONE}),
}
each_table = pytest.mark.parametrize("name", TABLES)


def reachable(table: Mapping[tuple[Any, Any], Any], start: Any) -> set[Any]:
    found, ahead = {start}, [start]
    while ahead:
        state = ahead.pop()
        following = {after for (before, _), after in table.items() if before is state} - found
        found |= following
        ahead += following
    return found


@each_table
def test_every_state_can_be_reached_from_the_first(name: str) -> None:
    table, states, _, first, _ = TABLES[name]
    assert reachable(table, first) == set(states)


@each_table
def test_every_event_is_used_by_some_row(name: str) -> None:
    table, _, events, _, _ = TABLES[name]
    assert {event for _, event in table} == set(events)


@each_table
def test_only_what_is_meant_to_be_an_end_is_a_dead_end(name: str) -> None:
    table, states, _, _, ends = TABLES[name]
    assert set(states) - {state for state, _ in table} == ends


@each_table
def test_from_every_state_an_end_can_be_reached(name: str) -> None:
    table, states, _, _, ends = TABLES[name]
    assert all(reachable(table, state) & ends for state in states)


LIVING = [state for state in SlotState if state not in (SlotState.DISSOLVED, SlotState.RETIRED)]


@pytest.mark.parametrize("state", LIVING, ids=lambda s: s.name)
def test_a_slot_that_lives_can_become_free_again(state: SlotState) -> None:
    assert SlotState.FREE in reachable(SLOT_TABLE, state)


def test_only_a_free_slot_is_assigned_or_dissolved() -> None:
    for event in (SlotEvent.ASSIGN, SlotEvent.RECARVE):
        assert [state for state, its in SLOT_TABLE if its is event] == [SlotState.FREE]


def test_a_worker_may_end_at_any_moment() -> None:
    alive = set(WorkerState) - {WorkerState.GONE}
    assert {state for state, event in WORKER_TABLE if event is WorkerEvent.EXIT} == alive
    assert {state for state, event in WORKER_TABLE if event is WorkerEvent.STOP} == alive


@each_table
def test_every_state_and_event_says_what_it_means(name: str) -> None:
    _, states, events, _, _ = TABLES[name]
    for kind in (states, events):
        assert len({member.value for member in kind}) == len(kind)
        assert all(isinstance(member.value, str) for member in kind)


@pytest.mark.parametrize(
    "word", [*[s.name for s in SlotState], *[e.name for e in SlotEvent if e.name not in ("NEED", "GRANT")]]
)
def test_the_drawing_shows_every_state_and_event(word: str) -> None:
    assert word in (protocol.__doc__ or "")


def test_every_packet_begins_with_a_tag_and_holds_every_field() -> None:
    fields = (Tag.FILLED, Flag.KEPT | Flag.DROP, NO_LAYOUT, 2**32 - 1, 2**64 - 1, 2**63, 2**62, 1.5, 0.25, 1e9)
    packet = HEAD.pack(*fields)
    assert packet[0] == Tag.FILLED
    assert HEAD.unpack(packet) == fields
    assert HEAD.size == 56


def test_tags_and_flags_fit_into_their_byte_and_are_distinct() -> None:
    tags, flags = ([value for name, value in vars(kind).items() if name.isupper()] for kind in (Tag, Flag))
    assert len(tags) == len(set(tags)) == 12
    assert max(tags) < 256
    assert sum(flags) < 256
    assert all(flag & (flag - 1) == 0 for flag in flags)
    assert len(flags) == len(set(flags)) == 8


def test_several_packets_fit_into_the_smallest_default_socket_buffer() -> None:
    assert 4 * (HEAD.size + INLINE_BYTES) < 200 * 1024
