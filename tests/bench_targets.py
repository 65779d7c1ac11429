"""What tests give to `shmloader bench`: data sets and loaders of all kinds. Spawned workers can import it."""

from __future__ import annotations

import itertools
import random
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler, get_worker_info

import shmloader
from tests.datasets import Made, Rows, draws, first

Point = namedtuple("Point", "x y")


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("name", "x")

    def __init__(self) -> None:
        self.x, self.name = torch.arange(3), "slotted"


@dataclass
class Record:
    """An object with one."""

    x: torch.Tensor
    extra: dict[str, Any]


class Stream(IterableDataset[Any]):
    """So many samples from every worker; None: without end."""

    def __init__(self, count: int | None) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info else 0
        for index in itertools.count() if self.count is None else range(self.count):
            yield torch.full((8,), 10 * index + worker), str(index)


class Shuffled:
    """A batch sampler that shuffles its own list in place, and draws from the global generator."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.order, self.batch_size = list(range(count)), batch_size

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.order)
        for start in range(0, len(self.order), self.batch_size):
            yield self.order[start : start + self.batch_size]


def odd_batch(index: int) -> dict[str, Any]:
    """Nearly everything that a batch may hold."""
    nested = {"list": [1, 2.5, (None, True)], "ordered": OrderedDict(a=torch.zeros(2))}
    arrays = {
        "floats": np.random.rand(2, 3),
        "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "objects": np.array([None, "a", torch.ones(2)], dtype=object),
        "structured": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        "scalar": np.float32(index),
    }
    tensors = {
        "ragged": torch.randn(3, index % 4),
        "half": torch.rand(3).bfloat16(),
        "complex": torch.rand(2, dtype=torch.complex64),
        "none": torch.zeros(0, 3),
        "single": torch.tensor(2.5),
    }
    objects = {"point": Point(1, torch.ones(2)), "record": Record(torch.rand(2), {"k": {1, 2}}), "slotted": Slotted()}
    plain = {"none": None, "text": "text", "bytes": b"xyz", "nan": float("nan"), "long": list(range(50)), "fn": first}
    return {**nested, **arrays, **tensors, **objects, **plain, "dtype": torch.float32, "index": index}


def at_once(index: int) -> Any:
    """When it was made: never the same twice."""
    return torch.tensor(time.perf_counter_ns()), index  # whole nanoseconds: 32-bit seconds would repeat themselves


def fails(index: int) -> int:
    """The third sample cannot be had."""
    if index == 2:
        raise ValueError("sample 2 is broken")
    return index


def not_picklable(index: int) -> Any:
    """A batch that no worker can send."""
    return index, lambda: index


def rows() -> Dataset[Any]:
    """A plain data set."""
    return Rows(64)


def odd() -> DataLoader[Any]:
    """One odd object a batch."""
    return DataLoader(Made(12, odd_batch), collate_fn=first, num_workers=2)


def shuffled() -> DataLoader[Any]:
    """Random order from the loader's own generator, random samples."""
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Made(40, draws), 8, shuffle=True, num_workers=2, generator=generator, drop_last=True)


def weighted() -> DataLoader[Any]:
    """A sampler that draws from the global generator."""
    return DataLoader(Made(40, draws), 8, sampler=WeightedRandomSampler([0.1, 0.9] * 20, 30))


def in_place() -> DataLoader[Any]:
    """A sampler with a state."""
    return DataLoader(Made(40, draws), batch_sampler=Shuffled(40, 7))


def ours() -> DataLoader[Any]:
    """Options that torch's loader does not know."""
    return shmloader.DataLoader(Made(40, draws), 8, num_workers="auto", memory_limit="16MiB", copy=True)


def careful() -> DataLoader[Any]:
    """Options for the workers."""
    crew = {"timeout": 30, "prefetch_factor": 3, "worker_init_fn": torch.manual_seed}
    return DataLoader(Rows(40), 8, num_workers=2, in_order=False, **crew)


def single() -> DataLoader[Any]:
    """Samples as they are, without batches."""
    return DataLoader(Rows(20), batch_size=None)


def once() -> DataLoader[Any]:
    """A sampler that can be read once."""
    return DataLoader(Rows(20), sampler=(index for index in range(20)))


def stream() -> Dataset[Any]:
    """An epoch that the data set itself ends."""
    return Stream(70)


def endless() -> Dataset[Any]:
    """An epoch that nobody ends."""
    return Stream(None)


def short() -> DataLoader[Any]:
    """Epochs that are over before a steady state is reached."""
    return DataLoader(Stream(3), batch_size=2, num_workers=1)


def empty() -> Dataset[Any]:
    """Nothing."""
    return Rows(0)


def dropped() -> DataLoader[Any]:
    """Nothing that is left."""
    return DataLoader(Rows(5), batch_size=8, drop_last=True)


def by_chance() -> Dataset[Any]:
    """Another one each time."""
    return Made(12, at_once)


def failing() -> DataLoader[Any]:
    """An error in the second batch."""
    return DataLoader(Made(6, fails), batch_size=2)


def unpicklable() -> DataLoader[Any]:
    """torch's loader would wait for ever."""
    return DataLoader(Made(6, not_picklable), collate_fn=first)


def local() -> Dataset[Any]:
    """A class that no spawned worker can find."""

    class Local(Rows):
        pass

    return Local(8)
