"""What a data set sees of the worker that it is in, and workers that persist: as with torch's loader."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    get_worker_info,
)

from shmloader import DataLoader
from tests.beside import (
    KINDS,
    Stock,
    assert_same_epochs,
    both,
    close,
    each_start_method,
    epochs,
)
from tests.datasets import (
    Items,
    Made,
    as_is,
    environment,
    first,
    seed_and_draws,
    worker_id,
    worker_pid,
)
from tests.equal import assert_same

# -- what workers are -------------------------------------------------------------------------------------------


def surroundings_and_draws(index: Any) -> Any:
    return environment(index), seed_and_draws(index)


@each_start_method
def test_a_data_set_finds_the_same_environment_and_draws_the_same(method: str) -> None:
    workers = 1 if method == "spawn" else 2  # each of which would import torch for seconds

    def run(kind: Any, method: str) -> Any:
        options = {"multiprocessing_context": method, "num_workers": workers, "collate_fn": as_is}
        (batches,) = epochs(kind, Made(4, surroundings_and_draws), 2, **options)
        kinds = {environment.pop("process") for batch in batches for environment, _ in batch}
        return batches, kinds

    mine, kinds = run(DataLoader, method)
    assert_same(mine, run(Stock, "fork")[0])  # all but the process's class is the same under every method
    assert kinds == {multiprocessing.get_context(method).Process.__name__}
    worker, _ = mine[-1][0]
    assert worker == {
        "index": 2,
        "threads": 1,
        "name": "pt_data_worker",
        "daemon": True,
        "in the main thread": True,
        "info": (workers - 1, workers),
    }


def test_workers_are_children_of_the_loaders_process() -> None:
    def run(kind: Any) -> list[Any]:
        return epochs(kind, Made(2, lambda _: os.getppid()), 1, num_workers=1, collate_fn=first)

    assert both(run) == [[os.getpid()] * 2]


class Informed(Dataset[Any]):
    """Reports what ``get_worker_info`` says where it is fetched from."""

    changed = "no"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return None
        fields = sorted(name for name in dir(info) if not name.startswith("_"))
        return info.id, info.num_workers, info.dataset is self, self.changed, fields


def change_dataset(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.changed = f"by {worker}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_are_informed_as_torchs_and_may_change_their_data_set(workers: int) -> None:
    mine = assert_same_epochs(
        Informed, 1, num_workers=workers, worker_init_fn=change_dataset if workers else None, collate_fn=first
    )
    assert mine[0][1] is None if not workers else mine[0][1][:4] == (1, 2, True, "by 1")
    assert get_worker_info() is None


class Ordered(IterableDataset[Any]):
    """Yields in what order the worker was set up."""

    log: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.log.append("iter")
        for _ in range(2):
            yield [*self.log, float(torch.rand(()))]


def log_init(_: int) -> None:
    Ordered.log.append("init")
    Ordered.log.append(str(float(torch.rand(()))))


def test_seeding_init_function_and_iter_come_in_torchs_order() -> None:
    mine = assert_same_epochs(Ordered, 1, num_workers=1, worker_init_fn=log_init, collate_fn=first)
    assert [mine[0][0][0], mine[0][0][2]] == ["init", "iter"]


# -- persistent workers -----------------------------------------------------------------------------------------


def pid_and_id(_: Any) -> Any:
    return os.getpid(), worker_id()


def count_init(_: int) -> None:
    count_init.calls = getattr(count_init, "calls", 0) + 1  # type: ignore[attr-defined]


def calls_so_far(_: Any) -> int:
    return getattr(count_init, "calls", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers_stay_the_same_processes(kind: Any) -> None:
    loader = kind(Made(6, worker_pid), num_workers=2, persistent_workers=True)
    pids = [sorted({int(pid) for pid in loader}) for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 2
    close(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_other_workers_are_new_ones_in_every_epoch(kind: Any) -> None:
    loader = kind(Made(6, worker_pid), num_workers=2)
    pids = [{int(pid) for pid in loader} for _ in range(2)]
    assert not pids[0] & pids[1]


def test_the_init_function_of_persistent_workers_runs_once() -> None:
    mine = assert_same_epochs(
        lambda: Made(4, calls_so_far), 1, num_workers=2, persistent_workers=True, worker_init_fn=count_init, count=3
    )
    assert {int(calls) for epoch in mine for calls in epoch} == {1}


def test_an_earlier_handle_of_a_persistent_iterator_is_rewound() -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Made(6, int), num_workers=2, persistent_workers=True)
        handle = iter(loader)
        found = [int(next(handle)), int(next(handle))]
        assert iter(loader) is handle
        found += [int(index) for index in handle]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(handle)
        close(loader)
        return found

    assert both(run) == [0, 1, 0, 1, 2, 3, 4, 5]


def fails_at_three(index: Any) -> Any:
    if index == 3:
        raise ValueError("three")
    return index


def test_errors_of_an_epoch_that_was_broken_off_are_dropped() -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Made(8, fails_at_three), num_workers=2, persistent_workers=True)
        found = [int(next(iter(loader))) for _ in range(3)]
        iterator = iter(loader)
        found += [int(next(iterator)) for _ in range(3)]
        with pytest.raises(ValueError, match="three"):
            next(iterator)
        found += [int(index) for index in iterator]
        close(loader)
        return found

    assert both(run) == [0, 0, 0, 0, 1, 2, 4, 5, 6, 7]


def test_changes_of_the_data_set_are_seen_by_new_workers_only() -> None:
    def run(kind: Any) -> list[Any]:
        found = []
        for persistent in (False, True):
            dataset = Items([0, 1])
            loader = kind(dataset, num_workers=1, persistent_workers=persistent)
            for _ in range(2):
                found.append([int(item) for item in loader])
                dataset.items = [10, 11]
            close(loader)
        return found

    assert both(run) == [[0, 1], [10, 11], [0, 1], [0, 1]]


def test_a_tensor_in_shared_memory_is_seen_by_persistent_workers() -> None:
    def run(kind: Any) -> list[Any]:
        epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        loader = kind(Made(4, lambda _: int(epoch)), num_workers=2, persistent_workers=True)
        found = []
        for number in range(3):
            epoch.fill_(number)
            found.append([int(seen) for seen in loader])
        close(loader)
        return found

    assert both(run) == [[n] * 4 for n in range(3)]
