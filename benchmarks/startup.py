"""How long a loader takes to start, to turn from one epoch to the next, and to stop.

Both loaders read one small dataset (tensors that lie in memory), so that starting and stopping are all there is to see.
Measured in each round, with `fork`, `spawn` and `forkserver`, with and without persistent workers, and without workers:

- iter(): how long the call itself takes;
- first batch: from calling iter() to holding the first batch;
- turn: from holding the last batch of an epoch to holding the first of the next;
- shutdown: from letting go of loader and iterator in the middle of an epoch until that returns.

Each contestant of each round runs in a child process of its own, one after the other, alternating: a process has one
fork server, and whatever one loader has it import would help the other. The first start in a child includes the start
of that server, and what is done once in a process; it is reported apart from the later ones, which are warm. A child of
torch's loader never imports shmloader, nor do its workers.

    python benchmarks/startup.py
    python benchmarks/startup.py --only fork,none --rounds 5 --workers 2 --json out.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

TORCH, OURS = "torch", "shmloader"
NO_WORKERS = "none"
METHODS = ("fork", "spawn", "forkserver")
BATCHES, BATCH_SIZE, FEATURES = 32, 32, 256  # an epoch


@dataclass(frozen=True)
class Times:
    """Seconds of one life of a loader."""

    iter_s: float
    first_batch_s: float
    turn_s: float
    shutdown_s: float


@dataclass(frozen=True)
class Way:
    """How the workers are started, and whether they outlive an epoch."""

    method: str
    persistent: bool

    def __str__(self) -> str:
        return "no workers" if self.method == NO_WORKERS else self.method + ", persistent" * self.persistent


@dataclass(frozen=True)
class Result:
    """All rounds of one way: by contestant, one list of lives for each child."""

    way: Way
    rounds: dict[str, list[list[Times]]]

    def first(self, who: str) -> Times:
        """Medians of the children's first lives."""
        return median([lives[0] for lives in self.rounds[who]])

    def warm(self, who: str) -> Times:
        """Medians of all later lives."""
        return median([times for lives in self.rounds[who] for times in lives[1:]])


def make_loader(who: str, dataset: TensorDataset, way: Way, workers: int) -> DataLoader[Any]:
    """A loader under test."""
    crew: dict[str, Any] = {}
    if way.method != NO_WORKERS:
        crew = {
            "num_workers": workers,
            "multiprocessing_context": way.method,
            "persistent_workers": way.persistent,
        }
    if who == TORCH:
        return DataLoader(dataset, BATCH_SIZE, **crew)
    import shmloader  # here, so that torch's child and its workers do without it

    return shmloader.DataLoader(dataset, BATCH_SIZE, **crew)


def live(who: str, dataset: TensorDataset, way: Way, workers: int) -> Times:
    """One loader from its first epoch into its second."""
    loader = make_loader(who, dataset, way, workers)
    start = time.perf_counter()
    batches = iter(loader)
    iterated = time.perf_counter()
    next(batches)
    began = time.perf_counter()
    last = read(batches, BATCHES - 1)
    if next(batches, None) is not None:
        raise RuntimeError(f"an epoch has {BATCHES} batches")
    batches = iter(loader)
    next(batches)
    turned = time.perf_counter()
    read(batches, BATCHES // 2)
    stop = time.perf_counter()
    if who == OURS:
        loader.close()  # type: ignore[attr-defined]
    del loader, batches
    stopped = time.perf_counter()
    return Times(iterated - start, began - start, turned - last, stopped - stop)


def read(batches: Iterator[Any], count: int) -> float:
    """Takes so many batches; the time at which the last of them came."""
    for _ in range(count):
        next(batches)
    return time.perf_counter()


def lead_lives(who: str, way: Way, workers: int, lives: int) -> list[Times]:
    """One after the other in this process, the first one cold."""
    if who == OURS:
        import shmloader  # noqa: F401 - the import is no part of the first start
    samples = BATCHES * BATCH_SIZE
    dataset = TensorDataset(torch.rand(samples, FEATURES), torch.arange(samples))
    seen = []
    for _ in range(lives):
        seen.append(live(who, dataset, way, workers))
        if left := multiprocessing.active_children():
            raise RuntimeError(f"{who} leaves workers behind: {left}")
    return seen


def in_a_child(who: str, way: Way, workers: int, lives: int) -> list[Times]:
    """`lead_lives` in a fresh interpreter."""
    command = [sys.executable, __file__, "--measure", who, "--only", way.method]
    command += ["--workers", str(workers), "--lives", str(lives), *(["--persistent"] if way.persistent else [])]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Times(**figures) for figures in json.loads(answer)]


def run_way(way: Way, args: argparse.Namespace) -> Result:
    """All rounds, each beginning with the other contestant."""
    order = [TORCH, OURS]
    rounds: dict[str, list[list[Times]]] = {who: [] for who in order}
    for _ in range(args.rounds):
        for who in order:
            rounds[who].append(in_a_child(who, way, args.workers, args.lives))
        order.reverse()
    return Result(way, rounds)


def median(seen: Sequence[Times]) -> Times:
    """The median of each figure by itself."""
    return Times(*(statistics.median(getattr(times, field.name) for times in seen) for field in fields(Times)))


HEADER = ("", "", "iter()", "", "first batch", "", "turn", "", "shutdown", "")
BELOW = ("milliseconds", "", *("first", "warm") * 4)
WIDTHS = (22, 9, 9, 9, 12, 9, 9, 9, 9, 9)


def line(cells: Sequence[str]) -> str:
    """One line of the table."""
    left, right = cells[:2], cells[2:]
    padded = [cell.ljust(width) for cell, width in zip(left, WIDTHS)]
    return " ".join([*padded, *(cell.rjust(width) for cell, width in zip(right, WIDTHS[2:]))]).rstrip()


def row(result: Result, who: str) -> str:
    """One contestant of a result as a line of the table."""
    first, warm = result.first(who), result.warm(who)
    cells = []
    for field in fields(Times):
        for times in (first, warm):
            milliseconds = 1000 * getattr(times, field.name)
            cells.append(f"{milliseconds:,.{0 if milliseconds >= 100 else 2}f}")
    return line([str(result.way), who, *cells])


def as_json(result: Result) -> dict[str, Any]:
    """A result for the JSON file."""
    by_contestant = {
        who: {
            "first": asdict(result.first(who)),
            "warm": asdict(result.warm(who)),
            "rounds": [[asdict(times) for times in lives] for lives in children],
        }
        for who, children in result.rounds.items()
    }
    return {**asdict(result.way), **by_contestant}


def ways(methods: Sequence[str]) -> list[Way]:
    """What is measured, in the order of the table."""
    return [
        Way(method, persistent)
        for method in methods
        for persistent in ((False,) if method == NO_WORKERS else (False, True))
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    known = (NO_WORKERS, *METHODS)
    parser = argparse.ArgumentParser(description="Starting, turning to the next epoch and stopping, for both loaders.")
    parser.add_argument("--only", default=",".join(known), help="start methods, by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="child processes for each contestant (default: 3)")
    parser.add_argument("--lives", type=int, default=3, help="loaders in each child: one cold, the others warm (3)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, medians and rounds here as well")
    parser.add_argument("--measure", choices=(TORCH, OURS), help=argparse.SUPPRESS)
    parser.add_argument("--persistent", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in known]:
        parser.error(f"unknown start method {', '.join(unknown)}; there are {', '.join(known)}")
    if parsed.lives < 2 or parsed.rounds < 1:
        parser.error("at least two lives and one round are needed")
    return parsed


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: above 0.5 others are being measured as well
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: getattr(args, name) for name in ("workers", "rounds", "lives")},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all ways, or, as its own child, one contestant in one of them."""
    args = arguments(argv)
    if args.measure:
        way = Way(args.only[0], args.persistent)
        print(json.dumps([asdict(times) for times in lead_lives(args.measure, way, args.workers, args.lives)]))
        return
    print(", ".join(f"{key} {value}" for key, value in facts(args).items()))
    print(line(HEADER), line(BELOW), sep="\n")
    results = []
    for way in ways(args.only):
        results.append(run_way(way, args))
        print(row(results[-1], TORCH), row(results[-1], OURS), sep="\n", flush=True)
    if args.json:
        report = {"facts": facts(args), "results": [as_json(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
