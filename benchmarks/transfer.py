"""What it costs to get batches to a GPU: torch's DataLoader and shmloader's against bare copies, in one run.

Needs a CUDA device. Four ways are measured in alternating rounds:

- "copies": the same batch, over and over, from page-locked memory: what the bus can do;
- "torch": torch's loader with pin_memory=True, and .to("cuda", non_blocking=True) on every tensor;
- "pinned": shmloader with pin_memory=True, and the same;
- "device": shmloader with device="cuda".

Each of them first as fast as it can, then with a training step between two batches, which keeps the device busy for a
fixed time: what a step takes then, over what it takes without any loading, is what loading costs a training run.

    python benchmarks/transfer.py
    python benchmarks/transfer.py --only L,dict --rounds 5 --workers 8 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import shmloader
from shmloader.cli.cases import CASES
from shmloader.cli.facts import machine_facts
from shmloader.cli.weigh import batch_bytes
from shmloader.loader import TorchLoader

DEVICE = "cuda"
COPIES, TORCH, PINNED, ON_DEVICE = "copies", "torch", "pinned", "device"
DEFAULT_CASES = "L,U8,M,S,dict,many"
WARM_UP_BATCHES = 16  # workers have started, the pool is carved and page-locked, memory on the device is there
#: Batches that may be on their way before the device is waited for, or bare copies would queue up without end.
MOST_QUEUED = 64
EDGE = 4096  # of the matrices that a step multiplies
HEADER = ("case", "way", "GB/s", "x copies", "CPU ms", "x torch", "step ms", "x alone", "host allocations")
WIDTHS = (6, 8, 8, 9, 9, 8, 9, 8, 17)


@dataclass(frozen=True)
class Figures:
    """What one way came to."""

    batches_per_s: float
    gb_per_s: float
    thread_cpu_s: float  # processor seconds of the training thread, per batch
    step_s: float  # with a training step between two batches
    step_alone_s: float  # the same step without any loading, in the same round
    host_allocations: float  # of page-locked memory, in the fast part after the warm-up


@dataclass(frozen=True)
class Result:
    """The medians of one case and every round behind them."""

    case: str
    medians: dict[str, Figures]
    rounds: dict[str, list[Figures]]

    def ratio(self, figure: str, who: str, other: str) -> float:
        """One way's figure over another's."""
        below: float = getattr(self.medians[other], figure)
        return float(getattr(self.medians[who], figure)) / below if below else float("nan")

    def overlap(self, who: str) -> float:
        """What a step takes with loading, over what it takes alone."""
        found = self.medians[who]
        return found.step_s / found.step_alone_s

    def as_json(self) -> dict[str, Any]:
        """All of it, with the ratios and what the case is."""
        ratios = {
            who: {
                "rate_over_copies": self.ratio("gb_per_s", who, COPIES),
                "rate_over_torch": self.ratio("gb_per_s", who, TORCH),
                "cpu_over_torch": self.ratio("thread_cpu_s", who, TORCH),
                "step_over_alone": self.overlap(who),
            }
            for who in self.medians
        }
        return {**asdict(self), "ratios": ratios, "what": CASES[self.case].what}


@dataclass(frozen=True)
class Terms:
    """How the cases are run."""

    workers: int
    rounds: int
    seconds: float  # per way, round and part
    step_ms: float


# -- the ways ----------------------------------------------------------------------------------------------------------


def to_device(batch: Any) -> Any:
    """What a training loop does with a batch of page-locked memory."""
    return tree_map(lambda x: x.to(DEVICE, non_blocking=True) if isinstance(x, torch.Tensor) else x, batch)


def page_locked(batch: Any) -> Any:
    """The batch in page-locked memory of torch's."""
    return tree_map(lambda x: x.pin_memory() if isinstance(x, torch.Tensor) and DEVICE != "cpu" else x, batch)


def ways(name: str, workers: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Batches on the device without end, for each way."""
    case = CASES[name]
    dataset = case.dataset()
    options: dict[str, Any] = {"batch_size": case.batch_size, "collate_fn": case.collate_fn, "num_workers": workers}
    sample = page_locked(next(iter(TorchLoader(dataset, case.batch_size, collate_fn=case.collate_fn))))
    return {
        COPIES: lambda: map(to_device, repeat(sample)),
        TORCH: lambda: map(to_device, TorchLoader(dataset, pin_memory=True, **options)),
        PINNED: lambda: map(to_device, shmloader.DataLoader(dataset, pin_memory=True, **options)),
        ON_DEVICE: lambda: iter(shmloader.DataLoader(dataset, device=DEVICE, **options)),
    }


# -- one way -----------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_allocations() -> int:
    """How often torch has taken page-locked memory from the system so far."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):  # torch 2.7 brought it
        return 0
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))


class Step:
    """A training step that keeps the device busy for about so many milliseconds, whatever the batch."""

    def __init__(self, milliseconds: float, edge: int = EDGE) -> None:
        self.matrix = torch.ones(edge, edge, device=DEVICE, dtype=torch.bfloat16)
        self.product = torch.empty_like(self.matrix)
        self.count = 1
        self.alone(3)
        self.count = max(1, round(milliseconds / 1000 / self.alone(20)))

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def alone(self, steps: int) -> float:
        """Seconds that one step takes while nothing is loaded."""
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self()
        synchronize()
        return (time.perf_counter() - start) / steps


def at_full_speed(batches: Iterator[Any], seconds: float) -> tuple[float, float, float]:
    """Seconds per batch, processor seconds of this thread per batch, and page-locked allocations all together."""
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    synchronize()
    count, taken = 0, host_allocations()
    cpu_s, start = time.thread_time(), time.perf_counter()
    waited_s = 0.0
    while time.perf_counter() - start < seconds:
        next(batches)
        count += 1
        if count % MOST_QUEUED == 0:
            before = time.thread_time()
            synchronize()
            waited_s += time.thread_time() - before  # it waits busily, which is not the loader's doing
    cpu_s = time.thread_time() - cpu_s - waited_s
    synchronize()
    return (time.perf_counter() - start) / count, cpu_s / count, host_allocations() - taken


def between_steps(batches: Iterator[Any], seconds: float, step: Step) -> float:
    """Seconds per batch with a training step after each."""
    for _ in range(WARM_UP_BATCHES):
        next(batches)
        step()
    synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(batches)
        step()
        count += 1
        if count % MOST_QUEUED == 0:
            synchronize()
    synchronize()
    return (time.perf_counter() - start) / count


def measure(make: Callable[[], Iterator[Any]], terms: Terms, step: Step) -> Figures:
    """Both parts of one way."""
    batches = make()
    nbytes = batch_bytes(next(batches))
    batch_s, cpu_s, taken = at_full_speed(batches, terms.seconds)
    alone_s = step.alone(WARM_UP_BATCHES)
    step_s = between_steps(batches, terms.seconds, step)
    alone_s = (alone_s + step.alone(WARM_UP_BATCHES)) / 2
    return Figures(1 / batch_s, nbytes / batch_s / 1e9, cpu_s, step_s, alone_s, taken)


def run_case(name: str, terms: Terms, step: Step) -> Result:
    """All rounds of one case."""
    makers = ways(name, terms.workers)
    seen: dict[str, list[Figures]] = {who: [] for who in makers}
    order = list(makers)
    for _ in range(terms.rounds):
        for who in order:
            seen[who].append(measure(makers[who], terms, step))
        order.append(order.pop(0))
    return Result(name, {who: median(figures) for who, figures in seen.items()}, seen)


def median(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure by itself."""
    return Figures(*(statistics.median(column) for column in zip(*(astuple(figures) for figures in rounds))))


# -- out ---------------------------------------------------------------------------------------------------------------


def line(cells: Iterable[str]) -> str:
    """One line of the table."""
    return " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS))


def rows(result: Result) -> list[str]:
    """A result as lines of the table."""
    lines = []
    for who, found in result.medians.items():
        cells = [result.case, who, f"{found.gb_per_s:.2f}", f"{result.ratio('gb_per_s', who, COPIES):.2f}"]
        cells += [f"{1000 * found.thread_cpu_s:.3f}", f"{result.ratio('thread_cpu_s', who, TORCH):.2f}"]
        cells += [f"{1000 * found.step_s:.2f}", f"{result.overlap(who):.3f}", f"{found.host_allocations:.0f}"]
        lines.append(line(cells))
    return lines


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Batches to a GPU: torch's DataLoader, shmloader's and bare copies.")
    parser.add_argument("--only", default=DEFAULT_CASES, help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2, help="per way, round and part (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20, help="length of a training step (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write facts, medians, ratios and rounds here as well"
    )
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return parsed


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the cases and prints lines for each as soon as they are known; exits with 1 where there is no device."""
    args = arguments(argv)
    if not torch.cuda.is_available():
        sys.exit("transfer: a CUDA device is missing; there is nothing to measure")
    facts = machine_facts() | {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f", workers {args.workers}")
    print("CPU ms: processor time of the training thread, a batch; x alone: a step with loading over one without")
    print(line(HEADER))
    report(args, facts, Step(args.step_ms))


def report(args: argparse.Namespace, facts: dict[str, Any], step: Step) -> None:
    """The table, and the file."""
    terms, results = Terms(args.workers, args.rounds, args.seconds, args.step_ms), []
    for name in args.only:
        results.append(run_case(name, terms, step))
        print("\n".join(rows(results[-1])), flush=True)
    if args.json:
        contents = {"facts": facts | asdict(terms), "results": [result.as_json() for result in results]}
        args.json.write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main()
