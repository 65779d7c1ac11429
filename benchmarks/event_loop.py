"""By how much an event loop comes late while a loader waits for slow batches.

A task wants to run every millisecond, for some seconds: beside nothing; beside `async for` over batches that take a
second each, which a worker sleeps; and beside the ordinary loop over the same loader, which blocks. Rounds alternate.

    python benchmarks/event_loop.py
    python benchmarks/event_loop.py --rounds 5 --batch-s 1 --batches 4 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.utils.data import Dataset

import shmloader
from shmloader.cli.facts import machine_facts

TICK_S = 0.001
ASKED_MS = 10.0


class Slow(Dataset[Tensor]):
    """One item a batch, after a while."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.tensor(index)


@dataclass(frozen=True)
class Lateness:
    """Milliseconds by which the ticking task came late in one round, or the medians of several."""

    p50_ms: float
    p99_ms: float
    most_ms: float


Company = Callable[["shmloader.DataLoader[Tensor]"], Awaitable[None]]


async def nothing(loader: shmloader.DataLoader[Tensor]) -> None:
    """As long as the others take."""
    assert isinstance(loader.dataset, Slow)
    await asyncio.sleep(loader.dataset.count * loader.dataset.seconds)


async def awaited(loader: shmloader.DataLoader[Tensor]) -> None:
    """`async for`."""
    async for _ in loader:
        pass


async def blocking(loader: shmloader.DataLoader[Tensor]) -> None:
    """`for`, which gives way to the event loop only between two batches."""
    for _ in loader:
        await asyncio.sleep(0)


COMPANY: dict[str, Company] = {"no loader": nothing, "async for": awaited, "for": blocking}


async def tick(late_s: list[float]) -> None:
    """Wants to run every TICK_S, and notes by how much each time comes late."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - due)


async def beside(company: Company, loader: shmloader.DataLoader[Tensor]) -> Lateness:
    """How late the ticks come beside it."""
    late_s: list[float] = []
    ticker = asyncio.create_task(tick(late_s))
    await company(loader)
    await asyncio.sleep(2 * TICK_S)  # a last tick: it knows how long the loop was blocked
    ticker.cancel()
    late_ms = [1000 * seconds for seconds in late_s]
    percentiles = quantiles(late_ms, n=100, method="inclusive")
    return Lateness(percentiles[49], percentiles[98], max(late_ms))


def measure(rounds: int, batch_s: float, batches: int) -> dict[str, Lateness]:
    """The medians for each company."""
    seen: dict[str, list[Lateness]] = {name: [] for name in COMPANY}
    for _ in range(rounds):
        for name, company in COMPANY.items():
            with shmloader.DataLoader(Slow(batches, batch_s), num_workers=1) as loader:
                seen[name].append(asyncio.run(beside(company, loader)))
    fields = ("p50_ms", "p99_ms", "most_ms")
    return {
        name: Lateness(*(median(getattr(each, field) for each in found) for field in fields))
        for name, found in seen.items()
    }


def met(results: dict[str, Lateness]) -> bool:
    """Whether the loop is as good as free beside `async for`."""
    return results["async for"].p99_ms < max(ASKED_MS, 2 * results["no loader"].p99_ms)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-s", type=float, default=1.0, help="seconds that a batch takes")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    facts = {**machine_facts(), "rounds": args.rounds, "batch_s": args.batch_s, "batches": args.batches}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    results = measure(args.rounds, args.batch_s, args.batches)
    print(f"{'late by':10} {'p50 ms':>9} {'p99 ms':>9} {'most ms':>9}")
    for name, late in results.items():
        print(f"{name:10} {late.p50_ms:9.2f} {late.p99_ms:9.2f} {late.most_ms:9.2f}")
    print(f"async for: p99 asked for below {ASKED_MS:.0f} ms, {'met' if met(results) else 'MISSED'}")
    if args.json:
        figures = {name: asdict(late) for name, late in results.items()}
        args.json.write_text(json.dumps({"facts": facts, "results": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
