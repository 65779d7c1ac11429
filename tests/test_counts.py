"""What an iterator counts: times, waits by size, what is still alive."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmloader import counts as counting
from shmloader.counts import Alive, Counts, Waits

seconds = st.floats(1e-8, 1e4)


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(counting.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@given(st.lists(seconds, min_size=1, max_size=200))
@settings(max_examples=100)
def test_a_percentile_is_off_by_an_eighth_at_most(waited: list[float]) -> None:
    waits = Waits()
    for one in waited:
        waits.note(one)
    found = waits.percentiles(len(waited))
    assert found["max"] == max(waited)
    for share in (50, 90, 99):
        exact = sorted(waited)[math.ceil(len(waited) * share / 100) - 1]
        assert exact / 1.13 - 1e-8 <= found[f"p{share}"] <= exact * 1.13 + 1e-8


def test_batches_that_were_not_waited_for_count_as_zero() -> None:
    waits = Waits()
    for _ in range(10):
        waits.note(1.0)
    assert waits.percentiles(100) == {"p50": 0.0, "p90": 0.0, "p99": pytest.approx(1.0, rel=0.13), "max": 1.0}
    assert waits.percentiles(0)["p50"] == pytest.approx(1.0, rel=0.13), "more were waited for than delivered"
    assert Waits().percentiles(5) == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


@given(st.lists(seconds), st.lists(seconds))
@settings(max_examples=30)
def test_waits_add_up(some: list[float], others: list[float]) -> None:
    one, two, both = Waits(), Waits(), Waits()
    for target, values in ((one, some), (two, others), (both, some + others)):
        for value in values:
            target.note(value)
    one.add(two)
    assert (one.classes, one.longest_s) == (both.classes, both.longest_s)


def test_the_time_in_and_between_the_calls_is_told_apart(clock: Clock) -> None:
    counts = Counts()
    for inside, waited, outside in ((5.0, 4.0, 2.0), (3.0, 1.0, 10.0), (1.0, 0.0, 20.0)):
        counts.enter()
        clock.now += inside
        counts.wait_s += waited
        counts.batches += 1
        counts.leave()
        clock.now += outside
    counts.enter()
    assert counts.start_s == 5.0
    assert (counts.wait_s, counts.hand_over_s, counts.step_s) == (1.0, 3.0, 32.0), "without the first batch's"
    assert sum(counts.waits.classes.values()) == 1


def test_what_a_worker_did_before_the_epoch_is_not_counted_as_idle_time(clock: Clock) -> None:
    counts = Counts()
    clock.now += 2.0
    counts.note_spent((1.0, 1.0, 1.0), (2.5, 61.0, 1.25))
    assert (counts.worked_s, counts.idle_s, counts.held_up_s) == (1.5, 2.0, 0.25)


def test_epochs_add_up() -> None:
    one, two = Counts(batches=3, wait_s=1.0, copies={"held": 2}), Counts(batches=4, wait_s=2.0, copies={"kept": 1})
    one.add(two)
    assert (one.batches, one.wait_s, one.copies) == (7, 3.0, {"held": 2, "kept": 1})


def test_memory_counts_as_long_as_somebody_refers_to_it() -> None:
    alive, buffers = Alive(), [np.zeros(8, np.uint8) for _ in range(200)]
    for buffer in buffers:
        alive.note(buffer, 8)
    view = buffers[7][2:]
    assert alive.nbytes == 1600
    del buffer, buffers
    gc.collect()
    assert alive.nbytes == view.base.nbytes == 8
    for _ in range(500):
        alive.note(np.zeros(8, np.uint8), 8)
    assert len(alive._buffers) <= 70, "what is gone is forgotten"
