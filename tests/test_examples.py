"""The scripts in `benchmarks/examples/`, as people start them."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.programs import ROOT, run

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks" / "examples"
MODULES = {"finder", "photographs"}  # what the examples share


@cache
def printed_by(name: str) -> str:
    """What an example prints; one that fails, warns or leaves a process behind fails the test."""
    found = run(FOLDER / f"{name}.py", timeout_s=50.0)
    assert (found.code, found.err, found.left) == (0, "", ())
    return found.out


def figures(pattern: str, text: str) -> list[float]:
    """All numbers that stand at the groups of a pattern, which has to be there."""
    found = re.findall(pattern, text)
    assert found, f"{pattern!r} is not in\n{text}"
    return [float(number) for match in found for number in (match if isinstance(match, tuple) else (match,))]


@pytest.mark.parametrize(("name", "batches", "workers"), [("two_loaders", 120, 4), ("one_loader", 120, 2)])
def test_every_pair_is_right(name: str, batches: int, workers: int) -> None:
    out = printed_by(name)
    assert f"right pairs: {batches} of {batches} batches\n" in out
    assert f"worker processes: {workers}" in out
    counted, seconds, rate = figures(r"(\d+) batches in ([\d.]+) s, ([\d.]+) batches/s", out)
    assert counted == batches
    assert rate == pytest.approx(batches / seconds, rel=0.05)


def test_one_loader_does_the_job_of_two_to_the_last_digit() -> None:
    (two,), (one,) = (figures(r"last loss: (\S+)", printed_by(name)) for name in ("two_loaders", "one_loader"))
    assert one == two


def test_only_late_targets_are_waited_for_apart() -> None:
    together, late = printed_by("late_targets").split("late_targets=True:")
    assert "right pairs: 12 of 12 batches" in together
    assert "right pairs: 12 of 12 batches" in late
    an_input, a_target = figures(r"to make: an input ([\d.]+) ms, a target ([\d.]+) ms", together)
    assert an_input < a_target
    assert min(figures(r"first prediction after ([\d.]+) ms", together + late)) > 0
    waited = r"waited for inputs ([\d.]+) s, for targets ([\d.]+) s"
    for_inputs, for_targets = figures(waited, together)
    assert for_inputs > for_targets
    for_inputs, for_targets = figures(waited, late)
    assert for_inputs < for_targets


def test_an_event_loop_goes_on_while_it_trains_and_a_fork_overlaps_nothing() -> None:
    out = printed_by("asynchronous")
    assert out.count("right pairs: 60 of 60 batches") == 2
    assert "equal losses: True, all 60 of them" in out
    lateness = r"(\d+) ticks, late by ([\d.]+) ms at the median, ([\d.]+) ms at the 99th percentile"
    without, loaded = figures(lateness, out)[::3]
    assert min(without, loaded) > 60  # more often than once a step
    assert "the forward pass was over when torch.jit.fork returned: 15 of 15 times" in out
    assert len(figures(r"returned after ([\d.]+) ms, torch.jit.wait after another ([\d.]+) ms", out)) == 2


def test_swapping_in_changes_no_digit() -> None:
    out = printed_by("swap_in")
    losses = figures(r"32 steps in [\d.]+ s, last loss (\S+)", out)
    assert len(losses) == 3
    assert len(set(losses)) == 1
    assert "equal digit for digit: True, all 32 losses of the three runs" in out
    for name in ("torch.utils.data.dataloader", "shmloader.loader", "shmloader.patching"):
        assert f"({name}.DataLoader)" in out


def test_each_example_is_tested() -> None:
    tested = {"two_loaders", "one_loader", "late_targets", "asynchronous", "swap_in"}
    assert {path.stem for path in FOLDER.glob("*.py")} == tested | MODULES
