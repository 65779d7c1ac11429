"""Programs that few write: what each of them comes to, result or error, it comes to with torch's loader too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from tests.beside import both, close
from tests.datasets import Items, Made, Rows, Shards, first


class Duck:
    """No data set by its class, but by its methods."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Nested(Dataset[Any]):
    """Iterates a loader of its own for every item."""

    def __init__(self, kind: Any, workers: int) -> None:
        self.kind, self.workers = kind, workers

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return [y for _, y in self.kind(Rows(2 + index), num_workers=self.workers)]


def loaders_in_workers(kind: Any) -> Any:
    return list(kind(Nested(kind, 0), num_workers=1, collate_fn=first))


def another_default_dtype(kind: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return [list(kind(Made(2, lambda n: (torch.ones(2) * n, n + 0.5)), num_workers=w)) for w in (0, 1)]
    finally:
        torch.set_default_dtype(torch.float32)


def attributes_set_behind_the_loaders_back(kind: Any) -> Any:
    loader = kind(Rows(5), 2, num_workers=1)
    object.__setattr__(loader, "dataset", Rows(5, width=3))
    found = [list(loader)]
    object.__setattr__(loader, "sampler", [4, 3, 2])  # the batch sampler has the old one
    object.__setattr__(loader, "batch_size", 1)
    object.__setattr__(loader, "drop_last", True)
    found += [len(loader), list(loader)]
    object.__setattr__(loader, "batch_sampler", [[4], [2, 1]])
    return [*found, len(loader), list(loader)]


def persistent_from_the_second_epoch_on(kind: Any) -> Any:
    loader = kind(Rows(5), 2, num_workers=1)
    found = [list(loader), loader._iterator]
    object.__setattr__(loader, "persistent_workers", True)
    iterator = iter(loader)
    found += [loader._iterator is iterator, list(iterator), iter(loader) is iterator, list(iterator)]
    close(loader)
    return found


def persistent_workers_that_are_then_unwanted(kind: Any) -> Any:
    """As fastai's ``no_multiproc`` does for a while."""
    loader = kind(Rows(5), 2, num_workers=1, persistent_workers=True)
    found = [list(loader)]
    iterator = loader._iterator
    loader.num_workers, loader.prefetch_factor = 0, None
    found += [list(loader), loader._iterator is iterator]
    loader.num_workers, loader.prefetch_factor = 2, 2
    found += [list(loader), len(loader._iterator._workers)]
    close(loader)
    return found


def batches_that_are_exceptions(kind: Any) -> Any:
    made = [ValueError("data"), None, StopIteration(3)]
    return [repr(batch) for batch in kind(Made(3, made.__getitem__), num_workers=1, collate_fn=first)]


def sequences_and_mappings_as_data_sets(kind: Any) -> Any:
    sets = [[1, 2, 3], "abc", {0: 5, 1: 6}, (1.5, 2.5), range(3), np.arange(4), torch.arange(6).view(3, 2), Duck()]
    return [list(kind(data, 2, num_workers=workers)) for data in sets for workers in (0, 1)]


def torchs_own_data_sets(kind: Any) -> Any:
    pair = TensorDataset(torch.arange(9), torch.arange(9) * 2)
    sets: list[Any] = [
        pair,
        Subset(Rows(9), [3, 1, 2]),
        ConcatDataset([Rows(4), Rows(3)]),
        StackDataset(a=pair, b=Rows(9)),
        StackDataset(pair, Rows(9)),
        random_split(Rows(9), [4, 5], torch.Generator().manual_seed(0))[0],
        Subset(Subset(pair, range(5)), [0, 2]),
    ]
    torch.manual_seed(0)
    found = [list(kind(data, 2, shuffle=True, num_workers=1)) for data in sets]
    return [*found, list(kind(ChainDataset([Shards([1, 2]), Shards([3])]), 2, num_workers=1))]


def numbers_of_numpy_for_numbers(kind: Any) -> Any:
    return [list(kind(Rows(9), 4, num_workers=np.int64(2))), list(kind(Rows(9), 4, num_workers=True))]


def a_batch_size_of_numpy(kind: Any) -> Any:
    return list(kind(Rows(9), np.int64(4)))


def a_lookahead_that_is_a_float(kind: Any) -> Any:
    return list(kind(Rows(9), num_workers=1, prefetch_factor=2.0))


def an_iterator_that_another_thread_goes_on_with(kind: Any) -> Any:
    iterator = iter(kind(Rows(6), num_workers=2))
    found = [next(iterator)]
    thread = threading.Thread(target=lambda: found.extend(iterator))
    thread.start()
    thread.join()
    return found


def lengths_of_what_has_none(kind: Any) -> Any:
    class Unsized:
        def __iter__(self) -> Any:
            return iter([[0], [1]])

    found: list[Any] = []
    loader = kind(Rows(4), batch_sampler=Unsized(), num_workers=1)
    iterator = iter(loader)
    for what in (loader, iterator):
        with pytest.raises(TypeError) as caught:
            len(what)
        found.append(str(caught.value))
    return [*found, list(iterator)]


def a_data_set_without_a_length_and_a_sampler_that_goes_too_far(kind: Any) -> Any:
    class Short(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return [10, 11][index]

    found: list[Any] = []
    iterator = iter(kind(Short(), sampler=range(4), num_workers=1))
    for _ in range(6):
        try:
            found.append(next(iterator))
        except (IndexError, StopIteration) as error:
            found.append([type(error).__name__, *str(error).splitlines()[-1:]])
    return found


class FailsInItsThird:
    """A sampler that raises the third time: in ``__iter__``, or when its second element is pulled."""

    def __init__(self, at_once: bool) -> None:
        self.at_once, self.times = at_once, 0

    def __iter__(self) -> Any:
        self.times += 1
        if self.times == 3 and self.at_once:
            raise LookupError("in iter")
        return self.pull(self.times == 3)

    def pull(self, fails: bool) -> Any:
        yield 0
        if fails:
            raise LookupError("in next")
        yield from range(1, 5)


def samplers_that_fail_when_an_epoch_begins(kind: Any) -> Any:
    found: list[Any] = []
    for at_once, persistent in ((True, True), (False, True), (True, False)):
        loader = kind(Made(5, int), sampler=FailsInItsThird(at_once), num_workers=2, persistent_workers=persistent)
        for _ in range(4):
            try:
                found.append([int(item) for item in loader])
            except LookupError as error:
                found.append(str(error))
        close(loader)
    return found


def a_data_set_that_grows_and_shrinks(kind: Any) -> Any:
    data = Items([1, 2, 3])
    alone, beside = kind(data, 2), kind(data, 2, num_workers=1, persistent_workers=True)
    found: list[Any] = []
    for items in ([1, 2, 3], [1, 2, 3, 4, 5], [9]):
        data.items = items
        found += [len(alone), list(alone), len(beside)]
        beside.batch_sampler.sampler = range(min(3, len(items)))  # persistent workers have the first items for good
        found.append(list(beside))
    close(beside)
    return found


PROGRAMS: list[Callable[[Any], Any]] = [
    loaders_in_workers,
    another_default_dtype,
    attributes_set_behind_the_loaders_back,
    persistent_from_the_second_epoch_on,
    persistent_workers_that_are_then_unwanted,
    batches_that_are_exceptions,
    sequences_and_mappings_as_data_sets,
    torchs_own_data_sets,
    numbers_of_numpy_for_numbers,
    a_batch_size_of_numpy,
    a_lookahead_that_is_a_float,
    an_iterator_that_another_thread_goes_on_with,
    lengths_of_what_has_none,
    a_data_set_without_a_length_and_a_sampler_that_goes_too_far,
    samplers_that_fail_when_an_epoch_begins,
    a_data_set_that_grows_and_shrinks,
]
FAIL = {a_batch_size_of_numpy, a_lookahead_that_is_a_float}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_comes_to_the_same(program: Callable[[Any], Any]) -> None:
    def run(kind: Any) -> Any:
        try:
            return ["result", program(kind)]
        except Exception as error:  # of which the last line is the cause, and those before it name torch's files
            return ["error", type(error).__name__, str(error).splitlines()[-1]]

    assert both(run)[0] == ("error" if program in FAIL else "result")
