"""Our loader beside torch's: the same batches, order, draws, warnings and errors, with the same number of workers."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader import DataLoader, UnpicklableBatchError
from tests.datasets import (
    Batchwise,
    Counting,
    Endless,
    Items,
    Log,
    Made,
    Rows,
    Shards,
    as_is,
    environment,
    first,
    seed_and_draws,
    worker_id,
    worker_pid,
)
from tests.equal import assert_same
from tests.nests import (
    Point,
    Record,
    Sample,
    arrays,
    batches,
    nests,
    plain,
    random_array,
    random_tensor,
    tagged,
    tensors,
)

Stock = torch.utils.data.DataLoader
KINDS = (DataLoader, Stock)
PATIENCE_S = 30
#: Each example starts processes, so that making a failing one smaller would take minutes.
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)

each_start_method = pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)


def of_forking(warning: warnings.WarningMessage) -> bool:
    """Whether it is Python 3.12's of a fork beside a thread, which pytest's own watchdog is."""
    return "multi-threaded" in str(warning.message)


def close(loader: Any) -> None:
    """End persistent workers of either kind of loader."""
    iterator = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()


def epochs(kind: Any, dataset: Any, *args: Any, count: int = 1, seed: int = 0, **options: Any) -> list[list[Any]]:
    """All batches of so many epochs."""
    torch.manual_seed(seed)
    loader = kind(dataset, *args, **options)
    found = [list(loader) for _ in range(count)]
    close(loader)
    return found


def assert_same_epochs(make_dataset: Callable[[], Any], *args: Any, **options: Any) -> list[list[Any]]:
    """Both kinds of loader deliver the same; returns what ours delivers."""
    mine, its = (epochs(kind, make_dataset(), *args, **options) for kind in KINDS)
    assert_same(mine, its)
    return mine


def both(run: Callable[[Any], Any]) -> Any:
    """What ``run`` comes to with our loader, after a look that it comes to the same with torch's."""
    mine, its = run(DataLoader), run(Stock)
    assert_same(mine, its)
    return mine


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


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_come_in_torchs_order(name: str, workers: int) -> None:
    def run(kind: Any) -> Any:
        options = {"batch_size": 4, **SAMPLERS[name]()}
        if "batch_sampler" in options:
            options["collate_fn"] = as_is
        return epochs(kind, Made(23, with_index), num_workers=workers, count=2, **options)

    both(run)


@each_start_method
def test_batches_are_the_same_under_every_start_method(method: str) -> None:
    def run(kind: Any) -> Any:
        return epochs(kind, Rows(11), 3, shuffle=True, num_workers=2, multiprocessing_context=method)

    assert len(both(run)[0]) == 4


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


# -- random numbers ---------------------------------------------------------------------------------------------


def generator_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), hash(random.getstate()), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_global_generators_are_moved_exactly_as_torch_moves_them(
    workers: int, shuffle: bool, persistent: bool
) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        loader = kind(Rows(9), 2, shuffle=shuffle, num_workers=workers, persistent_workers=persistent and workers > 0)
        seen = [generator_states()]
        for _ in range(3):
            iterator = iter(loader)
            seen.append(generator_states())
            next(iterator)
            seen.append(generator_states())
            seen.append([y.tolist() for _, y in iterator])
            seen.append(generator_states())
        del iterator
        close(loader)
        return seen

    both(run)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_the_loaders_own_is_moved_as_torchs_and_the_global_ones_not_at_all(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        generator, before = torch.Generator().manual_seed(3), generator_states()
        loader = kind(Made(9, worker_seed), 2, shuffle=True, num_workers=workers, generator=generator)
        found = [list(loader) for _ in range(2)]
        assert generator_states() == before
        return [found, generator.get_state().tolist()]

    both(run)


def worker_seed(index: Any) -> Any:
    info = get_worker_info()
    return index, info.seed if info else 0


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_seeded_and_draw_as_torchs(workers: int, persistent: bool) -> None:
    mine = assert_same_epochs(
        lambda: Made(11, seed_and_draws), 2, num_workers=workers, persistent_workers=persistent, count=3
    )
    assert len({float(draw) for epoch in mine for batch in epoch for draw in batch[2]}) == 33


def test_an_early_break_moves_the_random_streams_of_persistent_workers_as_torchs() -> None:
    # Torch's workers carry out what they were given, and it is thrown away: their streams go on from there.
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Made(12, seed_and_draws), 2, num_workers=2, persistent_workers=True)
        next(iter(loader))
        found = list(loader)
        close(loader)
        return found

    both(run)


@each_start_method
def test_workers_draw_the_same_under_every_start_method(method: str) -> None:
    mine = epochs(DataLoader, Made(8, seed_and_draws), 2, num_workers=2, multiprocessing_context=method)
    assert_same(mine, epochs(Stock, Made(8, seed_and_draws), 2, num_workers=2))


# -- what workers are -------------------------------------------------------------------------------------------


@each_start_method
def test_a_data_set_finds_the_same_environment(method: str) -> None:
    def run(kind: Any) -> Any:
        options = {"multiprocessing_context": method, "num_workers": 2, "collate_fn": as_is}
        return epochs(kind, Made(4, environment), 2, **options)

    worker = both(run)[0][0][0]
    assert worker[1:4] == (1, "pt_data_worker", True)
    assert worker[4].endswith("Process")
    assert worker[5:] == (True, (0, 2))


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


# -- iterable data sets -----------------------------------------------------------------------------------------

STREAMS: dict[str, list[list[int]]] = {
    "even": [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]],
    "uneven": [[0], [10, 11, 12, 13, 14, 15, 16], [20, 21, 22]],
    "one empty": [[], [10, 11, 12], [20]],
    "last empty": [[0, 1, 2, 3, 4], [10], []],
    "all empty": [[], [], []],
    "first long": [[*range(9)], [10], [20, 21]],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_streams_come_as_from_torchs_loader(name: str, workers: int) -> None:
    shards = STREAMS[name]
    for options in ({"batch_size": 2}, {"batch_size": 2, "drop_last": True}, {"batch_size": None}, {"batch_size": 5}):
        assert_same_epochs(lambda: Shards(*shards), num_workers=workers, **options)


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": None}], ids=str)
def test_persistent_workers_begin_their_streams_again(options: dict[str, Any]) -> None:
    assert_same_epochs(lambda: Shards(*STREAMS["uneven"]), num_workers=3, persistent_workers=True, count=3, **options)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_persistent_workers_begin_their_streams_again_after_an_early_break(stop: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Shards(*STREAMS["uneven"]), 2, num_workers=3, persistent_workers=True)
        for count, _ in enumerate(loader, 1):
            if count == stop:
                break
        found = list(loader)
        close(loader)
        return found

    both(run)


def test_three_uneven_shards_in_the_order_that_torch_documents() -> None:
    shards = [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    mine = assert_same_epochs(lambda: Shards(*shards), 2, num_workers=3)
    assert [batch.tolist() for batch in mine[0]] == [[0, 3], [1, 4], [2, 5], [6, 9], [7], [8]]


def test_streams_out_of_order_lose_and_repeat_nothing() -> None:
    for shards in STREAMS.values():
        found = [int(item) for item in DataLoader(Shards(*shards), num_workers=3, in_order=False)]
        assert sorted(found) == sorted(item for shard in shards for item in shard)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_a_stream_longer_than_it_said_is_warned_of_as_often_as_torch_does_and_in_its_words(
    workers: int, asked: bool
) -> None:
    dataset = Shards([0, 1, 2, 3, 4], [10, 11, 12, 13], length=2)

    def run(kind: Any) -> list[str]:
        loader = kind(dataset, 2, num_workers=workers)
        if asked:
            len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:  # list() would ask for the length
                pass
        return [f"{warning.category.__name__}: {warning.message}" for warning in caught if not of_forking(warning)]

    mine = both(run)
    assert bool(mine) is asked
    assert all("Length of IterableDataset" in text for text in mine)


class BreaksOff(IterableDataset[Any]):
    """Yields three items and raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(3)
        raise KeyError("stream broke")


def test_an_error_in_a_stream_comes_where_it_does_in_torchs_loader() -> None:
    def run(kind: Any) -> list[Any]:
        seen: list[Any] = []
        iterator = iter(kind(BreaksOff(), 2, num_workers=1))
        for _ in range(3):
            try:
                seen.append(next(iterator).tolist())
            except (KeyError, StopIteration) as error:
                seen.append(type(error).__name__)
        iterator._shutdown_workers()
        return seen

    assert both(run) == [[0, 1], "KeyError", "StopIteration"]


# -- fetching and collating -------------------------------------------------------------------------------------


class Returned(Record):
    """Stands for a batch type of a library's own."""


def without_batch_fetching() -> Any:
    dataset = Rows(6)
    dataset.__getitems__ = None
    return dataset


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_fetches_batches_is_asked_for_them_and_answered_for_unchanged(workers: int) -> None:
    returns: list[Callable[[list[int]], Any]] = [
        lambda indices: [torch.tensor(index) for index in indices],
        lambda indices: Returned(x=torch.tensor(indices), names=[str(index) for index in indices]),
        lambda indices: torch.tensor(indices),
        lambda indices: indices,
    ]
    for fetch in returns:
        assert_same_epochs(lambda fetch=fetch: Batchwise(6, fetch), 2, num_workers=workers, collate_fn=as_is)
    assert_same_epochs(without_batch_fetching, 2, num_workers=workers)


ODD_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda n: (n, float(n), str(n), torch.ones(2) * n),
    "namedtuple": lambda n: Point(n, np.float32(n)),
    "dict": lambda n: {"x": torch.ones(n % 1 + 2), "nested": {"y": [n, {"z": (n,)}]}},
    "OrderedDict": lambda n: collections.OrderedDict(b=n, a=[n]),
    "defaultdict": lambda n: collections.defaultdict(list, {"x": torch.tensor(n)}),
    "UserDict": lambda n: collections.UserDict(x=torch.tensor(n), y=n),
    "list subclass": lambda n: collections.UserList([n, n]),
    "range": lambda n: range(n, n + 2),
    "numpy": lambda n: np.full((2, 3), n, np.int16),
    "numpy scalar": lambda n: np.float64(n),
    "numpy bool": lambda n: np.bool_(n % 2),
    "0-d array": lambda n: np.array(n, np.uint8),
    "strings": lambda n: [str(n), b"bytes"],
    "bool": lambda n: n % 2 == 0,
    "complex": lambda n: torch.tensor(complex(n, 1)),
    "large int": lambda n: 2**40 + n,
    "empty tuple": lambda n: (),
    "empty dict": lambda n: {},
    "0-d tensor": lambda n: torch.tensor(n),
    "0-size tensor": lambda n: torch.empty(0, 3),
    "bfloat16": lambda n: torch.full((2,), n, dtype=torch.bfloat16),
    "float8": lambda n: torch.full((2,), n).to(torch.float8_e4m3fn),
    "uint16": lambda n: torch.full((2,), n, dtype=torch.uint16),
    "channels last": lambda n: torch.rand(3, 4, 5).permute(1, 2, 0),
    "expanded": lambda n: torch.tensor([n]).expand(3),
    "subclass": lambda n: tagged(torch.ones(2), note=n),
    "mixed widths": lambda n: torch.ones(2, dtype=torch.float32 if n % 2 else torch.float64),
    "mixed widths, other way": lambda n: torch.ones(2, dtype=torch.float64 if n % 2 else torch.float32),
    "mixed numbers": lambda n: (n if n % 2 else n + 0.5,),
    "ints first": lambda n: (n + 0.5 if n % 2 else n,),
    "tuples and lists": lambda n: (n, n) if n % 2 else [n, n],
}


@pytest.mark.filterwarnings("ignore:.*not writable")
@pytest.mark.parametrize("name", ODD_SAMPLES)
def test_samples_are_collated_as_torch_collates_them(name: str) -> None:
    for options in ({"batch_size": 4}, {"batch_size": None}):
        assert_same_epochs(lambda: Made(9, ODD_SAMPLES[name]), num_workers=2, **options)
    assert_same_epochs(lambda: Made(9, ODD_SAMPLES[name]), 4)


WRONG_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "None": lambda n: None,
    "a dataclass": lambda n: Sample(n),
    "unequal shapes": lambda n: torch.ones(n + 1),
    "unequal lengths": lambda n: [1] * (n + 1),
    "missing keys": lambda n: {str(n): 1},
    "object array": lambda n: np.array([None]),
    "string array": lambda n: np.array(["a"]),
    "sparse": lambda n: torch.eye(2).to_sparse(),
    "unequal kinds": lambda n: [torch.ones(1), 1][n % 2],
}


@pytest.mark.parametrize("name", WRONG_SAMPLES)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_torch_cannot_collate_is_the_same_error(name: str, workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        return [gist(item) for item in one_epoch(iter(kind(Made(4, WRONG_SAMPLES[name]), 2, num_workers=workers)))]

    assert [item for item in both(run) if not isinstance(item, list)] == ["end", "end"]


@pytest.fixture
def restored_map() -> Iterator[None]:
    before = dict(default_collate_fn_map)
    yield
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def collate_records(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return [record.x for record in batch]


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.cat(batch), "by hand"


@pytest.mark.usefixtures("restored_map")
@pytest.mark.parametrize("later", [False, True])
def test_types_registered_with_torchs_collate_are_honoured_also_when_the_loader_was_there_first(later: bool) -> None:
    def run(kind: Any) -> list[Any]:
        default_collate_fn_map.pop(Record, None)
        if not later:
            default_collate_fn_map[Record] = collate_records
        loader = kind(Made(4, lambda n: (Record(x=n), n)), 2, num_workers=1)
        default_collate_fn_map[Record] = collate_records
        return list(loader)

    assert both(run)[0][0] == [0, 1]


@pytest.mark.usefixtures("restored_map")
def test_an_entry_of_torchs_collate_may_be_replaced() -> None:
    default_collate_fn_map[torch.Tensor] = collate_tensors
    mine = assert_same_epochs(lambda: Made(4, lambda n: (torch.ones(2) * n, n)), 2, num_workers=1)
    assert mine[0][1][0][1] == "by hand"


# -- what travels -----------------------------------------------------------------------------------------------


class Whatever:
    """A collate function's own batch type, with everything in it."""

    def __init__(self, samples: Any) -> None:
        self.x = default_collate([x for x, _ in samples])
        self.view = self.x[1:]
        self.again = self.x
        self.label: Any = Point(np.arange(3), {"ids": [y for _, y in samples]})
        self.sample = Sample(self.x[0], self.label)
        self.deep = ({"a": [({"b": [self.x[:, 1]]},)]},)
        self.packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)])


@each_start_method
def test_a_batch_of_any_class_travels_with_identity_and_aliasing(method: str) -> None:
    def run(kind: Any) -> list[Any]:
        return epochs(kind, Rows(9), 3, num_workers=2, collate_fn=Whatever, multiprocessing_context=method)

    batch = both(run)[0][0]
    assert batch.again is batch.x
    batch.x[2, 1] = -5
    assert batch.view[1, 1] == -5
    assert batch.deep[0]["a"][0][0]["b"][0][2] == -5


TRAVELLERS: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "leaf that requires grad": lambda: torch.arange(3.0).requires_grad_(),
    "subclass that requires grad": lambda: tagged(torch.arange(3.0), note=1).requires_grad_(),
    "view of a subclass": lambda: tagged(torch.arange(9.0))[2:5],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "overlapping": lambda: torch.arange(9).as_strided((3, 4), (1, 2)),
    "storage": lambda: [torch.arange(3).untyped_storage().tolist()],
    "typed array": lambda: np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "empty array": lambda: np.empty((2, 0), np.uint8),
    "nothing": list,
    "foreign byte order": lambda: [np.arange(3, dtype=">i4"), np.array([(1,)], [("a", ">f8")])],
    "F-order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "reversed": lambda: np.arange(6)[::-2],
    "objects": lambda: np.array([1, "a", None], object),
    "dates": lambda: np.array(["2020-01-01"], "M8[D]"),
    "generator state": lambda: torch.Generator().manual_seed(0).get_state(),
    "dtype and size": lambda: [torch.float32, torch.Size([1, 2]), torch.device("cpu")][:2],
}


@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "jagged" else []) for name in TRAVELLERS]
)
def test_what_a_collate_function_returns_arrives_as_from_torchs_loader(name: str) -> None:
    items = [TRAVELLERS[name]() for _ in range(4)]
    assert_same_epochs(lambda: Items(items), 1, num_workers=1, collate_fn=first)


BETTER: dict[str, Callable[[], Any]] = {
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("name", BETTER)
def test_what_torchs_loader_gets_wrong_arrives_right(name: str) -> None:
    items = [BETTER[name]() for _ in range(4)]
    assert_same(epochs(DataLoader, Items(items), 1, num_workers=1, collate_fn=first)[0], items)


@pytest.mark.slow
def test_batches_may_grow_shrink_and_be_empty() -> None:
    sizes = [1, 0, 10, 1000, 3, 100_000, 1, 0, 300_000, 299_999, 5, 300_001, 70_000]

    def made() -> Any:
        return Items([torch.full((size,), 7, dtype=torch.uint8) for size in sizes])

    for workers in (1, 2):
        assert_same_epochs(made, 1, num_workers=workers, count=2)


@pytest.mark.slow
def test_many_small_fields_travel_like_a_few() -> None:
    def sample(n: Any) -> Any:
        return [{str(field): torch.tensor([n, field]) for field in range(40)} for _ in range(5)]

    assert_same_epochs(lambda: Made(12, sample), 4, num_workers=2)


def named(n: Any) -> Any:
    return torch.full((3,), n), f"photograph-{n:04}.jpg"


@pytest.mark.slow
def test_names_in_batches_arrive_right_between_batches_of_fixed_layout() -> None:
    mine = assert_same_epochs(lambda: Made(400, named), 1, num_workers=2)
    assert [names for _, (names,) in mine[0]] == [named(n)[1] for n in range(400)]


# -- random nests -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=8, phases=WITHOUT_SHRINKING)
@given(st.lists(batches(), min_size=20, max_size=20))
def test_random_nests_arrive_as_from_torchs_loader(nests: list[Any]) -> None:
    """Forked workers have the nests; the collate function returns one per batch."""
    assert_same_epochs(lambda: Items(nests), 1, num_workers=2, collate_fn=first)


samples = st.recursive(
    st.one_of(
        st.integers(-9, 9),
        st.floats(-9, 9),
        st.booleans(),
        st.text(max_size=3),
        st.builds(
            random_tensor, st.sampled_from([torch.float32, torch.int64, torch.bfloat16]), st.just((2, 3)), st.just(0)
        ),
        st.builds(random_array, st.sampled_from(["f4", "u1", "?"]), st.sampled_from([(), (3,)]), st.just(0)),
        st.just(np.int16(3)),
    ),
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inside, max_size=3),
        st.builds(Point, inside, inside),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=8, phases=WITHOUT_SHRINKING)
@given(st.lists(samples, min_size=15, max_size=15))
def test_random_samples_are_collated_as_by_torchs_loader(samples: list[Any]) -> None:
    """One loader for all examples: each batch is one sample, three times."""
    order = [[index] * 3 for index in range(len(samples))]
    assert_same_epochs(lambda: Items(samples), batch_sampler=order, num_workers=2)


@pytest.mark.slow
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
@given(st.lists(nests(st.one_of(tensors, arrays, plain)), min_size=10, max_size=10))
def test_random_samples_are_converted_as_by_torchs_loader(samples: list[Any]) -> None:
    def run(kind: Any) -> list[Any]:
        return epochs(kind, Items(samples), batch_size=None, num_workers=2, collate_fn=convert)

    both(run)


def convert(sample: Any) -> Any:
    try:
        return default_convert(sample)
    except (TypeError, ValueError, RuntimeError) as error:  # numpy types that torch does not know
        return type(error).__name__


# -- where torch with workers and torch without differ ----------------------------------------------------------


def wide_or_narrow(n: Any) -> torch.Tensor:
    return torch.ones(2, dtype=torch.float64 if n % 2 else torch.float32)


def test_a_column_of_two_widths_takes_the_first_with_workers_and_the_wider_without() -> None:
    with_workers = assert_same_epochs(lambda: Made(4, wide_or_narrow), 2, num_workers=1)
    without = assert_same_epochs(lambda: Made(4, wide_or_narrow), 2)
    assert (with_workers[0][0].dtype, without[0][0].dtype) == (torch.float32, torch.float64)


ONLY_WITHOUT_WORKERS: dict[str, Callable[[Any], Any]] = {
    "ints, then floats": lambda n: torch.ones(2, dtype=torch.float32 if n % 2 else torch.int64),
    "leaves that require grad": lambda n: torch.ones(2, requires_grad=True),
    "negated views": lambda n: torch.tensor([n + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", ONLY_WITHOUT_WORKERS)
def test_what_torch_only_collates_without_workers_is_refused_by_it_with_workers(name: str) -> None:
    make = ONLY_WITHOUT_WORKERS[name]
    assert len(list(Stock(Made(4, make), 2))) == 2
    seen = one_epoch(iter(Stock(Made(4, make), 2, num_workers=1)))
    assert [isinstance(item, (RuntimeError, TypeError)) for item in seen] == [True, True, False, False]


@pytest.mark.parametrize("name", ["ints, then floats", "negated views"])
@pytest.mark.parametrize("collate_fn", [None, as_is])
def test_and_comes_from_our_workers_as_without_any(name: str, collate_fn: Any) -> None:
    make = ONLY_WITHOUT_WORKERS[name]
    mine = epochs(DataLoader, Made(4, make), 2, num_workers=1, collate_fn=collate_fn)
    assert_same(mine, epochs(Stock, Made(4, make), 2, collate_fn=collate_fn))


def test_a_stack_of_leaves_that_require_grad_cannot_travel_and_says_why() -> None:
    loader = DataLoader(Made(4, ONLY_WITHOUT_WORKERS["leaves that require grad"]), 2, num_workers=1)
    with pytest.raises(UnpicklableBatchError, match="Cowardly refusing to serialize non-leaf tensor"):
        list(loader)


# -- errors -----------------------------------------------------------------------------------------------------


class TwoArguments(Exception):
    """Cannot be built from one text."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one, two)


class Described(Exception):
    """Has a ``message``, and is built with it."""

    message = "truthy"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class OddlyDescribed(Exception):
    """Has a ``message``, and cannot be built with it."""

    message = "truthy"


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("some text"),
    "KeyError": lambda: KeyError("a key"),
    "IndexError": lambda: IndexError(3),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "there.jpg"),
    "AssertionError": lambda: AssertionError(),
    "NotImplementedError": lambda: NotImplementedError("later"),
    "MemoryError": lambda: MemoryError("much"),
    "RuntimeError": lambda: RuntimeError("CUDA error: nobody home"),
    "two arguments": lambda: TwoArguments(1, 2),
    "described": lambda: Described("text"),
    "Unicode": lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "reason"),
    "a group": lambda: ZeroDivisionError("zero"),
}


class Raises(Dataset[Any]):
    """Item 3 of eight raises."""

    def __init__(self, make: Callable[[], BaseException], at: int = 3) -> None:
        self.make, self.at = make, at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise self.make()
        return index


def one_epoch(iterator: Any) -> list[Any]:
    """Items and errors of an epoch in which calling on after errors is the thing to do."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(int(next(iterator)))
        except StopIteration:
            seen.append("end")
            if seen[-2:] == ["end", "end"]:
                return seen
        except Exception as error:
            seen.append(error)


def gist(error: Any) -> Any:
    """What users match of an error: class and text, but for the paths and lines of the traceback within."""
    if not isinstance(error, Exception):
        return error
    lines = str(error).splitlines()
    inner = [line for line in lines if "tests/test_differential.py" in line]
    return [type(error).__name__, lines[:2], lines[-1:], len(inner)]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_data_set_arrives_as_torchs_and_the_epoch_goes_on(name: str, workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Raises(ERRORS[name]), num_workers=workers))
        return [gist(item) for item in one_epoch(iterator)]

    seen = both(run)
    assert [item for item in seen if not isinstance(item, list)] == [0, 1, 2, 4, 5, 6, 7, "end", "end"]
    if workers:
        assert seen[3][1][0] == f"Caught {type(ERRORS[name]()).__name__} in DataLoader worker process 1."
        assert seen[3][1][1] == "Original Traceback (most recent call last):"


def test_a_class_that_torch_cannot_rebuild_arrives_as_a_runtime_error_with_the_cause_in_it() -> None:
    error = one_epoch(iter(DataLoader(Raises(OddlyDescribed), num_workers=1)))[3]
    assert "Caught OddlyDescribed in DataLoader worker process 0." in str(error)


def test_a_class_that_cannot_be_sent_arrives_as_a_runtime_error_with_the_cause_in_it() -> None:
    class Local(Exception):
        pass

    error = one_epoch(iter(DataLoader(Raises(lambda: Local("hidden")), num_workers=1)))[3]
    assert type(error) is RuntimeError
    assert str(error).startswith("Caught Local in DataLoader worker process 0.\nOriginal Traceback")
    assert "hidden" in str(error)


def test_a_map_style_data_set_that_stops_the_iteration_is_an_error_not_a_silent_end() -> None:
    """Torch's loader ends the epoch there without a word."""
    assert one_epoch(iter(Stock(Raises(StopIteration), num_workers=1)))[3] == "end"
    seen = one_epoch(iter(DataLoader(Raises(StopIteration), num_workers=1)))
    assert "StopIteration" in str(seen[3])
    assert seen[4:] == [4, 5, 6, 7, "end", "end"]


def test_no_slot_is_lost_to_errors() -> None:
    loader = DataLoader(Raises(lambda: ValueError("text")), num_workers=2, persistent_workers=True)
    for _ in range(5):
        one_epoch(iter(loader))
    assert set(loader.stats().slots) <= {"FREE"}
    loader.close()


def fails_in_collate(items: Any) -> Any:
    if items[0] == 3:
        raise ValueError("in collate")
    return torch.tensor(items)


def test_an_error_in_the_collate_function_arrives_as_torchs() -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Made(8, int), num_workers=2, collate_fn=fails_in_collate))
        return [gist(item) for item in one_epoch(iterator)]

    assert both(run)[3][1][0] == "Caught ValueError in DataLoader worker process 1."


def fail_in_worker_one(worker: int) -> None:
    if worker == 1:
        raise ValueError("not this one")


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_an_error_in_the_init_function_is_what_every_batch_of_that_worker_comes_to(method: str) -> None:
    options = {"num_workers": 2, "worker_init_fn": fail_in_worker_one, "multiprocessing_context": method}
    seen = [gist(item) for item in one_epoch(iter(DataLoader(Made(6, int), **options)))]
    caught = "Caught ValueError in DataLoader worker process 1."
    assert [item if isinstance(item, (int, str)) else item[1][0] for item in seen] == [
        0, caught, 2, caught, 4, caught, "end", "end",
    ]  # fmt: skip
    iterator = iter(Stock(Made(6, int), **options))
    assert int(next(iterator)) == 0
    with pytest.raises(ValueError, match="not this one") as theirs:
        next(iterator)
    assert gist(theirs.value)[:2] == seen[1][:2]
    iterator._shutdown_workers()


class CannotBegin(IterableDataset[Any]):
    """Raises when iteration begins."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyError("no beginning")


def test_an_error_when_a_stream_begins_arrives_as_torchs() -> None:
    def run(kind: Any) -> Any:
        iterator = iter(kind(CannotBegin(), num_workers=1))
        with pytest.raises(KeyError) as caught:
            next(iterator)
        iterator._shutdown_workers()
        return gist(caught.value)

    both(run)


class BeginsOddly(IterableDataset[Any]):
    """Raises when iteration begins for the second time."""

    begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        if self.begun == 2:
            raise KeyError("not again")
        return iter(range(2))


def test_a_stream_that_fails_to_begin_again_fails_in_that_epoch_only() -> None:
    """Torch's worker dies of it."""
    loader = DataLoader(BeginsOddly(), num_workers=1, persistent_workers=True)
    assert [int(item) for item in loader] == [0, 1]
    with pytest.raises(KeyError, match="not again"):
        next(iter(loader))
    assert [int(item) for item in loader] == [0, 1]
    loader.close()


UNSENDABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a generator": (lambda samples: {"x": [1, (n for n in samples)]}, r"batch\['x'\]\[1\] cannot be sent"),
    "a lock": (lambda samples: Record(inner=threading.Lock()), r"batch\.inner cannot be sent"),
    "a tracked tensor": (
        lambda samples: [torch.ones(2, requires_grad=True) * 2],
        r"batch\[0\] cannot be sent.*Cowardly refusing to serialize non-leaf tensor.*detach\(\)",
    ),
    "a function": (lambda samples: Point(0, lambda: samples), r"batch\.y cannot be sent"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_cannot_be_sent_is_an_error_at_its_turn_that_names_the_place(name: str) -> None:
    bad, text = UNSENDABLE[name]

    def collate(items: Any) -> Any:
        return bad(items) if items[0] == 3 else torch.tensor(items)

    seen = one_epoch(iter(DataLoader(Made(6, int), num_workers=2, collate_fn=collate)))
    error = seen.pop(3)
    assert seen == [0, 1, 2, 4, 5, "end", "end"]
    assert isinstance(error, UnpicklableBatchError)
    with pytest.raises(UnpicklableBatchError, match=f"(?s){text}"):
        raise error


class Refuses:
    """Can be sent, and refuses to be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def refuses_at_three(items: Any) -> Any:
    return [torch.ones(100), Refuses()] if items[0] == 3 else torch.tensor(items)


@pytest.mark.slow
def test_what_cannot_be_rebuilt_is_an_error_at_its_turn_and_loses_no_slot() -> None:
    loader = DataLoader(Made(8, int), num_workers=2, collate_fn=refuses_at_three, persistent_workers=True)
    for _ in range(3):
        seen = one_epoch(iter(loader))
        assert [item for item in seen if not isinstance(item, Exception)] == [0, 1, 2, 4, 5, 6, 7, "end", "end"]
        assert "not a number" in str(seen[3])
        del seen
        gc.collect()
    loader._iterator._pool.reclaim()
    assert list(loader.stats().slots) == ["FREE"]
    loader.close()


class Stuck(Made):
    """Item 2 waits for something that only the test can do."""

    def __init__(self) -> None:
        super().__init__(4, int)
        self.release = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            self.release.wait(PATIENCE_S)
        return index


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_come_in_time_is_torchs_error(kind: Any) -> None:
    dataset = Stuck()
    iterator = iter(kind(dataset, num_workers=1, timeout=PATIENCE_S))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    assert iterator._timeout == PATIENCE_S
    iterator._timeout = 0.3  # not before the worker has started, which may take as long
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert str(caught.value) == "DataLoader timed out after 0.3 seconds"
    dataset.release.set()
    iterator._shutdown_workers()


def test_after_a_timeout_the_batch_is_still_there_to_be_had() -> None:
    dataset = Stuck()
    iterator = iter(DataLoader(dataset, num_workers=1, timeout=PATIENCE_S))
    seen = [int(next(iterator)), int(next(iterator))]
    iterator._timeout = 0.1
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    dataset.release.set()
    iterator._timeout = PATIENCE_S
    assert [*seen, *map(int, iterator)] == [0, 1, 2, 3]


# -- warnings and other things that can be observed -------------------------------------------------------------


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught if not of_forking(warning)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"pin_memory": True},
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning works here"),
        ),
        {"pin_memory": True, "pin_memory_device": "cuda"},
        pytest.param({"num_workers": 7}, marks=pytest.mark.slow),
        {},
    ],
    ids=str,
)
def test_torchs_warnings_come_as_often_and_in_the_same_words(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def run(kind: Any) -> list[str]:
        def use() -> None:
            loader = kind(Rows(2), **{"num_workers": 1, **options})
            for _ in range(2):
                next(iter(loader))

        return warned(use)

    mine = both(run)
    assert bool(mine) is bool(options)


def test_a_profiler_sees_the_ranges_that_tools_group_by() -> None:
    with torch.autograd.profiler.profile() as profile:
        list(DataLoader(Rows(2), num_workers=1))
    names = {event.name for event in profile.function_events}
    assert any(name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__") for name in names)


def test_workers_are_gone_when_the_epoch_has_ended() -> None:
    for kind in KINDS:
        iterator = iter(kind(Rows(4), num_workers=2))
        workers = list(iterator._workers)
        assert len(list(iterator)) == 4
        assert not any(worker.is_alive() for worker in workers)


def test_grad_mode_reaches_forked_workers() -> None:
    def run(kind: Any) -> list[Any]:
        with torch.no_grad():
            return epochs(kind, Made(2, lambda _: torch.is_grad_enabled()), num_workers=1, collate_fn=first)

    assert both(run) == [[False, False]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_data_pipes_are_left_to_torchs_own_iterator() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    def run(kind: Any) -> list[Any]:
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        return epochs(kind, pipe, 4, shuffle=True, num_workers=2, count=2)

    both(run)
    gc.collect()


def test_index_types_reach_the_data_set_as_they_are() -> None:
    class Typed(Made):
        def __getitem__(self, index: Any) -> Any:
            return type(index).__name__, repr(index)

    indices = [1, np.int64(2), "name", (1, "a"), None, torch.tensor(3), 2**70, 1.5, True]
    for how in ({"sampler": indices, "batch_size": 2}, {"batch_sampler": [indices, [True, 2], ()]}):
        mine = assert_same_epochs(lambda: Typed(9, int), num_workers=1, collate_fn=as_is, **how)
        assert len(mine[0]) > 2
