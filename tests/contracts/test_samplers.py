"""Samplers: what is asked of them, when, and what becomes of what they answer, as with torch's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from shmloader import DataLoader
from tests.beside import KINDS, Stock, both, close
from tests.datasets import Batchwise, Counting, Endless, Log, Made, Rows, as_is

each_number_of_workers = pytest.mark.parametrize("workers", [0, 2])
each_persistence = pytest.mark.parametrize("persistent", [False, True])


class CountingBatches(Counting):
    """The same one by one in batches, of which the fourth is empty."""

    def _pull(self) -> Iterator[Any]:
        for index in super()._pull():
            yield [] if index == 3 else [index]


HOW: dict[str, Callable[[Log], dict[str, Any]]] = {
    "batched": lambda log: {"sampler": Counting(17, log), "batch_size": 2},
    "last one dropped": lambda log: {"sampler": Counting(17, log), "batch_size": 2, "drop_last": True},
    "not batched": lambda log: {"sampler": Counting(17, log), "batch_size": None},
    "batch sampler": lambda log: {"batch_sampler": CountingBatches(17, log), "collate_fn": as_is},
    "batches of batches": lambda log: {"batch_sampler": BatchSampler(Counting(17, log), 3, False)},  # type: ignore[arg-type]
}


@pytest.mark.slow
@each_persistence
@pytest.mark.parametrize("how", HOW)
def test_how_far_ahead_the_sampler_is_pulled_at_every_step_of_whole_and_of_broken_epochs(
    how: str, persistent: bool
) -> None:
    def run(kind: Any) -> list[Any]:
        log, found = Log(), []
        options = {"prefetch_factor": 3, "num_workers": 2, "persistent_workers": persistent}
        loader = kind(Made(17, int), **HOW[how](log), **options)
        for stop in (99, 1, 0, 99):
            iterator = iter(loader)
            found.append(list(log))
            for _, batch in zip(range(stop), iterator):
                found.append([batch, list(log)])
        del iterator
        close(loader)
        return found

    first = both(run)[0]
    expected = {"batched": 12, "last one dropped": 12, "not batched": 6, "batch sampler": 6, "batches of batches": 17}
    assert len([index for index in first if index != "iter"]) == expected[how]  # six batches of them


@each_number_of_workers
def test_a_batch_sampler_without_batching_hands_lists_to_the_data_set(workers: int) -> None:
    """The way to fetch batches that torch's documentation recommends."""

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        sampler = BatchSampler(RandomSampler(range(7)), 3, False)
        data = Made(7, lambda indices: torch.tensor(indices) * 10)
        loader = kind(data, sampler=sampler, batch_size=None, num_workers=workers)
        return [len(loader), list(loader), list(loader)]

    assert both(run)[0] == 3


@pytest.mark.slow
@each_number_of_workers
def test_a_data_set_that_fetches_batches_gets_a_list_of_what_the_sampler_yields(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        found = []
        for batches in ([[0, 1], (2, 3)], torch.arange(4).view(2, 2), [torch.tensor([3, 1])], [range(2)]):
            data = Batchwise(4, lambda indices: [type(indices).__name__, *(int(index) for index in indices)])
            found.append(list(kind(data, batch_sampler=batches, num_workers=workers, collate_fn=as_is)))
        return found

    both(run)


# -- several ranks ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_number_of_workers
@each_persistence
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_their_share_of_every_epoch(workers: int, persistent: bool, drop_last: bool) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        found: list[Any] = []
        for rank in range(2):
            sampler: Any = DistributedSampler(range(11), 2, rank, shuffle=True, seed=5, drop_last=drop_last)
            options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
            loader = kind(Rows(11), 2, sampler=sampler, **options)
            found.append(len(loader))
            for epoch in (0, 1, 1, 7):
                sampler.set_epoch(epoch)
                found.append([y.tolist() for _, y in loader])
            close(loader)
        found.append(torch.get_rng_state().tolist())
        return found

    found = both(run)
    one, other = found[1], found[6]
    assert len({index for batch in one + other for index in batch}) == (10 if drop_last else 11)
    assert found[2] == found[3] != found[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_set_after_iteration_began_counts_as_it_does_in_torchs_loader(workers: int) -> None:
    """Lightning does it: with workers the order is drawn by then, without them it is not."""

    def run(kind: Any) -> list[Any]:
        sampler: Any = DistributedSampler(range(8), 1, 0, shuffle=True)
        loader = kind(Rows(8), 2, sampler=sampler, num_workers=workers)
        iterator = iter(loader)
        sampler.set_epoch(3)
        return [y.tolist() for _, y in iterator]

    late = both(run)
    sampler: Any = DistributedSampler(range(8), 1, 0, shuffle=True)
    sampler.set_epoch(0 if workers else 3)
    assert [index for batch in late for index in batch] == list(sampler)


# -- samplers without end, and samplers that break --------------------------------------------------------------


@pytest.mark.slow
@each_number_of_workers
@each_persistence
def test_a_sampler_without_end_is_pulled_no_further_than_torch_pulls_it(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        log, found = Log(), []
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        loader = kind(Rows(5), batch_sampler=Endless(CountingBatches(3, log)), **options)
        for stop in (7, 2, 7):
            for _, (_, y) in zip(range(stop), loader):
                found.append([y.tolist(), len(log)])
        close(loader)
        return found

    both(run)


@each_number_of_workers
def test_a_sampler_that_is_its_own_iterator_is_used_up_as_in_torchs_loader(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(9), 2, sampler=iter(range(9)), num_workers=workers)
        return [[y.tolist() for _, y in loader] for _ in range(2)]

    assert both(run)[1] == []


class Breaks:
    """Raises in the place of its seventh element; a generator, so that nothing comes after it."""

    def __iter__(self) -> Iterator[int]:
        yield from range(7)
        raise LookupError("no more")


def everything(iterator: Any) -> list[Any]:
    """What twelve calls of ``next`` come to."""
    found: list[Any] = []
    for _ in range(12):
        try:
            found.append(int(next(iterator)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_without_workers_an_error_of_the_sampler_ends_the_epoch_as_in_torchs_loader() -> None:
    def run(kind: Any) -> list[Any]:
        return everything(iter(kind(Made(9, int), sampler=Breaks())))

    assert both(run) == [*range(7), "LookupError", *["StopIteration"] * 4]


@pytest.mark.parametrize("in_order", [True, False])
def test_with_workers_torch_loses_a_batch_to_an_error_of_the_sampler_and_we_lose_none(in_order: bool) -> None:
    """The one in whose place the error was raised, since it had been taken from the queue by then."""

    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Made(9, int), sampler=Breaks(), num_workers=2, in_order=in_order))
        found = everything(iterator)
        iterator._shutdown_workers()
        return found

    mine, its = run(DataLoader), run(Stock)
    assert mine.index("LookupError") == its.index("LookupError")
    assert sorted(item for item in mine if isinstance(item, int)) == list(range(7))
    assert len([item for item in its if isinstance(item, int)]) == 6
    if in_order:
        assert its[:9] == [0, 1, 2, "LookupError", 4, 5, 6, "StopIteration", "StopIteration"]
        assert mine[:9] == [0, 1, 2, "LookupError", 3, 4, 5, 6, "IteratorBrokenError"]


@pytest.mark.slow
@each_persistence
def test_after_an_error_of_the_sampler_the_next_epoch_is_whole(persistent: bool) -> None:
    class BreaksOnce(Breaks):
        broken = False

        def __iter__(self) -> Iterator[int]:
            if not self.broken and len(log) > 1:
                self.broken = True
                return super().__iter__()
            return iter(range(9))

    for kind in KINDS:
        log = Log()
        loader = kind(Made(9, int), sampler=BreaksOnce(), num_workers=2, persistent_workers=persistent)
        for _ in range(4):
            log.append("epoch")
            found = []
            try:
                for item in loader:
                    found.append(int(item))  # noqa: PERF401 - the error must not lose what came before it
            except LookupError:
                found.append("error")
            log.append(found)
        close(loader)
        epochs = [entry for entry in log if entry != "epoch"]
        assert sorted(map(str, epochs)) == sorted(map(str, [[*range(9)]] * 3 + [[0, 1, 2, "error"]]))


def test_the_length_of_an_iterator_is_the_samplers_also_while_it_runs() -> None:
    def run(kind: Any) -> list[Any]:
        found = []
        for options in ({"batch_size": 2}, {"batch_size": None}, {"batch_sampler": [[1], [2]]}):
            iterator = iter(kind(Rows(5), sampler=None, num_workers=1, **options))
            found.append(len(iterator))
            next(iterator)
            found.append(len(iterator))
        iterator = iter(kind(Rows(5), sampler=SequentialSampler(range(3)), num_workers=1))
        return [*found, len(iterator)]

    assert both(run) == [3, 3, 5, 5, 2, 2, 3]
