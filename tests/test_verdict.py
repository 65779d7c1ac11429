"""The verdict on made-up figures."""

from __future__ import annotations

import pytest

from shmloader import LoaderStats, Verdict

SLOW = {"batches": 101, "workers": 2, "cores": 8, "hand_over_s": 0.1}


@pytest.mark.parametrize(
    ("kind", "says", "figures"),
    [
        ("loader", "num_workers from 2 (there are 8 cores)", {"wait_s": 5.0, "step_s": 5.0, "worked_s": 20.0}),
        ("loader", "2 workers on 2 cores", {"wait_s": 5.0, "step_s": 5.0, "worked_s": 20.0, "cores": 2}),
        ("loader", "prefetch_factor", {"wait_s": 2.0, "step_s": 8.0, "worked_s": 8.0, "idle_s": 12.0}),
        ("loader", "50 % of the time (50 ms a batch)", {"wait_s": 5.0, "step_s": 4.9, "worked_s": 20.0}),
        ("step", "num_workers=1 would do", {"step_s": 10.0, "worked_s": 2.0, "idle_s": 18.0}),
        ("step", "only a faster step", {"step_s": 10.0, "worked_s": 16.0, "idle_s": 4.0}),
        ("balanced", "neither side", {"wait_s": 0.5, "step_s": 9.5, "worked_s": 18.0, "idle_s": 2.0}),
        ("balanced", "too few batches", {"batches": 3, "wait_s": 5.0}),
        ("balanced", "too few batches", {"batches": 50, "hand_over_s": 0.0}),
        ("copy", "larger batches", {"wait_s": 0.1, "hand_over_s": 1.0, "step_s": 1.0}),
        ("copy", "90 of 101 batches", {"hand_over_s": 3.0, "step_s": 7.0, "copies": {"held": 90}}),
        (
            "copy",
            "raise memory_limit",
            {"wait_s": 2.0, "step_s": 8.0, "worked_s": 10.0, "held_up_s": 8.0, "oversize_batches": 60},
        ),
        ("copy", "99 ms a batch): copy less", {"step_s": 50.0, "copy_wait_s": 9.9}),
        ("copy", "30 of 101 batches were ready too late", {"step_s": 50.0, "copy_wait_s": 9.9, "late_copies": 30}),
        ("copy", "copied ahead (num_workers", {"workers": 0, "step_s": 50.0, "copy_wait_s": 9.9, "late_copies": 101}),
        ("loader", "num_workers from 2", {"wait_s": 5.0, "step_s": 5.0, "worked_s": 20.0, "copy_wait_s": 2.0}),
        ("loader", "let workers make them", {"workers": 0, "wait_s": 5.0, "step_s": 5.0}),
        ("loader", "50 µs each", {"workers": 0, "wait_s": 0.005, "step_s": 0.005, "hand_over_s": 0.0}),
        ("step", "no more than that", {"workers": 0, "wait_s": 0.01, "step_s": 5.0}),
        ("balanced", "no more than that", {"workers": 0, "wait_s": 0.3, "step_s": 5.0}),
    ],
)
def test_figures_have_their_verdict(kind: str, says: str, figures: dict[str, object]) -> None:
    verdict = LoaderStats(**{**SLOW, **figures}).verdict  # type: ignore[arg-type]
    assert (verdict.kind, str(verdict)) == (kind, f"{kind}: {verdict.text}")
    assert says in verdict.text, verdict.text
    assert verdict.text.count(". ") == 0, "one sentence"
    assert isinstance(verdict, Verdict)
