"""Inputs and targets from one loader: a PairedDataset, which one stream of indices drives.

The job is that of `two_loaders.py`, to the last digit of its last loss. There is nothing to keep in step: a transform
sees both halves of a pair, and both travel in one batch. Needs the extra `demo`:

    python benchmarks/examples/one_loader.py
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from finder import Trainer, warm_up
from photographs import CROP, SEED, Masks, Pictures, bright, crop, random_place
from shmloader import DataLoader, PairedDataset

PAIRS, BATCH_SIZE, EPOCHS = 640, 16, 3
WORKERS = 2


def crop_both(picture: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One place, drawn once, for both."""
    place = random_place()
    return crop(picture, place), crop(mask, place)


def main() -> None:
    """Trains, and prints what it measured."""
    warm_up((BATCH_SIZE, 3, CROP, CROP))
    trainer = Trainer()
    loader = DataLoader(
        PairedDataset(Pictures(PAIRS), Masks(PAIRS), joint_transform=crop_both),
        BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        generator=torch.Generator().manual_seed(SEED),
        persistent_workers=True,
    )
    batches, right, loss = 0, 0, 0.0
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            loss = trainer.step(inputs, targets)
            batches += 1
            right += torch.equal(bright(inputs), targets)
    seconds = time.perf_counter() - start
    print(f"one loader: {batches} batches in {seconds:.2f} s, {batches / seconds:.1f} batches/s")
    print(f"worker processes: {WORKERS}")
    print(f"right pairs: {right} of {batches} batches")
    print(f"last loss: {loss!r}")
    print(loader.stats(lifetime=True).verdict)


if __name__ == "__main__":
    main()
