"""Ends: however an epoch or a loader is left, nothing remains of it and the next one is whole."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

from shmloader import DataLoader, endings
from tests.faulty import Numbers, SoundSleeper
from tests.loaders import COUNT, loader, numbers, pids, pool_of
from tests.programs import (
    Forked,
    Teller,
    all_gone,
    descriptors,
    mappings,
    within,
)

# -- 25: pages at close ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 3])
def test_closing_gives_pages_back_though_a_forked_child_maps_them(held: int) -> None:
    source = loader(Numbers(COUNT, 100_000))
    iterator = iter(source)
    kept = [next(iterator) for _ in range(held)]
    for batch in iterator:
        del batch
    pool = pool_of(source)
    file = os.dup(pool.segment.fd)
    del pool

    def sleep(teller: Teller) -> None:
        teller.tell("mapped")
        signal.pause()

    with Forked(sleep) as child:
        child.hear()
        del iterator
        source.close()
        slot = 100_000 * 8 * 9 // 8
        assert 512 * os.fstat(file).st_blocks <= held * slot
    os.close(file)
    assert numbers(kept) == list(range(held))


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(DataLoader(Numbers(COUNT), num_workers=2))
    gc.collect()
    assert numbers(iterator) == list(range(COUNT))


def test_a_loader_is_told_by_its_identity() -> None:
    class Equal(DataLoader[Any]):
        """Equal to everything."""

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    one, other = Equal(Numbers(5), num_workers=1), Equal(Numbers(9), num_workers=1)
    assert [len(numbers(one)), len(numbers(other))] == [5, 9]
    assert (one.stats().batches, other.stats().batches) == (5, 9)


def test_a_dropped_loader_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        before = descriptors(), mappings()
        for persistent in (False, True):
            source = loader(persistent_workers=persistent)
            iterator = iter(source)
            workers = pids(iterator)
            assert int(next(iterator)[0, 0]) == 0
            del iterator, source
            assert all_gone(workers, 0)
        assert descriptors() == before[0]
        assert mappings() <= before[1] + 2  # arenas of the allocator
    finally:
        gc.enable()


# -- ends of every kind ---------------------------------------------------------------------------------------------


def leave_by_break(source: Any) -> None:
    for batch in source:
        del batch
        break


def leave_by_del(source: Any) -> None:
    iterator = iter(source)
    next(iterator)
    del iterator


def leave_by_exhaustion(source: Any) -> None:
    for batch in source:
        del batch


def leave_by_close(source: Any) -> None:
    iterator = iter(source)
    next(iterator)
    source.close()
    source.close()


def leave_by_with(source: Any) -> None:
    with source as entered:
        assert entered is source
        next(iter(entered))


def leave_by_exception(source: Any) -> None:
    with contextlib.suppress(LookupError):
        for _ in source:
            raise LookupError


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_del, leave_by_exhaustion, leave_by_close, leave_by_with, leave_by_exception],
)
def test_however_an_epoch_is_left_the_next_is_whole(leave: Callable[[Any], None], persistent: bool) -> None:
    source = loader(persistent_workers=persistent)
    for _ in range(3):
        leave(source)
        assert numbers(source) == list(range(COUNT))
    source.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_held_batches_outlive_whatever_made_them(persistent: bool) -> None:
    source = loader(Numbers(COUNT, 1000), persistent_workers=persistent)
    iterator = iter(source)
    held = [next(iterator) for _ in range(5)]
    held += list(source)  # with persistent workers a rewind of the same iterator
    source.close()
    held += list(source)
    del iterator, source
    gc.collect()
    assert numbers(held) == [*range(5), *range(COUNT), *range(COUNT)]
    assert all(bool((batch == batch[0, 0]).all()) for batch in held)


def test_after_close_the_old_iterator_says_so_and_a_new_one_works() -> None:
    source = loader()
    iterator = iter(source)
    next(iterator)
    source.close()
    with pytest.raises(RuntimeError, match=r"shut down; call iter\(\) on the loader again"):
        next(iterator)
    assert numbers(source) == list(range(COUNT))


def test_a_loader_that_never_ran_can_be_closed() -> None:
    source = loader()
    source.close()
    with source:
        pass


def test_workers_are_gone_before_the_epochs_end_is_told() -> None:
    iterator = iter(loader())
    workers = pids(iterator)
    for batch in iterator:
        del batch
    assert all_gone(workers, 0)
    with pytest.raises(StopIteration):
        next(iterator)


def test_persistent_workers_stay_and_never_deliver_what_was_left_over() -> None:
    dataset = Numbers(COUNT)
    source = loader(dataset, persistent_workers=True)
    iterator = iter(source)
    workers = pids(iterator)
    held = []
    for leave in range(1, 20):
        again = iter(source)
        assert again is iterator
        held.append([next(iterator) for _ in range(leave)])
    assert [numbers(batches) for batches in held] == [list(range(leave)) for leave in range(1, 20)]
    assert pids(iter(source)) == workers
    source.close()
    assert all_gone(workers, 0)
    assert [numbers(batches) for batches in held] == [list(range(leave)) for leave in range(1, 20)]


class Endless(Sampler[int]):
    """Never ends, and has no length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(COUNT)


def test_an_endless_sampler_can_be_left_at_any_time() -> None:
    source = loader(sampler=Endless())
    for _ in range(5):
        seen = []
        for batch in source:
            seen.append(int(batch[0, 0]))
            if len(seen) == 50:
                break
        assert seen == [*range(COUNT), *range(10)]


@pytest.mark.slow
def test_ending_takes_a_bounded_time_even_if_a_worker_is_busy_for_an_hour() -> None:
    sleeper = SoundSleeper()
    iterator = iter(loader(sleeper))
    sleeper.hear()
    workers = pids(iterator)
    with within(4.0):
        del iterator
    assert all_gone(workers, 0)


def test_ending_is_quick_when_workers_are_idle() -> None:
    source = loader(Numbers(4))
    for _ in range(3):
        iterator = iter(source)
        next(iterator)
        with within(1.0):
            del iterator


class Stream(IterableDataset[torch.Tensor]):
    """An endless stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        index = 0
        while True:
            yield torch.full((8,), index)
            index += 1


@pytest.mark.parametrize("persistent", [False, True])
def test_an_endless_stream_can_be_left(persistent: bool) -> None:
    source = loader(Stream(), num_workers=1, persistent_workers=persistent)
    for _ in range(4):
        iterator = iter(source)
        assert [int(next(iterator)[0, 0]) for _ in range(10)] == list(range(10))
    del iterator
    source.close()


def test_a_pump_that_never_left_keeps_no_finalizer_from_its_work() -> None:
    def interrupted() -> bool:
        return endings.enter()  # and, by an exception from nowhere, never leave()

    class Ends:
        ended = False

        def _shutdown_workers(self) -> None:
            self.ended = True

        def _disown(self) -> None: ...

        def _elsewhere(self) -> bool:
            return False

    assert interrupted()
    assert not endings.pumping()
    end = Ends()
    endings.finalize(end)
    assert end.ended
    outermost = endings.enter()
    assert outermost
    assert endings.pumping()
    later = Ends()
    endings.finalize(later)
    assert not later.ended
    endings.leave(outermost)
    assert later.ended
