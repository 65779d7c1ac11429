"""Batches and their order, and when the sampler is asked for what: as from torch's loader with as many workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader import DataLoader
from tests.beside import (
    KINDS,
    PATIENCE_S,
    Stock,
    assert_same_epochs,
    both,
    epochs,
)
from tests.datasets import (
    Counting,
    Endless,
    Log,
    Made,
    Rows,
    as_is,
    first,
    worker_id,
)
from tests.equal import assert_same

# -- order ------------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "last one dropped": lambda: {"drop_last": True, "shuffle": True},
    "replacement": lambda: {"sampler": RandomSampler(range(23), replacement=True, num_samples=31)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([*range(1, 24)], 20)},
    "subset": lambda: {"sampler": SubsetRandomSampler([5, 3, 22, 1])},
    "a list": lambda: {"sampler": [3, 3, 1]},
    "batches": lambda: {"batch_size": 1, "batch_sampler": [[0], [1, 2, 3], [], [22] * 9]},
    "tensor indices": lambda: {"sampler": torch.randperm(23, generator=torch.Generator().manual_seed(1))},
    "nothing": lambda: {"sampler": []},
}


def with_index(index: Any) -> Any:
    return index, torch.full((3,), float(index))


@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_come_in_torchs_order(name: str) -> None:
    def run(kind: Any, workers: int) -> Any:
        options = {"batch_size": 4, **SAMPLERS[name]()}
        if "batch_sampler" in options:
            options["collate_fn"] = as_is
        return epochs(kind, Made(23, with_index), num_workers=workers, count=2, **options)

    assert_same(run(DataLoader, 0), run(Stock, 0))
    with_workers = run(Stock, 2)  # how many they are changes nothing about the order, so one of torch's is enough
    for workers in (1, 2, 3):
        assert_same(run(DataLoader, workers), with_workers)


def test_batches_come_from_the_workers_in_turn_and_each_epoch_begins_with_the_first() -> None:
    for persistent in (False, True):
        mine = assert_same_epochs(
            lambda: Made(7, worker_id), 1, num_workers=3, count=2, persistent_workers=persistent, collate_fn=first
        )
        assert mine == [[0, 1, 2, 0, 1, 2, 0]] * 2


class Gated(Made):
    """The first item waits until the last has been begun."""

    def __init__(self, count: int) -> None:
        super().__init__(count, int)
        self.last = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == self.count - 1:
            self.last.set()
        if index == 0 and not self.last.wait(PATIENCE_S):
            raise TimeoutError("the last item was never begun")
        return index


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_order_the_fast_come_first_and_none_is_lost(kind: Any) -> None:
    order = [int(index) for index in kind(Gated(8), num_workers=2, in_order=False)]
    assert order[:4] == [1, 3, 4, 5]  # 7 is only assigned once 5 is there
    assert sorted(order) == list(range(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_out_of_order_without_a_second_worker_is_in_order(workers: int) -> None:
    assert_same_epochs(lambda: Rows(9), 2, num_workers=workers, in_order=False)


def test_out_of_order_a_worker_is_given_no_more_than_its_share() -> None:
    def run(kind: Any) -> list[int]:
        log = Log()
        iterator = iter(kind(Gated(20), sampler=Counting(20, log), num_workers=2, in_order=False))
        pulled = [len(log)]
        for _ in range(4):
            next(iterator)
            pulled.append(len(log))
        for _ in iterator:
            pass
        return pulled

    both(run)


# -- samplers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_sampler_is_asked_for_exactly_as_much_as_torch_asks_at_every_step(workers: int, prefetch: int) -> None:
    def run(kind: Any) -> list[list[Any]]:
        log, seen = Log(), []
        options = {"prefetch_factor": prefetch} if workers else {}
        loader = kind(Rows(9), 1, sampler=Counting(9, log), num_workers=workers, **options)
        for _ in range(2):
            iterator = iter(loader)
            seen.append(list(log))
            seen += [list(log) for _ in iterator]
            seen.append(list(log))
        return seen

    steps = both(run)
    if workers:
        assert sum(index != "iter" for index in steps[0]) == prefetch * workers or workers * prefetch >= 9


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", ["sampler", "batch_sampler", "no batches"])
def test_a_samplers_iter_is_called_as_often_as_torch_calls_it(workers: int, persistent: bool, how: str) -> None:
    def run(kind: Any) -> Any:
        log = Log()
        sampler = Counting(6, log, eager=True, draws=True)
        options: dict[str, Any] = {"sampler": sampler}
        if how == "batch_sampler":
            options = {"batch_sampler": Wrapped(sampler)}
        elif how == "no batches":
            options = {"sampler": sampler, "batch_size": None}
        found = epochs(
            kind, Made(6, int), num_workers=workers, persistent_workers=persistent and workers > 0, count=3, **options
        )
        return [len(log), torch.get_rng_state().tolist(), found]

    calls = both(run)[0]
    if how != "sampler":
        assert calls == (3 if not workers else 4 if persistent else 6)


class Wrapped:
    """A batch sampler whose ``__iter__`` asks another sampler at once."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in list(self.sampler)).__iter__()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sampler_without_end_serves_several_epochs_from_one_iterator(workers: int) -> None:
    def run(kind: Any) -> Any:
        torch.manual_seed(0)
        loader = kind(Rows(7), 2, shuffle=True, num_workers=workers)
        object.__setattr__(loader, "batch_sampler", Endless(loader.batch_sampler))
        iterator = iter(loader)
        found = [next(iterator) for _ in range(12)]
        iterator._shutdown_workers()
        return found

    found = both(run)
    assert sorted(torch.cat([y for _, y in found]).tolist()) == sorted([*range(7)] * 3)


class Breaks:
    """A sampler that raises after three elements."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise LookupError("no more")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_the_sampler_surfaces_where_it_does_in_torchs_loader(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        seen: list[Any] = []
        try:
            iterator = iter(kind(Rows(9), 1, sampler=Breaks(), num_workers=workers))
            seen.append("made")
            while True:
                seen.append(next(iterator)[1].tolist())
        except LookupError as error:
            seen.append(str(error))
        return seen

    assert both(run)[-1] == "no more"
