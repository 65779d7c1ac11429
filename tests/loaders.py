"""Loaders of batches that say which one they are, and what can be seen of such a loader from outside."""

from __future__ import annotations

from typing import Any

from shmloader import DataLoader
from shmloader.loader import _homes
from tests.faulty import Numbers

COUNT = 40


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """Batches of one item that is full of its index."""
    return DataLoader(dataset or Numbers(COUNT), **{"num_workers": 2, **options})


def numbers(batches: Any) -> list[int]:
    """First number of every batch."""
    return [int(batch[0, 0]) for batch in batches]


def pids(iterator: Any) -> list[int]:
    """An iterator's workers."""
    return [process.pid for process in iterator._workers]


def pool_of(source: Any) -> Any:
    """The pool that a loader keeps between epochs."""
    return _homes[id(source)]._lender._idle
