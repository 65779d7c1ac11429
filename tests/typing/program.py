"""A user's program, to be type-checked and not to be run; lines that must be refused say so."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset
from typing_extensions import assert_type

import shmloader
from shmloader import DataLoader, LoaderStats, PairedDataset, Verdict

Sample = tuple[torch.Tensor, int]


class Pictures(Dataset[Sample]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Sample:
        return torch.zeros(3), index


class Mine(DataLoader[Sample]):
    pass


def train(loader: torch.utils.data.DataLoader[Sample]) -> int:
    return len(loader)


loader = DataLoader(
    Pictures(), 4, shuffle=True, num_workers="auto", memory_limit="1GiB", slots=None, seeding="batch", max_workers=2
)
assert_type(loader, DataLoader[Sample])
train(loader)
train(Mine(Pictures(), batch_size=4, copy=True, prefetch_factor=2, num_workers=1))

stats = loader.stats(lifetime=True)
assert_type(stats, LoaderStats)
assert_type(stats.verdict, Verdict)
assert_type(stats.as_dict(), dict[str, float])
assert_type(loader.poke(), int)
for known in shmloader.loaders():
    known.close()

with loader as same:
    for inputs, targets in same:
        print(inputs, targets)


def jitter(picture: Sample, text: str) -> tuple[Sample, int]:
    return picture, len(text)


def same_crop(item: dict[str, Any]) -> dict[str, Any]:
    return item


pairs = PairedDataset(Pictures(), ["a", "b"], cycle="targets", collate=(None, len))
assert_type(pairs, PairedDataset[tuple[Sample, str]])
assert_type(pairs[0], tuple[Sample, str])
assert_type(len(pairs), int)
assert_type(DataLoader(pairs, num_workers=2), DataLoader[tuple[Sample, str]])
assert_type(PairedDataset(Pictures(), ["a"], joint_transform=jitter), PairedDataset[tuple[Sample, int]])
named = PairedDataset(a=Pictures(), b=[1], c=Pictures(), cycle=["b"], joint_transform=same_crop, collate={"b": len})
assert_type(named, PairedDataset[dict[str, Any]])
DataLoader(pairs, collate_fn=pairs.collate_fn)
PairedDataset(Pictures(), Pictures(), Pictures())  # refused
PairedDataset(Pictures(), Pictures(), joint_transform=3)  # refused

shmloader.patch_torch(num_workers="auto", memory_limit=1 << 30, slots=9, seeding="worker", max_workers=3, copy=True)
with shmloader.patched_torch(force=True, num_workers=2):
    pass
shmloader.unpatch_torch()

try:
    next(iter(loader))
except (shmloader.WorkerDiedError, shmloader.BatchTooLargeError) as error:
    print(error)

DataLoader(Pictures(), slots="many")  # refused
DataLoader(Pictures(), memory="1GiB")  # accepted: newer torch's own keywords are passed on
shmloader.patch_torch(batch_size=3)  # refused
loader.stats(True)  # refused
