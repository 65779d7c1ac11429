"""Data sets, collate functions and samplers that tests share. Everything here can be imported by a spawned worker."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Rows(Dataset[Any]):
    """Item *i*: a row of *i*'s, and *i* itself."""

    def __init__(self, count: int, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        self.count, self.width, self.dtype = count, width, dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), index, dtype=self.dtype), index


class Items(Dataset[Any]):
    """The items of a sequence."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Made(Dataset[Any]):
    """Item *i* is ``make(i)``."""

    def __init__(self, count: int, make: Callable[[Any], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Shards(IterableDataset[Any]):
    """Worker *w* of several yields the *w*-th list; a single process yields them all."""

    def __init__(self, *shards: Sequence[Any], length: int | None = None) -> None:
        self.shards, self.length = shards, length
        if length is not None:
            self.__class__ = SizedShards

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for shard in self.shards if info is None else self.shards[info.id : info.id + 1]:
            yield from shard


class SizedShards(Shards):
    """Shards that claim a length."""

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class Batchwise(Dataset[Any]):
    """Fetches a whole batch at once, and returns whatever ``fetch`` makes of the indices."""

    def __init__(self, count: int, fetch: Callable[[list[int]], Any]) -> None:
        self.count, self.fetch = count, fetch

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("not asked for, where there is __getitems__")

    def __getitems__(self, indices: list[int]) -> Any:
        return self.fetch(indices)


class Log(list[Any]):
    """A list in the main process that a sampler under test writes to."""


class Counting:
    """A sampler over ``range(count)`` that logs each ``iter()`` and each element pulled."""

    def __init__(self, count: int, log: Log, eager: bool = False, draws: bool = False) -> None:
        self.count, self.log, self.eager, self.draws = count, log, eager, draws

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        if not self.eager:
            return self._pull()
        self.log.append("iter")
        order = torch.randperm(self.count).tolist() if self.draws else range(self.count)
        return iter(order)

    def _pull(self) -> Iterator[int]:
        self.log.append("iter")
        for index in range(self.count):
            self.log.append(index)
            yield index


class Endless:
    """A batch sampler without length and end, as timm's and Ultralytics' are."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.batch_sampler)


def draws(_: Any) -> tuple[float, float, float]:
    """One draw from each global generator."""
    return float(torch.rand(())), random.random(), float(np.random.rand())


def seed_and_draws(index: Any) -> tuple[Any, ...]:
    """The worker's seed and one draw from each global generator."""
    info = get_worker_info()
    return (index, info.seed if info else None, *draws(index))


def environment(index: Any) -> dict[str, Any]:
    """What a data set can see of the process that it runs in."""
    import multiprocessing

    process, info = multiprocessing.current_process(), get_worker_info()
    with open("/proc/self/comm") as comm:
        name = comm.read().strip()
    return {
        "index": index,
        "threads": torch.get_num_threads(),
        "name": name,
        "daemon": process.daemon,
        "process": process.name.partition("-")[0],
        "in the main thread": threading.current_thread() is threading.main_thread(),
        "info": info and (info.id, info.num_workers),
    }


def worker_id(_: Any = None) -> int:
    """The id of the worker, -1 in the main process."""
    info = get_worker_info()
    return info.id if info else -1


def worker_pid(_: Any = None) -> int:
    """The process that this runs in."""
    return os.getpid()


def first(samples: list[Any]) -> Any:
    """A collate function: the batch is its first sample."""
    return samples[0]


def as_is(samples: Any) -> Any:
    """A collate function: the batch is the list of samples."""
    return samples


def stack_numpy(samples: list[Any]) -> Any:
    """A collate function that returns numpy arrays."""
    return {"x": np.stack([np.asarray(x) for x, _ in samples]), "y": [y for _, y in samples]}
