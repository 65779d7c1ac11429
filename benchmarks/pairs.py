"""Inputs and targets from two data sets: two of torch's DataLoaders kept in step by hand, and one of shmloader's.

"two loaders" is the usual recipe: a DataLoader for the inputs and one for the targets, equally shuffled by generators
of the same seed, with as many workers each as shmloader's only one has; after each step the next batch of targets is
fetched, and their iterator is made anew at its end. "shmloader" is one loader over a PairedDataset, "late targets" the
same with `late_targets=True`. The cases:

- a: pairs that lie in memory, 1.6 MB of inputs and as much of targets a batch, so that transport is what takes time;
- b: a JPEG photograph as the input and a PNG mask as the target, decoded by Pillow: the workers' own work is;
- c1: the start of an epoch, with one worker (of each loader) that is up, and targets that take 20 times as long;
- c2: indices that depend on the prediction. Every loader reads ahead of what it delivers, so one batch of indices is
  one epoch of a persistent worker. Inputs take 2 ms, the step, a sleep, 20 ms, and so do the targets.

First: from iter() until the inputs are there, with which the model could begin. PSS: what the loaders add to the memory
of the process tree, at most, while all pages of each batch are read; what no process maps at the moment, as torch's
batches on their way, is not in it. Shared: what they add to the shared memory of the whole machine, mapped or not.
Descriptors: what they add in the training process. Each contestant of each round runs in a fresh process, each round
begins with another one, and the warm-up checks all pairs.

    python benchmarks/pairs.py
    python benchmarks/pairs.py --only a,c1 --rounds 5 --workers 2 --json out.json

Linux only. Case b needs the extra `demo`.
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
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import shmloader
from shmloader.cli.facts import machine_facts
from shmloader.cli.footprint import descriptors, tree_bytes
from shmloader.cli.weigh import look_at

RECIPE, ONE, LATE = "two loaders", "shmloader", "late targets"
CONTESTANTS = (RECIPE, ONE, LATE)
SEED = 0
DISTINCT = 64  # items of a side that lie in memory, or on disk; the other indices repeat them
EDGE = 256  # pixels of a picture
INPUT_MS, SLOW_TARGET_MS, BRIEF_INPUT_MS, TARGET_MS, STEP_MS = 10.0, 200.0, 2.0, 20.0, 20.0

Targets = Callable[[], Tensor]

# -- the data sets: the first number of an item tells its index --------------------------------------------------------


class Planes(Dataset[Tensor]):
    """Small images that lie in memory."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.planes = torch.rand(DISTINCT, 3, 64, 64)
        self.planes[:, 0, 0, 0] = torch.arange(DISTINCT)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.planes[index % DISTINCT]


class Pictures(Dataset[Tensor]):
    """Pieces of photographs, decoded from JPEG."""

    def __init__(self, count: int) -> None:
        from shmloader.cli.photographs import TRAINING, photograph

        self.count = count
        self.files = [self.encoded(photograph(name)[:EDGE, :EDGE]) for name in TRAINING]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
            item = self.decoded(np.array(image))
        item.view(-1)[0] = index % DISTINCT
        return item

    def encoded(self, pixels: Any) -> bytes:
        """The file of one item."""
        return _file(pixels, "JPEG")

    def decoded(self, pixels: Any) -> Tensor:
        """(3, EDGE, EDGE) float32."""
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float().div_(255)


class Masks(Pictures):
    """What is bright in these pictures, decoded from PNG."""

    def encoded(self, pixels: Any) -> bytes:
        """The file of one item."""
        return _file((pixels.mean(axis=2) > 120).astype(np.uint8), "PNG")

    def decoded(self, pixels: Any) -> Tensor:
        """(1, EDGE, EDGE) uint8."""
        return torch.from_numpy(pixels)[None]


def _file(pixels: Any, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


class Slow(Dataset[Tensor]):
    """Numbers, after a while."""

    def __init__(self, count: int, milliseconds: float) -> None:
        self.count, self.seconds = count, milliseconds / 1000

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index % DISTINCT)])


@dataclass(frozen=True)
class Case:
    """Two data sets, and how they are read."""

    inputs: Callable[[int], Dataset[Tensor]]
    targets: Callable[[int], Dataset[Tensor]]
    batch_size: int
    batches: int  # an epoch
    warm_up: int  # batches before those that are timed
    workers: int | None = None  # of a loader; None: as the command line says
    lookahead: bool = True
    step_ms: float = 0.0


CASES = {
    "a": Case(Planes, Planes, 32, batches=128, warm_up=48),
    "b": Case(Pictures, Masks, 16, batches=32, warm_up=32),
    "c1": Case(lambda n: Slow(n, INPUT_MS), lambda n: Slow(n, SLOW_TARGET_MS), 1, batches=4, warm_up=4, workers=1),
    "c2": Case(
        lambda n: Slow(n, BRIEF_INPUT_MS), lambda n: Slow(n, TARGET_MS), 1, batches=1 << 20, warm_up=8, workers=1,
        lookahead=False, step_ms=STEP_MS,
    ),
}  # fmt: skip

# -- the contestants ---------------------------------------------------------------------------------------------------


class OneByOne:
    """A batch sampler whose passes have one batch each, the next one."""

    def __init__(self) -> None:
        self.index = -1

    def __iter__(self) -> Iterator[list[int]]:
        self.index += 1
        yield [self.index]


def batching(case: Case) -> dict[str, Any]:
    """How a loader batches; the same order each time that this is called."""
    if not case.lookahead:
        return {"batch_sampler": OneByOne()}
    return {"batch_size": case.batch_size, "shuffle": True, "generator": torch.Generator().manual_seed(SEED)}


class TwoLoaders:
    """The recipe. An epoch of it: inputs, and how to get at their targets."""

    def __init__(self, case: Case, inputs: Dataset[Tensor], targets: Dataset[Tensor], workers: int) -> None:
        crew: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
        self._lookahead = case.lookahead
        self.loaders = [DataLoader(side, **batching(case), **crew) for side in (inputs, targets)]
        self._targets: Iterator[Tensor] = iter(())
        self._ahead: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Targets]]:
        inputs, targets = self.loaders
        if not self._lookahead:
            self._targets = iter(targets)  # before the inputs are waited for
            for batch in inputs:
                yield batch, partial(next, self._targets)
            return
        if self._ahead is None:
            self._fetch_ahead()
        for batch in inputs:
            yield batch, partial(_given, self._ahead)
            self._fetch_ahead()

    def _fetch_ahead(self) -> None:
        self._ahead = next(self._targets, None)
        if self._ahead is None:
            self._targets = iter(self.loaders[1])
            self._ahead = next(self._targets)

    def close(self) -> None:
        """End the workers."""
        for loader in self.loaders:
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
            loader._iterator = None


class OneLoader:
    """One loader over pairs. An epoch of it: inputs, and how to get at their targets."""

    def __init__(self, case: Case, inputs: Dataset[Tensor], targets: Dataset[Tensor], workers: int, late: bool) -> None:
        crew: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "late_targets": late}
        pairs = shmloader.PairedDataset(inputs, targets)
        self.loader: shmloader.DataLoader[Any] = shmloader.DataLoader(pairs, **batching(case), **crew)
        self.loaders = [self.loader]

    def __iter__(self) -> Iterator[tuple[Tensor, Targets]]:
        for batch in self.loader:
            yield batch[0], partial(batch.__getitem__, 1)

    def close(self) -> None:
        """End the workers."""
        self.loader.close()


Contestant = TwoLoaders | OneLoader


def _given(targets: Any) -> Any:
    return targets


def enter(who: str, case: Case, inputs: Dataset[Tensor], targets: Dataset[Tensor], workers: int) -> Contestant:
    """The contestant of that name."""
    if who == RECIPE:
        return TwoLoaders(case, inputs, targets, workers)
    return OneLoader(case, inputs, targets, workers, late=who == LATE)


# -- one contestant ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One pair of batches, learnt from."""

    inputs: Tensor
    targets: Tensor
    first_s: float | None  # where an epoch begins: from there to the inputs


@dataclass(frozen=True)
class Measured:
    """One contestant in one round, or the medians of several."""

    batches_per_s: float
    first_ms: float
    input_ms: float  # what a batch of inputs takes without a loader
    peak_mib: float  # PSS of the process tree
    shared_mib: float
    descriptors: float
    workers: float

    @property
    def step_ms(self) -> float:
        """From one batch to the next."""
        return 1000 / self.batches_per_s


def measure(who: str, name: str, workers: int, seconds: float) -> Measured:
    """Run one contestant in this process."""
    case = CASES[name]
    sides = [make(case.batches * case.batch_size) for make in (case.inputs, case.targets)]
    input_ms = 1000 * seconds_alone(sides[0], case.batch_size)
    contestant = enter(who, case, sides[0], sides[1], case.workers or workers)
    try:
        steps = train(contestant, case.step_ms / 1000)
        added = warm_up(steps, case.warm_up)
        batch_s, first_s = speed(steps, seconds)
    finally:
        contestant.close()
    crew = sum(loader.num_workers for loader in contestant.loaders)
    return Measured(1 / batch_s, 1000 * first_s, input_ms, added[0] / 2**20, added[1] / 2**20, added[2], crew)


def seconds_alone(side: Dataset[Tensor], batch_size: int, batches: int = 5) -> float:
    """What a batch of this side takes without a loader."""
    times = []
    for number in range(batches):
        start = time.perf_counter()
        default_collate([side[number * batch_size + position] for position in range(batch_size)])
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def train(contestant: Contestant, step_s: float) -> Iterator[Step]:
    """Epoch after epoch, without end. The targets are asked for after the prediction, which is a sleep."""
    while True:
        begun: float | None = time.perf_counter()
        for inputs, targets in contestant:
            first_s = None if begun is None else time.perf_counter() - begun
            time.sleep(step_s) if step_s else None
            yield Step(inputs, targets(), first_s)
            begun = None


def warm_up(steps: Iterator[Step], count: int) -> tuple[int, ...]:
    """What is added at most, as of `held`. The second half of the steps is left alone, and so goes fast."""
    bare = most = held()
    for number in range(count):
        step = next(steps)
        check(step)
        if number <= count // 2:
            look_at((step.inputs, step.targets))
            most = tuple(map(max, most, held()))
    return tuple(there - before for there, before in zip(most, bare))


def held() -> tuple[int, ...]:
    """Bytes of this process tree, of the machine's shared memory, and descriptors of this process."""
    return tree_bytes(), _shared_bytes(), descriptors()


def _shared_bytes() -> int:
    words = Path("/proc/meminfo").read_text().split()
    return int(words[words.index("Shmem:") + 1]) * 1024


def check(step: Step) -> None:
    """See to it that inputs and targets belong together.

    Raises:
        ValueError: they do not.
    """
    ours, theirs = (side.flatten(1)[:, 0].float() for side in (step.inputs, step.targets))
    if not torch.equal(ours, theirs):
        raise ValueError(f"these are no pairs: inputs {ours.tolist()}, targets {theirs.tolist()}")


def speed(steps: Iterator[Step], seconds: float) -> tuple[float, float]:
    """Seconds per batch over about `seconds`, and from the beginning of an epoch to its first inputs (median)."""
    firsts: list[float] = []
    count, took_s, start = 0, 0.0, time.perf_counter()
    while took_s < seconds or not firsts:
        step = next(steps)
        if step.first_s is not None:
            firsts.append(step.first_s)
        count += 1
        took_s = time.perf_counter() - start
    return took_s / count, statistics.median(firsts)


# -- all rounds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """A figure that is asked for."""

    what: str
    found: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.found >= self.bound if self.at_least else self.found <= self.bound

    def __str__(self) -> str:
        asked = f"{'at least' if self.at_least else 'at most'} {self.bound:.4g}"
        return f"{self.what}: {self.found:.3g}, asked for {asked}, {'met' if self.met else 'MISSED'}"


@dataclass(frozen=True)
class Result:
    """All rounds of one case."""

    case: str
    rounds: dict[str, list[Measured]]

    def median(self, who: str) -> Measured:
        """Figure by figure."""
        columns = zip(*(asdict(each).values() for each in self.rounds[who]))
        return Measured(*(statistics.median(column) for column in columns))

    def ratio(self, figure: str, who: str) -> float:
        """A contestant's figure over the recipe's in the same round; the median of the rounds."""
        both = zip(self.rounds[who], self.rounds[RECIPE])
        return float(statistics.median(getattr(mine, figure) / getattr(theirs, figure) for mine, theirs in both))

    def goals(self) -> list[Goal]:
        """What is asked for in this case."""
        faster, late = self.ratio("batches_per_s", ONE), self.median(LATE)
        if self.case == "a":
            half = Goal("a: PSS over the recipe's", self.ratio("peak_mib", ONE), 0.5)
            return [Goal("a: batches/s over the recipe's", faster, 8, at_least=True), half]
        if self.case == "b":
            return [Goal("b: batches/s over the recipe's", faster, 0.97, at_least=True)]
        if self.case == "c1":
            return [Goal("c1: first inputs, late targets, ms", late.first_ms, 1.2 * late.input_ms + 10)]
        return [Goal("c2: a step, late targets, ms", late.step_ms, 1.2 * (BRIEF_INPUT_MS + STEP_MS))]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the medians and what is asked for."""
        medians = {who: asdict(self.median(who)) for who in self.rounds}
        ratios = {
            who: {figure: self.ratio(figure, who) for figure in ("batches_per_s", "first_ms", "peak_mib")}
            for who in self.rounds
        }
        goals = [asdict(goal) | {"met": goal.met} for goal in self.goals()]
        return asdict(self) | {"medians": medians, "ratios": ratios, "goals": goals}


def measure_apart(who: str, name: str, workers: int, seconds: float) -> Measured:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--measure", who, "--only", name]
    command += ["--workers", str(workers), "--seconds", str(seconds)]
    return Measured(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def run_case(name: str, args: argparse.Namespace) -> Result:
    """All rounds, each beginning with another contestant."""
    rounds: dict[str, list[Measured]] = {who: [] for who in CONTESTANTS}
    order = list(CONTESTANTS)
    for _ in range(args.rounds):
        for who in order:
            rounds[who].append(measure_apart(who, name, args.workers, args.seconds))
        order.append(order.pop(0))
    return Result(name, rounds)


# -- out ---------------------------------------------------------------------------------------------------------------

HEADER = (
    *("case", "contestant", "workers", "batches/s", "x recipe", "step ms", "first ms"),
    *("PSS MiB", "shared MiB", "descriptors"),
)
WIDTHS = (4, 12, 7, 10, 8, 8, 8, 8, 10, 11)


def line(cells: Sequence[str]) -> str:
    """One line of the table."""
    padded = [cell.ljust(width) for cell, width in zip(cells[:2], WIDTHS)]
    return " ".join([*padded, *(cell.rjust(width) for cell, width in zip(cells[2:], WIDTHS[2:]))])


def row(result: Result, who: str) -> str:
    """A contestant of a result as a line of the table."""
    found = result.median(who)
    cells = [f"{found.workers:.0f}", f"{found.batches_per_s:,.1f}", f"{result.ratio('batches_per_s', who):.2f}"]
    cells += [f"{found.step_ms:.2f}", f"{found.first_ms:.2f}", f"{found.peak_mib:.1f}", f"{found.shared_mib:.1f}"]
    return line([result.case, who, *cells, f"{found.descriptors:.0f}"])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pairs from two of torch's DataLoaders and from one of shmloader's.")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="of each loader in a and b (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, medians and rounds here as well")
    parser.add_argument("--measure", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if parsed.workers < 1 or parsed.rounds < 1:
        parser.error("at least one worker and one round are needed")
    return parsed


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all contestants, or, as its own child, one."""
    args = arguments(argv)
    if args.measure:
        print(json.dumps(asdict(measure(args.measure, args.only[0], args.workers, args.seconds))))
        return
    facts = machine_facts() | {name: getattr(args, name) for name in ("workers", "rounds", "seconds")}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(line(HEADER))
    results = [report(run_case(name, args)) for name in args.only]
    print(*(goal for result in results for goal in result.goals()), sep="\n")
    if args.json:
        contents = {"facts": facts, "results": [result.as_json() for result in results]}
        args.json.write_text(json.dumps(contents, indent=1) + "\n")


def report(result: Result) -> Result:
    """Prints its lines of the table."""
    print(*(row(result, who) for who in CONTESTANTS), sep="\n", flush=True)
    return result


if __name__ == "__main__":
    main()
