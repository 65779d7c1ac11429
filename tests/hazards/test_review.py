"""What an adversarial reading of the core broke: each program again, as a test of its kind."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader, PoolMemoryError
from shmloader.memory import pool as pools
from shmloader.memory.collate import Arena, allocating_in
from shmloader.memory.outline import Outline
from shmloader.memory.pool import Pool
from shmloader.tuning import machine
from shmloader.workers.protocol import SlotEvent, SlotState

MIB = 1 << 20


class Scaled:
    """Travels as bytes and a factor, and comes out as a plain tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return scale, (self.tensor.to(torch.uint8), 0.5)


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor.float() * factor


class Swapped:
    """Travels as a pair, and comes out as a plain list in the other order."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        return swap, (self.a, self.b)


def swap(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [b, a]


def scaled(samples: list[int]) -> Any:
    return Scaled(torch.tensor(samples))


def swapped(samples: list[int]) -> Any:
    return Swapped(torch.tensor(samples), -torch.tensor(samples))


@pytest.mark.parametrize("collate_fn", [scaled, swapped])
def test_a_batch_that_comes_out_plain_was_not_therefore_sent_plain(collate_fn: Callable[[Any], Any]) -> None:
    def batches(kind: Any) -> list[torch.Tensor]:
        loader = kind(list(range(40)), 4, num_workers=1, collate_fn=collate_fn)
        return [batch if isinstance(batch, torch.Tensor) else torch.stack(batch) for batch in loader]

    for mine, theirs in zip(batches(DataLoader), batches(TorchLoader), strict=True):
        assert torch.equal(mine, theirs)


def test_threads_of_a_collate_function_get_no_part_of_the_range() -> None:
    pool = Pool(1 << 24, lambda: 1 << 40)
    arena = Arena(pool.segment)
    found: list[bool] = []

    def lies_inside(_: int) -> bool:
        address = torch.UntypedStorage._new_shared(4096).data_ptr()
        return arena.address <= address < arena.address + arena.capacity

    def collate(samples: list[int]) -> list[bool]:
        with ThreadPoolExecutor(4) as threads:
            return [lies_inside(0), *threads.map(lies_inside, samples)]

    with allocating_in(arena):
        arena.open(0, MIB)
        found = arena.collating(collate)(list(range(16)))
    assert found == [True] + [False] * 16


def test_a_batch_refused_for_lack_of_memory_is_told_out_of_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 65 * MIB)
    iterator = iter(DataLoader([torch.zeros(MIB) for _ in range(3)], 1, num_workers=1, in_order=False))
    for _ in range(3):
        with pytest.raises(PoolMemoryError):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_the_end_of_a_worker_changes_no_ledger_but_in_its_own_thread() -> None:
    pool = Pool(1 << 24, lambda: 1 << 40)
    pool.ledger.learn(4096)
    slot = pool.ledger.acquire()
    assert slot is not None
    pool.ledger.apply(slot, SlotEvent.FILLED)
    pool.ledger.apply(slot, SlotEvent.LEASE)
    token = object()
    pool.ledger.expose(token)
    pool.ledger.release(slot)
    thread = threading.Thread(target=pools.gone, args=(token,))
    thread.start()
    thread.join()
    assert slot.state is SlotState.EXPOSED
    pool.reclaim()
    assert slot.state is SlotState.FREE


class Ragged(Dataset[torch.Tensor]):
    """Batches of ever new sizes."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1 + 977 * index % 50_000)


@pytest.mark.slow
def test_stats_can_be_read_from_any_thread() -> None:
    loader = DataLoader(Ragged(), 1, num_workers=1)
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                loader.stats()
            except BaseException as error:
                errors.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in loader:
            pass
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []


def with_arrays(samples: list[torch.Tensor]) -> Any:
    x = default_collate(samples)
    views = [x.numpy() for _ in range(8)] if float(samples[0][0]) else [x.numpy()]
    return [x, *views, torch.ones(1 << 18)]


def test_an_array_never_aliases_a_tensor_of_its_batch() -> None:
    rows = [torch.full((1 << 14,), float(index >= 6)) for index in range(12)]
    for batch in DataLoader(rows, 2, num_workers=1, collate_fn=with_arrays):
        before = [array.copy() for array in batch[1:-1]]
        batch[0].add_(1)
        assert all(np.array_equal(array, old) for array, old in zip(batch[1:-1], before, strict=True))


class Arrays(Dataset[Any]):
    """Hands a whole batch on as one array."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> Any:
        return np.array(indices)[:, None] * np.ones(3)


def test_getitems_may_return_anything_that_torch_collates() -> None:
    mine, theirs = (list(kind(Arrays(), 4, num_workers=1)) for kind in (DataLoader, TorchLoader))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Unspeakable:
    """An index whose repr raises."""

    def __repr__(self) -> str:
        raise ValueError("no")


class Lookup(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> int:
        if isinstance(index, Unspeakable):
            raise KeyError("unspeakable")
        return int(index)


def test_an_index_that_cannot_be_printed_does_not_hide_the_error() -> None:
    iterator = iter(DataLoader(Lookup(), batch_sampler=[[1], [Unspeakable()], [2]], num_workers=1))
    assert next(iterator).tolist() == [1]
    with pytest.raises(KeyError, match="Caught KeyError in DataLoader worker process 0"):
        next(iterator)
    assert next(iterator).tolist() == [2]


def test_an_outline_is_linear_in_its_tensors() -> None:
    few, many = (Outline.of([torch.zeros(1) for _ in range(count)]) for count in (10, 5000))
    assert few is not None
    assert many is not None
    assert (len(few.key), len(many.key)) == (12, 5002)


def test_warnings_that_are_errors_lose_no_batch() -> None:
    loader = DataLoader([torch.full((1000,), index) for index in range(64)], 1, num_workers=2, slots=4)
    iterator, held, raised = iter(loader), [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while True:
            try:
                held.append(next(iterator))
            except UserWarning:
                raised += 1
            except StopIteration:
                break
    assert [int(batch[0, 0]) for batch in held] == list(range(64))
    assert raised == 1
