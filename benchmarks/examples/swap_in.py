"""Swapping shmloader into a training script that exists.

The script is `train`. It is run three times: with torch's loader; with shmloader's, which takes one changed import,
`from shmloader import DataLoader`; and unchanged inside `patched_torch()`, for scripts that cannot be edited. Every
loss is compared digit for digit. Needs the extra `demo`:

    python benchmarks/examples/swap_in.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, StackDataset

import shmloader
from finder import Trainer, warm_up
from photographs import SEED, SIDE, Masks, Pictures

PAIRS, BATCH_SIZE, EPOCHS, WORKERS = 256, 16, 2, 2


def train(make_loader: Callable[..., DataLoader[Any]]) -> list[float]:
    """A training run as it may stand in any script; the losses of its steps."""
    trainer = Trainer()
    loader = make_loader(
        StackDataset(Pictures(PAIRS), Masks(PAIRS)),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        generator=torch.Generator().manual_seed(SEED),
    )
    return [trainer.step(pictures, masks) for _ in range(EPOCHS) for pictures, masks in loader]


def timed(what: str, make_loader: Callable[..., DataLoader[Any]]) -> list[float]:
    """`train`, and a line about it."""
    start = time.perf_counter()
    losses = train(make_loader)
    seconds = time.perf_counter() - start
    name = f"{make_loader.__module__}.{make_loader.__qualname__}"
    print(f"{what}: {len(losses)} steps in {seconds:.2f} s, last loss {losses[-1]!r} ({name})")
    return losses


def main() -> None:
    """Trains three times, and compares."""
    warm_up((BATCH_SIZE, 3, SIDE, SIDE))
    torchs = timed("torch", DataLoader)
    swapped = timed("the one import", shmloader.DataLoader)
    with shmloader.patched_torch():
        patched = timed("patched_torch", DataLoader)
    print(f"equal digit for digit: {torchs == swapped == patched}, all {len(torchs)} losses of the three runs")


if __name__ == "__main__":
    main()
