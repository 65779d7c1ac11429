"""Inputs first, targets late: the model runs on what is there, and waits for the targets where it needs them.

Here a target takes many times as long to make as an input. With `late_targets=True` a batch is handed over when its
inputs are there, so the first prediction does not wait for the first targets. `batch[0]` never waits; `batch[1]` waits
for the targets if they are not there yet. The workers have as much to do as without, and where they are what limits the
job, as here, the whole epoch takes as long. Needs the extra `demo`:

    python benchmarks/examples/late_targets.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from finder import Trainer, warm_up
from photographs import SEED, SIDE, Pictures, SmoothMasks, bright, without_grain
from shmloader import DataLoader, PairedDataset

PAIRS, BATCH_SIZE, WORKERS = 96, 8, 1


@dataclass
class Times:
    """Seconds of one epoch."""

    first_prediction: float = 0.0  # since the epoch began
    inputs: float = 0.0  # waited for
    targets: float = 0.0  # waited for
    epoch: float = 0.0


def train(loader: DataLoader[Any]) -> tuple[Times, list[tuple[Tensor, Tensor]]]:
    """One epoch; what it took, and its batches."""
    trainer, times, pairs = Trainer(), Times(), []
    start = asked = time.perf_counter()
    for batch in loader:
        inputs = batch[0]
        given = time.perf_counter()
        prediction = trainer.predict(inputs)
        predicted = time.perf_counter()
        targets = batch[1]
        times.targets += time.perf_counter() - predicted
        trainer.learn(prediction, targets)
        times.inputs += given - asked
        times.first_prediction = times.first_prediction or predicted - start
        pairs.append((inputs, targets))
        asked = time.perf_counter()
    times.epoch = time.perf_counter() - start
    return times, pairs


def item_ms(dataset: Dataset[Tensor]) -> float:
    """Milliseconds that one item takes: the mean of a batch of them."""
    start = time.perf_counter()
    for index in range(BATCH_SIZE):
        dataset[index]
    return 1000 * (time.perf_counter() - start) / BATCH_SIZE


def belong(inputs: Tensor, targets: Tensor) -> bool:
    """Whether these are the targets of these inputs."""
    return all(torch.equal(bright(without_grain(picture)), mask) for picture, mask in zip(inputs, targets))


def run(late_targets: bool) -> None:
    """One epoch, and what is to be said of it."""
    pairs = PairedDataset(Pictures(PAIRS), SmoothMasks(PAIRS))
    generator = torch.Generator().manual_seed(SEED)
    with DataLoader(
        pairs, BATCH_SIZE, shuffle=True, num_workers=WORKERS, generator=generator, late_targets=late_targets
    ) as loader:
        times, batches = train(loader)
    right = sum(belong(inputs, targets) for inputs, targets in batches)
    print(f"late_targets={late_targets}:")
    print(f"  first prediction after {1000 * times.first_prediction:.1f} ms")
    print(f"  waited for inputs {times.inputs:.3f} s, for targets {times.targets:.3f} s")
    print(f"  {len(batches)} batches in {times.epoch:.2f} s, {len(batches) / times.epoch:.1f} batches/s")
    print(f"  right pairs: {right} of {len(batches)} batches")


def main() -> None:
    """Trains for an epoch without and one with late targets."""
    warm_up((BATCH_SIZE, 3, SIDE, SIDE))
    print(f"worker processes: {WORKERS}")
    print(f"to make: an input {item_ms(Pictures(PAIRS)):.2f} ms, a target {item_ms(SmoothMasks(PAIRS)):.2f} ms")
    run(late_targets=False)
    run(late_targets=True)


if __name__ == "__main__":
    main()
