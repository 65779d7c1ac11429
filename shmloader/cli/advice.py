"""What the figures of a benchmark recommend."""

from collections.abc import Sequence
from dataclasses import dataclass

from shmloader.cli.measurement import Measurement
from shmloader.cli.recipe import OURS, TORCH

AS_FAST = 0.95  # of the best: what fewer workers reach is as good
EQUAL_WITHIN = 0.1  # of 1: rounds of a machine that does other things too differ by as much
LITTLE = 0.05  # share of the time spent waiting that is not worth a change


@dataclass(frozen=True)
class Advice:
    """The recommendation in words and in figures."""

    text: str
    workers: int
    over_torch: float  # times torch's rate at the same number of workers
    over_best_torch: float  # times torch's best rate at any number
    diagnosis: str  # where the time goes


def advise(measurements: Sequence[Measurement]) -> Advice:
    """Of the medians of both loaders at all numbers of workers."""
    ours, theirs = (_best(measurements, loader) for loader in (OURS, TORCH))
    same = next(each for each in measurements if (each.loader, each.workers) == (TORCH, ours.workers))
    over_torch = ours.batches_per_s / same.batches_per_s
    over_best = ours.batches_per_s / theirs.batches_per_s
    text = f"num_workers={ours.workers} with shmloader: {rate(ours)}; {_beside(ours, same, theirs)}"
    return Advice(text, ours.workers, over_torch, over_best, ours.diagnosis or _diagnose(ours))


def rate(measurement: Measurement) -> str:
    """Batches per second for people's eyes."""
    return f"{measurement.batches_per_s:,.{0 if measurement.batches_per_s >= 100 else 1}f} batches/s"


def _best(measurements: Sequence[Measurement], loader: str) -> Measurement:
    """The fewest workers that are as fast as any number."""
    mine = [each for each in measurements if each.loader == loader]
    top = max(each.batches_per_s for each in mine)
    return min((each for each in mine if each.batches_per_s >= AS_FAST * top), key=lambda each: each.workers)


def _beside(ours: Measurement, same: Measurement, best: Measurement) -> str:
    if ours.workers == 0:
        return f"without workers both loaders do the same, and no worker makes it faster; torch's best: {rate(best)}"
    if best.workers == same.workers:
        return f"{_times(ours, same)} torch's {rate(same)}, which is torch's best"
    most = f"{_times(ours, best)} torch's best, {rate(best)} with num_workers={best.workers}"
    return f"{_times(ours, same)} torch's {rate(same)}, and {most}"


def _times(ours: Measurement, theirs: Measurement) -> str:
    ratio = ours.batches_per_s / theirs.batches_per_s
    return f"{ratio:.2f}x" + (" (about equal)" if abs(ratio - 1) <= EQUAL_WITHIN else "")


def _diagnose(ours: Measurement) -> str:
    """For a loader that does not say so itself."""
    if ours.waiting <= LITTLE:
        return f"the training step takes the time: no more than {ours.waiting:.0%} of it is spent waiting for batches"
    if ours.workers == 0:
        return f"{ours.waiting:.0%} of the time the training process makes batches itself"
    return f"{ours.waiting:.0%} of the time the training waits for the workers to make batches"
