"""Attributes: what may be set, read or deleted of a loader and of its iterator does there what it does in torch's."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmloader import DataLoader
from tests.beside import KINDS, both, close, of_forking
from tests.datasets import Made, Rows, as_is, worker_id


def drawn(index: Any) -> Any:
    return index, worker_id(), float(torch.rand(()))


def to_no_workers(loader: Any) -> None:
    loader.num_workers, loader.prefetch_factor = 0, None


def to_workers(loader: Any) -> None:
    loader.num_workers, loader.prefetch_factor = 2, 2


def to_a_generator(loader: Any) -> None:
    loader.generator = torch.Generator().manual_seed(5)


def to_a_generator_of_the_sampler(loader: Any) -> None:
    loader.sampler.generator = torch.Generator().manual_seed(6)


def to_an_init_function(loader: Any) -> None:
    loader.worker_init_fn = torch.manual_seed


def to_another_collate_function(loader: Any) -> None:
    loader.collate_fn = as_is


def to_out_of_order(loader: Any) -> None:
    loader.in_order = False


def to_a_context(loader: Any) -> None:
    loader.multiprocessing_context = "fork" if loader.num_workers else None


CHANGES: list[Callable[[Any], None]] = [
    to_no_workers,
    to_workers,
    to_a_generator,
    to_a_generator_of_the_sampler,
    to_an_init_function,
    to_another_collate_function,
    to_out_of_order,
    to_a_context,
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_epochs_takes_effect_as_in_torchs_loader(
    workers: int, change: Callable[[Any], None]
) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Made(6, drawn), 2, shuffle=True, num_workers=workers)
        found: list[Any] = [list(loader)]
        torch.manual_seed(1)
        change(loader)
        found.append(list(loader))
        found.append(torch.get_rng_state().tolist())
        return found

    both(run)


@pytest.mark.parametrize("change", [to_another_collate_function, to_an_init_function, to_a_generator])
def test_a_change_is_seen_by_persistent_workers_as_in_torchs_loader(change: Callable[[Any], None]) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Made(6, drawn), 2, shuffle=True, num_workers=1, persistent_workers=True)
        found = [list(loader)]
        change(loader)
        found += [list(loader), torch.get_rng_state().tolist()]
        close(loader)
        return found

    both(run)


WRONG_CHANGES: dict[str, tuple[str, Any]] = {
    "num_workers 0 though there is a prefetch_factor": ("num_workers", 0),
    "num_workers -1": ("num_workers", -1),
    "timeout without workers": ("timeout", 5),
    "prefetch_factor 0": ("prefetch_factor", 0),
    "prefetch_factor None": ("prefetch_factor", None),
    "an unknown context": ("multiprocessing_context", "teleport"),
    "a context of a wrong type": ("multiprocessing_context", 5),
    "an unknown attribute": ("whatever", 5),
    "batch_size": ("batch_size", 1),
    "the same batch_size": ("batch_size", 2),
    "data set": ("dataset", None),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-built iterator dies so
@pytest.mark.parametrize("name", WRONG_CHANGES)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_may_not_be_set_fails_when_and_as_it_does_in_torchs_loader(name: str, workers: int) -> None:
    attribute, value = WRONG_CHANGES[name]

    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(4), 2, num_workers=workers)
        try:
            setattr(loader, attribute, value)
        except Exception as error:
            return ["set", type(error).__name__, str(error)]
        try:
            return ["iterated", len(list(loader)), getattr(loader, attribute, None) == value]
        except Exception as error:
            return ["not iterated", type(error).__name__, str(error)]

    both(run)
    gc.collect()  # or what the half-built iterators die of is another test's warning


# -- what is there to be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_whatever_torchs_loader_has_ours_has(workers: int) -> None:
    def run(kind: Any) -> list[str]:
        loader = kind(Rows(4), 2, num_workers=workers)
        list(loader)
        return sorted(vars(loader))

    mine, its = run(KINDS[0]), run(KINDS[1])
    assert set(its) <= set(mine)
    assert {name for name in set(mine) - set(its) if name.startswith("_")} == set()


def test_whatever_torchs_class_has_ours_has() -> None:
    mine, its = (set(dir(kind)) for kind in KINDS)
    assert its <= mine


#: What tools and debuggers read of an iterator, and what is the same in both while batches come in order.
READ = [
    *("_num_workers", "_base_seed", "_num_yielded", "_drop_last", "_auto_collation", "_dataset_kind", "_timeout"),
    *("_IterableDataset_len_called", "_world_size", "_rank", "_pin_memory", "_persistent_workers"),
]
READ_OF_WORKERS = ["_prefetch_factor", "_in_order", "_send_idx", "_shutdown"]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_of_an_iterator_says_what_torchs_says_at_every_step(workers: int) -> None:
    def state(iterator: Any, loader: Any) -> list[Any]:
        names = READ + READ_OF_WORKERS * bool(workers)
        found = [getattr(iterator, name) for name in names]
        found += [len(iterator), iterator._index_sampler is loader.batch_sampler, iterator._dataset is loader.dataset]
        found += [iterator._collate_fn is loader.collate_fn, iter(iterator) is iterator]
        found.append(len(getattr(iterator, "_workers", ())))
        return found

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Rows(9), 2, num_workers=workers)
        iterator = iter(loader)
        found = [state(iterator, loader)]
        for _ in range(5):
            next(iterator)
            found.append(state(iterator, loader))
        return found

    both(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_refuses_to_be_pickled_in_torchs_words(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Rows(4), num_workers=workers))
        with pytest.raises(NotImplementedError) as caught:
            pickle.dumps(iterator)
        if workers:
            iterator._shutdown_workers()
        return [caught.value.args[0], len(caught.value.args)]

    both(run)


def test_a_workers_process_can_be_asked_what_processes_are_asked() -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(8), num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        workers = list(iterator._workers)
        found: list[Any] = [[one.is_alive(), one.daemon, one.exitcode, type(one.pid).__name__] for one in workers]
        found.append(type(iterator._workers).__name__)
        close(loader)
        found += [[one.is_alive(), one.exitcode] for one in workers]
        return found

    both(run)


# -- the loader's iterator --------------------------------------------------------------------------------------


def to_none(loader: Any) -> None:
    loader._iterator = None


def shut_down_and_to_none(loader: Any) -> None:
    loader._iterator._shutdown_workers()
    loader._iterator = None


@pytest.mark.parametrize("drop", [to_none, shut_down_and_to_none])
@pytest.mark.parametrize("taken", [0, 2, 6])
def test_frameworks_may_drop_a_loaders_iterator_and_iterate_again(drop: Callable[[Any], None], taken: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(6), num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        assert loader._iterator is iterator
        workers = list(iterator._workers)
        found = [next(iterator) for _ in range(taken)]
        del iterator
        drop(loader)
        assert not any(worker.is_alive() for worker in workers)
        found += list(loader)
        close(loader)
        return found

    both(run)


def test_a_loaders_iterator_may_be_deleted_though_torchs_persistent_loader_is_of_no_use_after_it() -> None:
    for persistent in (False, True):
        loader = DataLoader(Rows(6), num_workers=1, persistent_workers=persistent)
        iterator = iter(loader)
        workers = list(iterator._workers)
        next(iterator)
        del iterator, loader._iterator
        assert not any(worker.is_alive() for worker in workers)
        assert len(list(loader)) == 6
        close(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_iterator_that_was_never_there_may_be_deleted_as_from_torchs_loader(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(6), num_workers=workers)
        found = list(loader)
        del loader._iterator
        return [found, list(loader)]

    both(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_without_persistent_workers_never_has_an_iterator(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Rows(4), num_workers=workers)
        found = [loader._iterator]
        iterator = iter(loader)
        found.append(loader._iterator)
        next(iterator)
        found.append(loader._iterator)
        list(iterator)
        return [*found, loader._iterator]

    assert both(run) == [None] * 4


def test_after_the_end_of_an_epoch_an_iterator_says_so_again_and_again() -> None:
    def run(kind: Any) -> list[Any]:
        found: list[Any] = []
        for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
            loader = kind(Made(3, worker_id), **options)
            iterator = iter(loader)
            found.append(list(iterator))
            found += [next(iterator, "end") for _ in range(3)]
            close(loader)
        return found

    both(run)


def test_no_step_of_an_epoch_warns_where_torchs_does_not() -> None:
    def run(kind: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = kind(Rows(6), 2, num_workers=1, persistent_workers=True)
            for _ in range(2):
                list(loader)
            close(loader)
            del loader
            gc.collect()
        return [str(one.message) for one in caught if not of_forking(one)]

    assert both(run) == []
