"""Inputs and targets from two data sets: two of torch's loaders kept in step by hand, against one of shmloader's.

The recipe is the usual one: a DataLoader for the inputs and one for the targets, each with as many workers as
shmloader's only one, the same order by generators of the same seed, the next batch of targets fetched ahead, the
iterator of targets made anew at its end. The cases:

- a: cheap pairs, so that the transport is what takes the time (batches of 1.6 MB of inputs and as much of targets);
- b: a JPEG photograph as the input and a PNG mask as the target, decoded by Pillow;
- c1: an epoch's start, with workers that are up; the targets take twenty times as long as the inputs (20 ms a batch).
  "first" is the time from iter() until the first inputs are in hand, which is when a first prediction can begin;
- c2: no lookahead, because the next indices depend on the prediction: a batch of indices is known only after the step.
  A step of 20 ms, targets of 20 ms, inputs of 2 ms.

Each contestant of a round runs in a process of its own, one after the other, in turn. Memory is the PSS of the process
and its workers, at its peak over an epoch, less that of the bare process before its loaders were made.

    python benchmarks/pairs.py
    python benchmarks/pairs.py --only a,c1 --rounds 5 --workers 2 --json out.json
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import shmloader
from shmloader.cli.facts import machine_facts
from shmloader.cli.footprint import descriptors, tree_bytes

RECIPE, ONE, LATE = "two loaders", "shmloader", "late targets"
CONTESTANTS = (RECIPE, ONE, LATE)
SEED = 0
MIB = 1 << 20
#: Milliseconds a batch, in the cases with sleeping data sets.
INPUT_MS, TARGET_MS, STEP_MS = {"c1": 1.0, "c2": 2.0}, 20.0, 20.0


class Planes(Dataset[torch.Tensor]):
    """Item *i*: a plane full of *i*'s, which is copied out of memory."""

    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self.planes = torch.arange(count, dtype=torch.float32).view(-1, *[1] * len(shape)).expand(count, *shape)

    def __len__(self) -> int:
        return len(self.planes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.planes[index].clone()


class Pictures(Dataset[torch.Tensor]):
    """Item *i*: a picture that is decoded from memory. Its index stands in the first pixel, or near it."""

    def __init__(self, count: int, kind: str) -> None:
        from PIL import Image  # only here: the other cases need nothing but the package

        from shmloader.cli.photographs import TRAINING, photograph

        self.count, self.files = count, []
        for name in TRAINING[:4]:
            image = Image.fromarray(photograph(name)).resize((160, 160))
            if kind == "PNG":
                image = image.convert("L").point(lambda value: 255 * (value > 120))
            buffer = io.BytesIO()
            image.save(buffer, kind)
            self.files.append(buffer.getvalue())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(self.files[index % len(self.files)]))))
        marked = pixels.to(torch.float32)
        marked.view(-1)[0] = index
        return marked


class Slow(Dataset[torch.Tensor]):
    """Item *i*: a number, after a while."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


@dataclass(frozen=True)
class Case:
    """Two data sets, and how they are read."""

    inputs: Callable[[], Dataset[torch.Tensor]]
    targets: Callable[[], Dataset[torch.Tensor]]
    batch_size: int
    workers: int | None = None  # None: as the command line says
    lookahead: bool = True
    step_s: float = 0.0


def _slow(case: str, batches: int) -> Case:
    return Case(
        lambda: Slow(batches, INPUT_MS[case] / 1e3),
        lambda: Slow(batches, TARGET_MS / 1e3),
        batch_size=1,
        workers=1,
        lookahead=case != "c2",
        step_s=STEP_MS / 1e3 if case == "c2" else 0.0,
    )


CASES = {
    "a": Case(lambda: Planes(4096, (3, 64, 64)), lambda: Planes(4096, (3, 64, 64)), 32),
    "b": Case(lambda: Pictures(2048, "JPEG"), lambda: Pictures(2048, "PNG"), 16),
    "c1": _slow("c1", 12),
    "c2": _slow("c2", 4096),
}


class Asked:
    """Batches of indices that are known only after the step before: none is given ahead of what was asked for."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.known: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        while self.known:
            yield [self.known.pop()]


class TwoLoaders:
    """The recipe."""

    def __init__(self, case: Case, workers: int) -> None:
        self._case, self._workers = case, workers
        self._asked = [Asked(1), Asked(1)]
        self._loaders = [self._loader(make(), place) for place, make in enumerate((case.inputs, case.targets))]
        self.workers = 2 * workers

    def _loader(self, dataset: Any, place: int) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": self._workers, "persistent_workers": True}
        if not self._case.lookahead:
            return DataLoader(dataset, batch_sampler=self._asked[place], **options)
        generator = torch.Generator().manual_seed(SEED)
        sampler = RandomSampler(dataset, generator=generator)
        return DataLoader(dataset, self._case.batch_size, sampler=sampler, drop_last=True, **options)

    def ask(self, index: int) -> None:
        """Make one more batch of indices known."""
        for asked in self._asked:
            asked.known.append(index)

    def __iter__(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        targets = iter(self._loaders[1])
        for inputs in self._loaders[0]:
            yield inputs, lambda: next(targets)


class OneLoader:
    """One loader over pairs, with or without late targets."""

    def __init__(self, case: Case, workers: int, late: bool) -> None:
        pairs = shmloader.PairedDataset(case.inputs(), case.targets())
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "late_targets": late}
        self._asked = Asked(1)
        self.workers = workers
        self.loader: shmloader.DataLoader[Any]
        if case.lookahead:
            sampler = RandomSampler(pairs, generator=torch.Generator().manual_seed(SEED))
            self.loader = shmloader.DataLoader(pairs, case.batch_size, sampler=sampler, drop_last=True, **options)
        else:
            self.loader = shmloader.DataLoader(pairs, batch_sampler=self._asked, **options)

    def ask(self, index: int) -> None:
        """Make one more batch of indices known."""
        self._asked.known.append(index)

    def __iter__(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        for batch in self.loader:
            if isinstance(batch, shmloader.LateBatch):
                yield batch.inputs, partial(getattr, batch, "targets")
            else:
                yield batch[0], partial(batch.__getitem__, 1)


def contestant(who: str, case: Case, workers: int) -> TwoLoaders | OneLoader:
    """What is measured."""
    return TwoLoaders(case, workers) if who == RECIPE else OneLoader(case, workers, late=who == LATE)


@dataclass(frozen=True)
class Measured:
    """One contestant in one round."""

    batches_per_s: float
    first_ms: float
    step_ms: float
    peak_mib: float
    descriptors: int
    workers: int


def measure(who: str, name: str, workers: int, seconds: float) -> Measured:
    """Run one contestant in this process."""
    case = CASES[name]
    workers = case.workers or workers
    bare_bytes, bare_descriptors = tree_bytes(), descriptors()
    loaders = contestant(who, case, workers)
    if not case.lookahead:
        return _without_lookahead(loaders, case, seconds)
    peak = _warm_up(loaders) - bare_bytes
    added = descriptors() - bare_descriptors
    firsts: list[float] = []
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while not rates or time.perf_counter() < until:
        batches, start = 0, time.perf_counter()
        for _inputs, targets in loaders:
            if not batches:
                firsts.append(time.perf_counter() - start)
            targets()
            batches += 1
            if time.perf_counter() >= until and batches > 8:
                break
        rates.append(batches / (time.perf_counter() - start))
        del targets
    return Measured(
        batches_per_s=statistics.median(rates),
        first_ms=1e3 * statistics.median(firsts),
        step_ms=1e3 / statistics.median(rates),
        peak_mib=peak / MIB,
        descriptors=added,
        workers=loaders.workers,
    )


def _warm_up(loaders: TwoLoaders | OneLoader) -> int:
    """One epoch, or the beginning of one, whose pairs are checked; the most memory that there was meanwhile."""
    peak = 0
    for number, (inputs, targets) in enumerate(loaders):
        check(inputs, targets())
        if number % 8 == 0:
            peak = max(peak, tree_bytes())
        if number >= 40:
            break
    return peak


def _without_lookahead(loaders: TwoLoaders | OneLoader, case: Case, seconds: float) -> Measured:
    """One epoch of a single batch at a time: its indices are known when the one before it was learnt from."""
    firsts: list[float] = []
    steps: list[float] = []
    until = time.perf_counter() + seconds
    bare, index = descriptors(), 0
    while not steps or time.perf_counter() < until:
        start = time.perf_counter()
        loaders.ask(index)
        for inputs, targets in loaders:
            firsts.append(time.perf_counter() - start)
            time.sleep(case.step_s)  # the model, while the targets load
            check(inputs, targets())
        index += 1
        steps.append(time.perf_counter() - start)
    step_s = statistics.median(steps[1:] or steps)  # the first has the workers start
    return Measured(
        batches_per_s=1 / step_s,
        first_ms=1e3 * statistics.median(firsts[1:] or firsts),
        step_ms=1e3 * step_s,
        peak_mib=0.0,
        descriptors=descriptors() - bare,
        workers=loaders.workers,
    )


def check(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Whether these are pairs: the index stands in the first number of each half.

    Raises:
        ValueError: they are not.
    """
    ours, theirs = (part.reshape(len(part), -1)[:, 0] for part in (inputs, targets))
    if not torch.equal(ours, theirs):
        raise ValueError(f"wrong pairs: inputs {ours.tolist()} with targets {theirs.tolist()}")


def measure_apart(who: str, name: str, workers: int, seconds: float) -> Measured:
    """:func:`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--measure", who, "--only", name, "--workers", str(workers)]
    command += ["--seconds", str(seconds)]
    return Measured(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def median(rounds: Sequence[Measured]) -> Measured:
    """Field by field."""
    return Measured(**{name: statistics.median(getattr(each, name) for each in rounds) for name in asdict(rounds[0])})


def ratio(rounds: dict[str, list[Measured]], who: str) -> float:
    """How many times the recipe's batches per second: the median over the rounds."""
    pairs = zip(rounds[who], rounds[RECIPE])
    return statistics.median(mine.batches_per_s / theirs.batches_per_s for mine, theirs in pairs)


HEADER = ("case", "contestant", "workers", "batches/s", "x recipe", "first ms", "step ms", "PSS MiB", "descriptors")
WIDTHS = (4, 13, 8, 10, 9, 9, 8, 8, 12)


def line(cells: Sequence[str]) -> str:
    """One line of the table."""
    return " ".join(cell.ljust(w) if place < 2 else cell.rjust(w) for place, (cell, w) in enumerate(zip(cells, WIDTHS)))


def row(name: str, who: str, rounds: dict[str, list[Measured]]) -> str:
    """A contestant's medians as a line of the table."""
    it = median(rounds[who])
    memory = f"{it.peak_mib:.1f}" if it.peak_mib else "-"
    rates = f"{it.batches_per_s:,.1f}", f"{ratio(rounds, who):.2f}"
    times = f"{it.first_ms:.2f}", f"{it.step_ms:.2f}"
    return line([name, who, f"{it.workers:.0f}", *rates, *times, memory, f"{it.descriptors:.0f}"])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two loaders in step against one loader of pairs.")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="for each loader, in a and b (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, medians and rounds here as well")
    parser.add_argument("--measure", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if parsed.workers < 1 or parsed.rounds < 1:
        parser.error("--workers and --rounds must be 1 or more")
    return parsed


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all contestants, or, as its own child, one."""
    args = arguments(argv)
    if args.measure:
        print(json.dumps(asdict(measure(args.measure, args.only[0], args.workers, args.seconds))))
        return
    facts = machine_facts()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(line(HEADER))
    results = {}
    for name in args.only:
        rounds: dict[str, list[Measured]] = {who: [] for who in CONTESTANTS}
        for _ in range(args.rounds):
            for who in CONTESTANTS:
                rounds[who].append(measure_apart(who, name, args.workers, args.seconds))
        for who in CONTESTANTS:
            print(row(name, who, rounds), flush=True)
        results[name] = {who: [asdict(each) for each in rounds[who]] for who in CONTESTANTS}
    if args.json:
        settings = {"workers": args.workers, "rounds": args.rounds, "seconds": args.seconds}
        args.json.write_text(json.dumps({"facts": facts | settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
