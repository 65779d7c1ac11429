"""Loaders as libraries shape them: the ways in which they subclass, wrap, imitate, empty and end torch's loader.

Each shape is made of both kinds of loader, and must do with ours what it does with torch's.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data.dataloader import (
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

import shmloader
from shmloader.iterator import ShmIter
from shmloader.loader import _home
from tests.beside import both, close
from tests.datasets import Endless, Items, Made, Rows, seed_and_draws, worker_id
from tests.programs import all_gone

each_number_of_workers = pytest.mark.parametrize("workers", [0, 2])
each_persistence = pytest.mark.parametrize("persistent", [False, True])


def end(iterator: Any) -> None:
    """End the workers, if there are any."""
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


# -- one iterator for ever, over a batch sampler without end ----------------------------------------------------


def lifelong(kind: Any) -> Any:
    """As timm's: made behind the back of ``__setattr__``, with ``super().__iter__()`` in the constructor."""

    class Lifelong(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = Endless(self.sampler)
            else:
                self.batch_sampler = Endless(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len((self.sampler if self.batch_sampler is None else self.batch_sampler).batch_sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return Lifelong


@each_number_of_workers
@pytest.mark.parametrize("batch_size", [2, None])
def test_one_iterator_for_all_epochs(workers: int, batch_size: int | None) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = lifelong(kind)(Rows(7), batch_size, shuffle=True, num_workers=workers)
        found = [list(loader) for _ in range(3)]
        found += [list(itertools.islice(loader, 2)), list(loader), torch.get_rng_state().tolist()]
        assert len(found[0]) == len(loader)
        end(loader.iterator)
        return found

    both(run)


def restartable(kind: Any) -> Any:
    """As Ultralytics': asks for iterators by ``_get_iterator``, and terminates the workers itself."""

    class Restartable(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            object.__setattr__(self, "batch_sampler", Endless(self.batch_sampler))
            self.iterator = super()._get_iterator()

        def __len__(self) -> int:
            return len(self.batch_sampler.batch_sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def __del__(self) -> None:
            for worker in getattr(self.iterator, "_workers", ()):
                if worker.is_alive():
                    worker.terminate()
            end(self.iterator)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    return Restartable


@each_number_of_workers
def test_workers_that_are_terminated_and_iterators_that_are_replaced(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        dataset = Items([*range(7)])
        generator = torch.Generator().manual_seed(1)
        loader = restartable(kind)(dataset, 2, shuffle=True, num_workers=workers, generator=generator)
        found = [list(loader) for _ in range(2)]
        dataset.items = [*range(10, 17)]  # the data set is changed in the middle of training, then
        loader.reset()
        found += [list(loader) for _ in range(2)]
        found.append(generator.get_state().tolist())
        pids = [worker.pid for worker in getattr(loader.iterator, "_workers", ())]
        del loader
        gc.collect()
        assert all_gone(pids, 0)
        return found

    mine = both(run)
    assert min(int(batch.min()) for epoch in mine[2:4] for batch in epoch) == 10
    assert capfd.readouterr().err == ""


# -- an iterator around the iterator ----------------------------------------------------------------------------


class Around:
    """As PyG's: forwards what torch's loader calls, and calls the finalizer itself."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __len__(self) -> int:
        return len(self.iterator)

    def __next__(self) -> Any:
        x, y = next(self.iterator)
        return x + 1, y

    def __del__(self) -> None:
        if isinstance(self.iterator, _MultiProcessingDataLoaderIter):
            self.iterator.__del__()


def filtering(kind: Any) -> Any:
    """Sets attributes of its own before the constructor runs, and wraps what ``_get_iterator`` returns."""

    class Filtering(kind):  # type: ignore[misc]
        def __init__(self, dataset: Any, batch_size: int, shuffle: bool, follow: Any = None, **options: Any) -> None:
            self.follow = follow
            super().__init__(dataset, batch_size, shuffle, **options)

        def _get_iterator(self) -> Any:
            return Around(super()._get_iterator())

    return Filtering


@pytest.mark.slow
@each_number_of_workers
@each_persistence
def test_an_iterator_in_another_that_calls_its_finalizer(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = filtering(kind)(
            Rows(7), 2, True, ["x"], num_workers=workers, persistent_workers=persistent and workers > 0
        )
        iterator = iter(loader)
        pids = [worker.pid for worker in getattr(iterator.iterator, "_workers", ())]
        found: list[Any] = [len(iterator), list(iterator)]
        del iterator
        found.append(next(iter(loader)))  # an epoch that is broken off
        found += [list(loader), list(loader), torch.get_rng_state().tolist()]
        del loader
        assert all_gone(pids, 0)
        return found

    both(run)


def counting(kind: Any) -> Any:
    """As streaming's: a generator around ``super().__iter__()``, and a finalizer that ends persistent workers."""

    class CountingLoader(kind):  # type: ignore[misc]
        seen = 0

        def __iter__(self) -> Iterator[Any]:
            self.seen = 0
            for x, y in super().__iter__():
                self.seen += len(y)
                yield x, y

        def __del__(self) -> None:
            if self._iterator is not None:
                self._iterator._shutdown_workers()

    return CountingLoader


@each_persistence
def test_a_generator_around_the_epoch_and_a_finalizer_that_ends_the_workers(persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        loader = counting(kind)(Rows(7), 2, num_workers=2, persistent_workers=persistent)
        found: list[Any] = []
        for stop in (9, 2, 9):
            found.append(list(itertools.islice(loader, stop)))
            found.append(loader.seen)
        return found

    assert both(run)[1::2] == [7, 4, 7]


# -- what only looks like a loader ------------------------------------------------------------------------------


class Imitation:
    """As fastai's ``_FakeLoader``: no loader at all, with just the attributes that torch's iterators read."""

    _auto_collation, drop_last, in_order, pin_memory, pin_memory_device = False, False, True, False, ""
    _IterableDataset_len_called, generator, prefetch_factor, timeout = None, None, 2, 0
    _dataset_kind, _index_sampler = _DatasetKind.Iterable, itertools.count()
    multiprocessing_context = multiprocessing  # the module; it has a context's methods

    def __init__(self, stream: Any, workers: int, persistent: bool) -> None:
        self.dataset, self.num_workers, self.persistent_workers = stream, workers, persistent
        self.collate_fn, self.worker_init_fn = unchanged, shift


class Shifting(IterableDataset[Any]):
    """Yields batches that it makes itself, each worker its share."""

    shift = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(start, 9, step):
            yield torch.full((3,), index + self.shift), [worker_id(), index]


def unchanged(batch: Any) -> Any:
    return batch


def shift(_: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.shift = 100  # type: ignore[attr-defined]


@each_number_of_workers
@each_persistence
def test_the_iterator_takes_what_only_has_a_loaders_attributes(workers: int, persistent: bool) -> None:
    host = shmloader.DataLoader(Rows(1))  # whose options hold

    def make(kind: Any, imitation: Imitation) -> Any:
        if workers == 0:
            return _SingleProcessDataLoaderIter(imitation)
        if kind is DataLoader:
            return _MultiProcessingDataLoaderIter(imitation)
        return ShmIter(imitation, _home(host).terms(host))

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        imitation = Imitation(Shifting(), workers, persistent and workers > 0)
        iterator = make(kind, imitation)
        found = [list(iterator)]
        if persistent and workers:
            iterator._reset(imitation)
        else:
            iterator = make(kind, imitation)
        found.append(list(iterator))
        end(iterator)
        return [*found, torch.get_rng_state().tolist()]

    found = both(run)[0]
    assert sorted(index for _, (_, index) in found) == list(range(9))
    assert {int(x[0]) - index for x, (_, index) in found} == {100 if workers else 0}


# -- copies of a loader's attributes ----------------------------------------------------------------------------


def prefetching(kind: Any) -> Any:
    """As Ray's: another loader's ``__dict__``, one batch ahead, and its own attribute ``device``."""

    class Prefetching(kind):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            self.__dict__.update(vars(base))
            self.base, self.device = base, torch.device("cpu")
            self.iterator: Any = None
            self.ahead: Any = None

        def __len__(self) -> int:
            return len(self.base)

        def __iter__(self) -> Any:
            self.iterator = iter(self.base)
            self.ahead = next(self.iterator, None)
            return self

        def __next__(self) -> Any:
            batch, self.ahead = self.ahead, None
            if batch is None:
                raise StopIteration
            self.ahead = next(self.iterator, None)
            return batch

    return Prefetching


@pytest.mark.slow
@each_number_of_workers
@each_persistence
def test_a_loader_with_the_attributes_of_another(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        base = kind(Rows(7), 2, shuffle=True, num_workers=workers, persistent_workers=persistent and workers > 0)
        loader = prefetching(kind)(base)
        found: list[Any] = [len(loader), list(loader), next(iter(loader)), list(loader)]
        del loader
        gc.collect()
        found.append(list(base))  # which the wrapper's end has done no harm
        close(base)
        return found

    both(run)


def by_hand(kind: Any) -> Any:
    """As torchdata's: never calls the constructor, and sets every attribute by itself."""

    class ByHand(kind):  # type: ignore[misc]
        def __init__(self, dataset: Any, workers: int, persistent: bool) -> None:
            self.dataset, self.num_workers, self.persistent_workers = dataset, workers, persistent
            self.prefetch_factor = 2 if workers else None
            self.pin_memory, self.pin_memory_device, self.timeout, self.in_order = False, "", 0, True
            self.worker_init_fn, self.generator, self.batch_size, self.drop_last = None, None, 2, False
            self._DataLoader__multiprocessing_context = None
            self._dataset_kind = _DatasetKind.Map
            self.sampler = RandomSampler(dataset)
            self.batch_sampler = BatchSampler(self.sampler, 2, False)
            self.collate_fn = torch.utils.data.default_collate
            self._IterableDataset_len_called = None
            self._iterator = None
            self._DataLoader__initialized = True

    return ByHand


@each_number_of_workers
@each_persistence
def test_a_loader_whose_attributes_were_set_one_by_one(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = by_hand(kind)(Rows(7), workers, persistent and workers > 0)
        found: list[Any] = [len(loader), list(loader), next(iter(loader)), list(loader)]
        with pytest.raises(ValueError, match="attribute should not be set after ByHand is initialized"):
            loader.sampler = None
        close(loader)
        return found

    both(run)


def test_a_subclass_of_the_name_that_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As timm looks the class up when it needs it, first with keywords that older classes do not have."""

    def create(**options: Any) -> Any:
        return torch.utils.data.DataLoader(Rows(7), **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.utils.data, "DataLoader", shmloader.DataLoader)
        loader = create(batch_size=2, num_workers=1, persistent_workers=True)
    assert type(loader) is shmloader.DataLoader
    assert len(list(loader)) == 4
    close(loader)


# -- what training loops do to a loader -------------------------------------------------------------------------


@pytest.mark.slow
@each_number_of_workers
@each_persistence
def test_past_epochs_that_are_only_begun_and_an_end_by_force(workers: int, persistent: bool) -> None:
    """As Composer resumes: a fresh loader has no iterator, every past epoch is broken off, batches are discarded."""

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        sampler: Any = DistributedSampler(range(12), num_replicas=1, rank=0, shuffle=True, seed=3)
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        loader = kind(Made(12, seeded), 2, sampler=sampler, **options)
        assert loader._iterator is None
        for epoch in range(5):
            sampler.set_epoch(epoch)
            for _ in loader:
                break
        sampler.set_epoch(5)
        iterator = iter(loader)
        for _ in range(2):
            next(iterator)
        found: list[Any] = [list(iterator)]
        assert (loader._iterator is None) is not options["persistent_workers"]
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
        return [*found, torch.get_rng_state().tolist()]

    both(run)


def seeded(index: Any) -> Any:
    return seed_and_draws(index) if torch.utils.data.get_worker_info() else index


@pytest.mark.slow
@each_persistence
def test_a_new_iterator_before_the_old_one_is_dropped(persistent: bool) -> None:
    """As Lightning's and ignite's loops begin an epoch."""

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Rows(6), 2, shuffle=True, num_workers=2, persistent_workers=persistent)
        iterator, found = iter(loader), []
        for taken in (3, 1, 3):
            found += [next(iterator) for _ in range(taken)]
            iterator = iter(loader)
        found += list(iterator)
        close(loader)
        return found

    both(run)


class Watched(BatchSampler):
    """As Lightning's for predictions: remembers, in the main process, the indices of every batch that it gave."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.seen = []
        for batch in super().__iter__():
            self.seen.append(batch)
            yield batch


@each_number_of_workers
@each_persistence
def test_indices_are_known_in_the_main_process_when_their_batch_arrives(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        watched = Watched(RandomSampler(range(9)), 2, False)
        options = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        loader = kind(Rows(9), batch_sampler=watched, **options)
        found = []
        for _ in range(2):
            for number, (_, indices) in enumerate(loader):
                assert watched.seen[number] == indices.tolist()
                found.append([indices, len(watched.seen)])
        close(loader)
        return found

    both(run)


@each_number_of_workers
def test_a_list_of_batches_is_pulled_before_any_is_used(workers: int) -> None:
    """As the Hugging Face trainer does when it accumulates gradients, which moves batches with their type."""

    def run(kind: Any) -> list[Any]:
        iterator, found = iter(kind(Rows(9), 2, num_workers=workers)), []
        while chunk := list(itertools.islice(iterator, 3)):
            found.append([x.mul_(2).sum() + y for x, y in chunk])
        return found

    both(run)


def own_dataset(kind: Any) -> Any:
    """As PyG's samplers: the data set is the loader itself, which therefore travels to the workers."""

    class OwnDataset(kind):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(self, batch_size=2, **options)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return torch.full((2,), index), worker_id()

    return OwnDataset


@each_number_of_workers
def test_a_loader_that_is_its_own_data_set(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = own_dataset(kind)(num_workers=workers)
        return [list(loader), list(loader)]

    both(run)
