"""Inputs and targets from two of torch's DataLoaders that are kept in step by hand, as people write it.

Every sample is cropped at random, and its mask must be cropped at the same place. So both loaders get generators of the
same seed (the same order), their workers draw from the same seeds (the same crops), both have equally many workers and
batches of equal size, and each side draws equally many numbers for a sample. All of that has to stay so; nothing tells
when it does not, but for the comparison with which this example counts its right pairs.

`one_loader.py` does the same job with one loader. Needs the extra `demo`:

    python benchmarks/examples/two_loaders.py
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from finder import Trainer, warm_up
from photographs import CROP, SEED, Masks, Pictures, bright, crop, random_place

PAIRS, BATCH_SIZE, EPOCHS = 640, 16, 3
WORKERS = 2  # for each loader
END = torch.empty(0)


class Cropped(Dataset[Tensor]):
    """Random crops of the items of one side."""

    def __init__(self, whole: Dataset[Tensor], count: int) -> None:
        self.whole = whole
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return crop(self.whole[index], random_place())


def seed_worker(worker_id: int) -> None:
    """Worker `worker_id` of either loader draws the same places."""
    random.seed(torch.initial_seed())  # the loader's base seed, which came from its generator, plus worker_id


def make_loader(whole: Dataset[Tensor]) -> DataLoader[Tensor]:
    """The loader of one side. What both sides must have in common stands here, once."""
    return DataLoader(
        Cropped(whole, PAIRS),
        BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        worker_init_fn=seed_worker,
        generator=torch.Generator().manual_seed(SEED),  # one for each: both would draw from a common one in turn
        persistent_workers=True,
    )


def main() -> None:
    """Trains, and prints what it measured."""
    warm_up((BATCH_SIZE, 3, CROP, CROP))
    trainer = Trainer()
    input_loader, target_loader = make_loader(Pictures(PAIRS)), make_loader(Masks(PAIRS))
    batches, right, loss = 0, 0, 0.0
    start = time.perf_counter()
    for _ in range(EPOCHS):
        target_iter = iter(target_loader)  # again: the last one has come to its end
        ahead = next(target_iter)
        for inputs in input_loader:
            targets, ahead = ahead, next(target_iter, END)
            loss = trainer.step(inputs, targets)
            batches += 1
            right += torch.equal(bright(inputs), targets)
        if ahead is not END:
            raise RuntimeError("the inputs ended before the targets")
    seconds = time.perf_counter() - start
    print(f"two loaders: {batches} batches in {seconds:.2f} s, {batches / seconds:.1f} batches/s")
    print(f"worker processes: {2 * WORKERS}, {WORKERS} for the inputs and {WORKERS} for the targets")
    print(f"right pairs: {right} of {batches} batches")
    print(f"last loss: {loss!r}")


if __name__ == "__main__":
    main()
