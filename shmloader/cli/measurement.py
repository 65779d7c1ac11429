"""One loader at one number of workers: how fast its batches come, who waits, and what it takes."""

import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shmloader.cli import footprint
from shmloader.cli.recipe import OURS, Recipe, Run, running
from shmloader.cli.target import BenchError
from shmloader.cli.weigh import batch_bytes, look_at

LEAD = 2  # batches that are not counted, where the workers are not given more ahead
SETTLE_S = 0.2  # from the first batch, where epochs do not end: some workers may still be starting
LEAST = 2  # batches that are counted, and twice as many as there are workers, for these deliver in bursts
PATIENCE = 4  # times the seconds asked for, until what was counted so far has to do
LOOKS = 3  # batches after the timed ones at which the memory is looked at
END: Any = object()


@dataclass(frozen=True)
class Terms:
    """How every measurement is made."""

    seconds: float
    step_s: float  # for which the consumer sleeps after each batch


@dataclass(frozen=True)
class Measurement:
    """What was seen of one loader, in one round or as the medians of several."""

    loader: str
    workers: int
    batches_per_s: float
    samples_per_s: float | None  # None: only the dataset knows how many samples are in a batch
    mb_per_s: float
    waiting: float  # share of the time, 0 to 1, for which the consumer waited for a batch
    thread_cpu_s: float  # processor seconds of the consuming thread, per batch
    extra_bytes: float | None  # of memory, in all processes; None where the system does not tell
    steady: bool  # the starts of epochs are left out; False: epochs are too short for that
    diagnosis: str | None = None  # our loader's own word on where the time goes


def measure(recipe: Recipe, kind: str, workers: int, terms: Terms) -> Measurement:
    """One round with a fresh loader."""
    gc.collect()
    before = footprint.tree_bytes() if footprint.readable() else None
    loader, endless = recipe.endless(kind, workers)
    meter = _Meter(terms, workers * (loader.prefetch_factor or 0), SETTLE_S if endless and workers else 0.0)
    with running(loader) as run:
        batches = meter.run(run)
        diagnosis = _diagnosis(loader) if kind == OURS else None
        extra = None if before is None else max(0, _peak(run, batches) - before)
    rate = meter.batches / meter.took_s
    samples = recipe.samples_per_batch(endless)
    return Measurement(
        loader=kind,
        workers=workers,
        batches_per_s=rate,
        samples_per_s=rate * samples if samples else None,
        mb_per_s=rate * statistics.fmean(meter.sizes) / 1e6,
        waiting=meter.waited_s / meter.took_s,
        thread_cpu_s=meter.cpu_s / meter.batches,
        extra_bytes=extra,
        steady=meter.steady,
        diagnosis=diagnosis,
    )


def median(rounds: Sequence[Measurement]) -> Measurement:
    """The median of each figure by itself."""

    def middle(name: str) -> Any:
        figures = [value for each in rounds if (value := getattr(each, name)) is not None]
        return statistics.median(figures) if figures else None

    figures = ("batches_per_s", "samples_per_s", "mb_per_s", "waiting", "thread_cpu_s", "extra_bytes")
    last = rounds[-1]
    return Measurement(
        loader=last.loader,
        workers=last.workers,
        steady=all(each.steady for each in rounds),
        diagnosis=last.diagnosis,
        **{name: middle(name) for name in figures},
    )


class _Meter:
    """Counts and times batches, over as many epochs as it takes."""

    def __init__(self, terms: Terms, ahead: int, settle_s: float) -> None:
        self.batches = 0
        self.took_s = self.waited_s = self.cpu_s = 0.0
        self.sizes: list[int] = []
        self.steady = True
        self._terms = terms
        self._lead = max(LEAD, ahead)
        self._least = max(LEAST, ahead)
        self._settle_s = settle_s
        self._give_up_at = 0.0

    def run(self, run: Run) -> Iterator[Any]:
        """Until it is enough; the iterator that is left, in the middle of an epoch or at its end."""
        self._give_up_at = time.perf_counter() + PATIENCE * self._terms.seconds
        while True:
            seen = self.batches, len(self.sizes)
            batches = self._epoch(run) if self.steady else self._whole_epoch(run)
            if self._enough(self.took_s):
                return batches
            if seen == (self.batches, len(self.sizes)):
                raise BenchError("the data set has no batches in its second epoch: it can be read only once")

    def _epoch(self, run: Run) -> Iterator[Any]:
        """Counts what comes after the batches that the workers were given before the first was asked for."""
        batches = run.begin()
        settled_at = 0.0
        for number in itertools.count():
            batch = next(batches, END)
            if batch is END:
                break
            self.sizes.append(batch_bytes(batch))
            self._step()
            settled_at = settled_at or time.perf_counter() + self._settle_s
            if number + 1 >= self._lead and time.perf_counter() >= settled_at:
                break
        self._count(batches, time.perf_counter(), time.thread_time(), whole=False)
        self.steady = self.batches > 0
        return batches

    def _whole_epoch(self, run: Run) -> Iterator[Any]:
        """Counts everything, the start of the workers included."""
        begun, cpu_before = time.perf_counter(), time.thread_time()
        batches = run.begin()
        self._count(batches, begun, cpu_before, whole=True)
        return batches

    def _count(self, batches: Iterator[Any], begun: float, cpu_before: float, whole: bool) -> None:
        asked = begun
        while not self._enough(self.took_s + asked - begun):
            batch = next(batches, END)
            got = time.perf_counter()
            if batch is END:
                asked = got if whole else asked
                break
            self.batches += 1
            self.waited_s += got - asked
            self._step()
            asked = time.perf_counter()
        self.took_s += asked - begun
        self.cpu_s += time.thread_time() - cpu_before

    def _enough(self, took_s: float) -> bool:
        if time.perf_counter() > self._give_up_at and self.batches:
            return True
        return self.batches >= self._least and took_s >= self._terms.seconds

    def _step(self) -> None:
        if self._terms.step_s:
            time.sleep(self._terms.step_s)


def _peak(run: Run, batches: Iterator[Any]) -> int:
    """The most memory that a look at the process tree finds, while batches come and are read."""
    peak = footprint.tree_bytes()
    for _ in range(LOOKS):
        batch = next(batches, END)
        if batch is END:
            batches = run.begin()
            batch = next(batches, END)
        look_at(batch)
        peak = max(peak, footprint.tree_bytes())
    return peak


def _diagnosis(loader: Any) -> str | None:
    """What the loader's own read-out says about where the time goes, in versions that do."""
    text = getattr(getattr(loader.stats(), "verdict", None), "text", None)
    return str(text) if text else None
