"""Training inside an event loop that has other things to do.

`async for` waits for batches without blocking the loop, and `asyncio.to_thread` runs the training step in a thread. A
task that wants to run every millisecond shows what is left for others: by how much it comes late, while the same steps
run on batches that lie in memory, and while they run on batches from the loader. What differs is the loader's own work,
and that of its worker process, which takes its share of the cores.

`torch.jit.fork` looks as if it did this too. On an ordinary module it does not: it returns when the forward pass is
over, as is measured beside. Needs the extra `demo`:

    python benchmarks/examples/asynchronous.py
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
from torch import Tensor

from finder import Trainer, warm_up
from photographs import SEED, SIDE, Masks, Pictures, bright
from shmloader import DataLoader, PairedDataset

PAIRS, BATCH_SIZE, WORKERS = 960, 16, 1
TICK_S = 0.001
FORKS = 15

Batch = tuple[Tensor, Tensor]


def make_loader() -> DataLoader[Batch]:
    """The same batches from each."""
    pairs = PairedDataset(Pictures(PAIRS), Masks(PAIRS))
    generator = torch.Generator().manual_seed(SEED)
    return DataLoader(pairs, BATCH_SIZE, shuffle=True, num_workers=WORKERS, generator=generator)


async def train(batches: AsyncIterable[Batch]) -> tuple[list[float], int]:
    """The losses, and how many batches had their own targets."""
    trainer, losses, right = Trainer(), [], 0

    def step(inputs: Tensor, targets: Tensor) -> tuple[float, bool]:
        return trainer.step(inputs, targets), torch.equal(bright(inputs), targets)

    async for inputs, targets in batches:
        loss, belong = await asyncio.to_thread(step, inputs, targets)
        losses.append(loss)
        right += belong
    return losses, right


async def from_memory(batches: Iterable[Batch]) -> AsyncIterator[Batch]:
    """Batches that are there."""
    for batch in batches:
        yield batch


async def tick(late_s: list[float]) -> None:
    """Wants to run every TICK_S, and notes by how much each time comes late."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late_s.append(time.perf_counter() - due)


async def timed(what: str, batches: AsyncIterable[Batch]) -> list[float]:
    """`train` beside the ticking task, and a line about both; the losses."""
    late_s: list[float] = []
    ticker = asyncio.create_task(tick(late_s))
    start = time.perf_counter()
    losses, right = await train(batches)
    seconds = time.perf_counter() - start
    ticker.cancel()
    p50_ms, p99_ms = (1000 * quantiles(late_s, n=100)[percent - 1] for percent in (50, 99))
    print(f"{what}: {len(losses)} steps in {seconds:.2f} s, {len(losses) / seconds:.1f} batches/s")
    print(f"  right pairs: {right} of {len(losses)} batches")
    print(f"  {len(late_s)} ticks, late by {p50_ms:.2f} ms at the median, {p99_ms:.2f} ms at the 99th percentile")
    return losses


@dataclass(frozen=True)
class Fork:
    """One forward pass through `torch.jit.fork`."""

    fork_s: float
    wait_s: float
    over: bool  # the forward pass, when torch.jit.fork returned


def fork(model: torch.nn.Module, pictures: Tensor) -> Fork:
    """Measures one."""
    over: list[bool] = []
    hook = model.register_forward_hook(lambda *_: over.append(True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is to go, with the rest of TorchScript
        start = time.perf_counter()
        future = torch.jit.fork(model, pictures)
        forked, was_over = time.perf_counter(), bool(over)
        torch.jit.wait(future)
        waited = time.perf_counter()
    hook.remove()
    return Fork(forked - start, waited - forked, was_over)


def forward_s(model: torch.nn.Module, pictures: Tensor) -> float:
    """Seconds of a plain forward pass."""
    start = time.perf_counter()
    model(pictures)
    return time.perf_counter() - start


def compare_fork() -> None:
    """Plain and forked forward passes by turns."""
    model, pictures = Trainer().model, torch.rand(BATCH_SIZE, 3, SIDE, SIDE)
    plain_s, forks = zip(*((forward_s(model, pictures), fork(model, pictures)) for _ in range(FORKS)))
    fork_ms, wait_ms = 1000 * median(each.fork_s for each in forks), 1000 * median(each.wait_s for each in forks)
    print(f"torch.jit.fork: returned after {fork_ms:.2f} ms, torch.jit.wait after another {wait_ms:.2f} ms")
    print(f"  a plain forward pass: {1000 * median(plain_s):.2f} ms (medians of {FORKS})")
    over = sum(each.over for each in forks)
    print(f"  the forward pass was over when torch.jit.fork returned: {over} of {FORKS} times")


async def main() -> None:
    """Trains without and with the loader, and compares with `torch.jit.fork`."""
    warm_up((BATCH_SIZE, 3, SIDE, SIDE))
    with make_loader() as loader:
        held = list(loader)
    without = await timed("from memory", from_memory(held))
    with make_loader() as loader:
        losses = await timed(f"from the loader, {WORKERS} worker process", loader)
    print(f"equal losses: {losses == without}, all {len(losses)} of them")
    compare_fork()


if __name__ == "__main__":
    asyncio.run(main())
