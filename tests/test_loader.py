"""The loader as an object: what it accepts, holds, refuses, reports, and how it is copied and closed."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

import shmloader
from shmloader import BatchTooLargeError, DataLoader, PairedDataset
from shmloader.tuning.auto import AutoWorkers
from tests.datasets import Batchwise, Items, Made, Rows, Shards, as_is, draws, worker_id, worker_pid

Stock = torch.utils.data.DataLoader
T = TypeVar("T")
each_kind = pytest.mark.parametrize("kind", [Stock, DataLoader], ids=["torch", "shmloader"])
EXTRAS = {"memory_limit", "slots", "seeding", "max_workers", "copy", "device", "late_targets"}


def outcome(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever torch raises
        call()
    return caught.type, str(caught.value)


# -- the constructor --------------------------------------------------------------------------------------------

STREAM = Shards([1, 2, 3])
SAMPLER = SequentialSampler(range(10))
BATCHES = BatchSampler(SAMPLER, 2, False)

WRONG: dict[str, dict[str, Any]] = {
    "negative num_workers": {"num_workers": -1},
    "num_workers as text": {"num_workers": "many"},
    "num_workers None": {"num_workers": None},
    "negative timeout": {"timeout": -1},
    "prefetch_factor without workers": {"prefetch_factor": 2},
    "negative prefetch_factor": {"prefetch_factor": -1, "num_workers": 1},
    "persistent without workers": {"persistent_workers": True},
    "context without workers": {"multiprocessing_context": "fork"},
    "unknown start method": {"multiprocessing_context": "teleport", "num_workers": 1},
    "a context of a wrong type": {"multiprocessing_context": 5, "num_workers": 1},
    "sampler and shuffle": {"sampler": SAMPLER, "shuffle": True},
    "batch_sampler and batch_size": {"batch_sampler": BATCHES, "batch_size": 2},
    "batch_sampler and shuffle": {"batch_sampler": BATCHES, "shuffle": True},
    "batch_sampler and sampler": {"batch_sampler": BATCHES, "sampler": SAMPLER},
    "batch_sampler and drop_last": {"batch_sampler": BATCHES, "drop_last": True},
    "no batches and drop_last": {"batch_size": None, "drop_last": True},
    "batch_size 0": {"batch_size": 0},
    "batch_size True": {"batch_size": True},
    "batch_size as a float": {"batch_size": 1.5},
    "drop_last as an int": {"drop_last": 1},
    "shuffling nothing": {"dataset": Items([]), "shuffle": True},
    "a stream and shuffle": {"dataset": STREAM, "shuffle": True},
    "a stream and an unhashable shuffle": {"dataset": STREAM, "shuffle": []},
    "a stream and a sampler": {"dataset": STREAM, "sampler": SAMPLER},
    "a stream and a batch_sampler": {"dataset": STREAM, "batch_sampler": BATCHES},
    "a data set without a length": {"dataset": object(), "shuffle": True},
    "an unknown keyword": {"workers": 3},
    "no data set": {"dataset": ...},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_torchs_own_errors(name: str) -> None:
    options = {"dataset": Rows(10), **WRONG[name]}
    if options["dataset"] is ...:
        del options["dataset"]
    mine, its = outcome(lambda: DataLoader(**options)), outcome(lambda: Stock(**options))
    assert mine == its


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's half-built iterator dies so
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1, "prefetch_factor": 0}, {"num_workers": 0, "timeout": 1}, {"num_workers": 2.0}],
    ids=str,
)
def test_what_torch_notices_only_when_it_iterates_is_the_same_error(options: dict[str, Any]) -> None:
    def iterate(kind: Any) -> None:
        list(kind(Rows(10), **options))

    assert outcome(lambda: iterate(DataLoader)) == outcome(lambda: iterate(Stock))
    gc.collect()  # or what the half-built iterators die of is another test's warning


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dataset": STREAM, "shuffle": False}, id="a stream, not shuffled"),
        pytest.param({"num_workers": True}, id="True"),
        pytest.param({"num_workers": 2.0}, id="2.0"),
    ],
)
def test_odd_arguments_that_torch_accepts_are_accepted(options: dict[str, Any]) -> None:
    options = {"dataset": Rows(10), **options}
    Stock(**options)
    DataLoader(**options)


def test_the_first_thirteen_arguments_are_positional_as_torchs() -> None:
    generator, context = torch.Generator(), multiprocessing.get_context("fork")
    values = [Rows(8), 2, None, SAMPLER, None, 1, as_is, False, True, 3, print, context, generator]
    mine, its = vars(DataLoader(*values)), vars(Stock(*values))
    for key, value in its.items():
        if not isinstance(value, BatchSampler):
            assert mine[key] is value or mine[key] == value, key
    assert (mine["batch_sampler"].sampler, mine["batch_sampler"].batch_size) == (SAMPLER, 2)
    with pytest.raises(TypeError):
        DataLoader(*values, 2)


def test_the_signature_is_torchs_and_then_ours() -> None:
    mine, its = (list(inspect.signature(kind.__init__).parameters) for kind in (DataLoader, Stock))
    assert mine[: len(its)] == its
    assert {*mine[len(its) :]} == EXTRAS | {"kwargs"}


def test_what_is_stored_in_public_is_torchs_and_the_extra_keywords_raw() -> None:
    extras = {"memory_limit": "64MiB", "slots": 3, "seeding": "batch", "max_workers": 2, "copy": True, "device": "cpu"}
    extras |= {"late_targets": True}
    pairs = PairedDataset(Rows(8), Rows(8))
    mine, its = (
        {key: value for key, value in vars(loader).items() if not key.startswith("_")}
        for loader in (DataLoader(pairs, **extras), Stock(pairs))
    )
    assert set(mine) - set(its) == EXTRAS == set(extras)
    assert set(its) <= set(mine)
    assert {key: mine[key] for key in extras} == extras
    assert set(inspect.signature(DataLoader.__init__).parameters) >= set(mine)


def test_a_new_loader_can_be_made_from_the_public_attributes() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1, slots=3, seeding="batch", copy=True, generator=torch.Generator())
    options = {key: value for key, value in vars(loader).items() if not key.startswith("_")}
    for key in ("batch_size", "sampler", "drop_last"):
        del options[key]  # they go with the batch_sampler
    again = DataLoader(**options)
    assert {key: getattr(again, key) for key in options} == options
    assert len(list(again)) == 4


@each_kind
def test_constructing_draws_nothing_starts_nothing_and_pickles_nothing(kind: Any) -> None:
    class Unpicklable(Rows):
        def __reduce__(self) -> Any:
            raise AssertionError("pickled")

    before, children = torch.get_rng_state(), multiprocessing.active_children()
    kind(Unpicklable(8), shuffle=True, num_workers=2, multiprocessing_context="spawn")
    assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == children


def test_the_users_functions_and_objects_are_kept_as_they_are() -> None:
    def collate(samples: Any) -> Any:
        return samples

    loader = DataLoader(Rows(8), collate_fn=collate, worker_init_fn=print, num_workers=1)
    assert loader.collate_fn is collate
    assert loader.worker_init_fn is print
    assert DataLoader(Rows(8)).collate_fn is torch.utils.data.default_collate
    assert DataLoader(Rows(8), batch_size=None).collate_fn is torch.utils.data.default_convert
    assert (DataLoader(Rows(8)).prefetch_factor, DataLoader(Rows(8), num_workers=1).prefetch_factor) == (None, 2)


# -- our options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory_limit": "2 bananas"}, ValueError, r"'2 bananas' is no size; it must be .*bytes.*512MiB.*25%"),
        ({"memory_limit": 512}, ValueError, r"512 bytes, less than the least pool of 1 MiB; did you mean '512MiB'"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit must be"),
        ({"slots": 0}, ValueError, "slots must be 1 or more"),
        ({"slots": 2.0}, TypeError, "slots must be an int"),
        ({"seeding": "random"}, ValueError, "seeding must be 'worker', 'batch' or None, got 'random'"),
        ({"max_workers": 0}, ValueError, "max_workers must be 1 or more"),
        ({"max_workers": "all"}, TypeError, "max_workers must be an int"),
        ({"copy": "yes"}, TypeError, "copy must be a bool"),
    ],
)
def test_an_option_out_of_range_is_refused_at_once(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DataLoader(Rows(8), **options)


def one_large(index: int) -> torch.Tensor:
    return torch.full((1 << 19 if index == 2 else 1,), float(index))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_over_the_limit_is_an_error_with_both_numbers_and_the_option_and_nothing_else_is_lost(
    workers: int,
) -> None:
    iterator = iter(DataLoader(Made(6, one_large), num_workers=workers, memory_limit="1MiB"))
    assert [float(next(iterator)[0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(BatchTooLargeError) as caught:
        next(iterator)
    text = str(caught.value)
    for part in ("batch 2", str(4 << 19), str(1 << 20), "raise memory_limit"):
        assert part in text
    assert [float(batch[0, 0]) for batch in iterator] == [3, 4, 5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_automatic_number_of_workers_is_an_int_and_recognised_again() -> None:
    loader = DataLoader(Rows(8), num_workers="auto", max_workers=3)
    assert isinstance(loader.num_workers, AutoWorkers)
    assert 1 <= loader.num_workers <= 3
    assert loader.prefetch_factor == 2
    assert len(list(loader)) == 8
    again = DataLoader(Rows(8), num_workers=loader.num_workers, max_workers=1)
    assert again.num_workers == 1
    assert isinstance(again.num_workers, AutoWorkers)
    assert isinstance(pickle.loads(pickle.dumps(loader)).num_workers, AutoWorkers)
    assert DataLoader(STREAM, num_workers="auto").num_workers == 1
    DataLoader(Rows(8), num_workers="auto", persistent_workers=True, prefetch_factor=4)


def test_the_limit_and_the_number_of_slots_hold() -> None:
    limited = DataLoader(Rows(400, 4096), batch_size=4, num_workers=2, memory_limit="1MiB")
    counted = DataLoader(Rows(400, 4096), batch_size=4, num_workers=2, slots=3)
    for _ in limited:
        assert limited.stats().pool_bytes <= 1 << 20
    for _ in counted:
        assert sum(counted.stats().slots.values()) <= 3


# -- attributes after init --------------------------------------------------------------------------------------


class Renamed(DataLoader[Any]):
    """A subclass with a name of its own."""


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_does_not_let_be_set_is_refused_in_its_words_with_our_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after Renamed is initialized"):
        setattr(Renamed(Rows(8)), name, None)


def test_the_ways_around_that_frameworks_use_work_and_take_effect() -> None:
    loader = DataLoader(Rows(8), num_workers=1)
    loader._DataLoader__initialized = False
    loader.batch_sampler = BatchSampler(SequentialSampler(range(8)), 4, False)
    loader._DataLoader__initialized = True
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    object.__setattr__(loader, "batch_sampler", [[7], [1]])
    assert [batch[1].tolist() for batch in loader] == [[7], [1]]


def test_what_may_be_set_takes_effect_at_the_next_iteration() -> None:
    loader = DataLoader(Made(8, worker_id), batch_size=2, num_workers=1)
    assert {int(worker) for batch in loader for worker in batch} == {0}
    loader.num_workers = 2
    loader.prefetch_factor = 1
    assert {int(worker) for batch in loader for worker in batch} == {0, 1}
    loader.collate_fn = as_is
    assert next(iter(loader)) == [0, 0]
    loader.num_workers, loader.prefetch_factor = 0, None
    assert list(loader) == [[-1, -1]] * 4


def test_our_options_may_be_set_too() -> None:
    loader = DataLoader(Made(8, draws), batch_size=2, num_workers=1)
    loader.copy, loader.seeding, loader.slots, loader.memory_limit = True, "batch", 2, "2MiB"
    torch.manual_seed(0)
    mine = [[column.tolist() for column in batch] for batch in loader]
    assert loader.stats().private_copies == 4
    torch.manual_seed(0)
    assert mine == [[column.tolist() for column in batch] for batch in DataLoader(Made(8, draws), 2, seeding="batch")]


def mark_worker(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.make = lambda index: (index, 100 + worker)  # type: ignore[attr-defined]


def test_a_worker_init_fn_set_later_runs() -> None:
    loader = DataLoader(Made(4, worker_id), num_workers=1, collate_fn=as_is)
    assert list(loader) == [[0]] * 4
    loader.worker_init_fn = mark_worker
    assert list(loader) == [[(index, 100)] for index in range(4)]


def test_the_context_may_be_set_and_is_checked_as_torch_checks_it() -> None:
    loader = DataLoader(Rows(4), num_workers=1)
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context is torch.multiprocessing.get_context("fork")
    assert len(list(loader)) == 4
    with pytest.raises(ValueError, match="should specify a valid start method"):
        loader.multiprocessing_context = "teleport"


# -- types ------------------------------------------------------------------------------------------------------


def test_the_class_can_be_subscripted_and_subclassed_generically() -> None:
    class Typed(DataLoader[T], Generic[T]):
        pass

    loader = Typed[int](Rows(4), num_workers=1)
    assert DataLoader[int] is not None
    assert isinstance(loader, Stock)
    assert issubclass(DataLoader, Stock)
    assert len(list(loader)) == 4


def test_a_loader_is_compared_by_identity_can_be_hashed_and_weakly_held() -> None:
    first, second = DataLoader(Rows(4)), DataLoader(Rows(4))
    assert first in [second, first]
    assert first != second
    assert weakref.ref(first)() is first
    assert {first: 1}[first] == 1


class Equal(DataLoader[Any]):
    """A subclass that takes any two loaders for equal."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def test_loaders_that_claim_to_be_equal_do_not_share_what_is_theirs() -> None:
    one, two = Equal(Rows(8), 2, num_workers=1), Equal(Rows(16), 2, num_workers=1)
    assert [len(list(one)), len(list(two))] == [4, 8]
    assert [one.stats().batches, two.stats().batches] == [4, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_may_bypass_the_constructor(workers: int) -> None:
    class Wrapped(DataLoader[Any]):
        def __init__(self, other: Any) -> None:
            self.__dict__.update(vars(other))

    loader = Wrapped(Stock(Rows(8), 2, num_workers=workers))
    for _ in range(2):
        assert [batch[1].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.stats().batches == 4
    loader.close()


# -- lengths ----------------------------------------------------------------------------------------------------


class Unsized(IterableDataset[Any]):
    """A stream without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


LENGTHS: dict[str, Callable[[Any], Any]] = {
    "map-style": lambda kind: kind(Rows(10), 3),
    "last one dropped": lambda kind: kind(Rows(10), 3, drop_last=True),
    "no batches": lambda kind: kind(Rows(10), batch_size=None),
    "batch sampler": lambda kind: kind(Rows(10), batch_sampler=BATCHES),
    "empty": lambda kind: kind(Items([]), 3),
    "stream": lambda kind: kind(Shards([1], length=10), 3, num_workers=2),
    "stream, last one dropped": lambda kind: kind(Shards([1], length=10), 3, drop_last=True),
    "stream, no batches": lambda kind: kind(Shards([1], length=10), batch_size=None),
    "stream without length": lambda kind: kind(Unsized(), 3),
    "sampler without length": lambda kind: kind(Rows(10), 3, sampler=NoLength()),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("ask", [len, bool])
def test_lengths_are_torchs(name: str, ask: Callable[[Any], Any]) -> None:
    def answer(kind: Any) -> Any:
        try:
            return ask(LENGTHS[name](kind))
        except TypeError as error:
            return str(error)

    assert answer(DataLoader) == answer(Stock)


def test_an_iterator_has_the_length_of_its_sampler() -> None:
    assert len(iter(DataLoader(Rows(10), 3, num_workers=1))) == 4


# -- copies -----------------------------------------------------------------------------------------------------


def duplicates(loader: Any) -> dict[str, Any]:
    return {
        "pickle": pickle.loads(pickle.dumps(loader)),
        "deepcopy": copy.deepcopy(loader),
        "copy": copy.copy(loader),
    }


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("epochs", [0, 1])
def test_copies_work_and_their_end_harms_nobody(persistent: bool, epochs: int) -> None:
    options = {"slots": 8, "seeding": "batch", "memory_limit": "64MiB"}
    loader = DataLoader(Rows(8), 2, num_workers=1, persistent_workers=persistent, **options)
    for _ in range(epochs):
        list(loader)
    for name, other in duplicates(loader).items():
        assert other._iterator is None, name
        assert {key: getattr(other, key) for key in options} == options
        assert [batch[1].tolist() for batch in other] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        other.close()
        del other
        gc.collect()
    assert len(list(loader)) == 4
    loader.close()


def test_a_copy_in_the_middle_of_an_epoch_leaves_the_epoch_alone() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    for other in duplicates(loader).values():
        assert len(list(other)) == 4
        other.close()
    assert [batch[1].tolist() for batch in iterator] == [[2, 3], [4, 5], [6, 7]]
    loader.close()


# -- closing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_iterators_and_workers_but_not_batches_and_the_next_iteration_starts_afresh(
    persistent: bool,
) -> None:
    loader = DataLoader(Rows(80, 1024), 2, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    (x, y), workers = next(iterator), list(iterator._workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(RuntimeError, match=r"was shut down; call iter\(\) on the loader again"):
        next(iterator)
    loader.close()
    assert [batch[1].tolist() for batch in loader][:2] == [[0, 1], [2, 3]]
    assert x[:, 5].tolist() == y.tolist() == [0, 1]
    loader.close()


def test_leaving_the_block_closes_also_after_an_error() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1, persistent_workers=True)

    def train() -> None:
        with loader as entered:
            assert entered is loader
            for _ in loader:
                raise KeyError

    with pytest.raises(KeyError):
        train()
    assert loader._iterator is None


def test_closing_what_was_never_used_does_nothing() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1)
    loader.close()
    DataLoader(Rows(8)).close()
    assert len(list(loader)) == 4


def test_two_epochs_at_a_time_are_independent_and_right() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1)
    for (x, y), (u, v) in zip(loader, loader):
        assert x[:, 0].tolist() == y.tolist() == u[:, 0].tolist() == v.tolist()
    first, second = iter(loader), iter(loader)
    next(first)
    assert len(list(second)) == 4
    assert len(list(first)) == 3


# -- what is exported -------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_documented() -> None:
    for name in shmloader.__all__:
        assert getattr(shmloader, name).__doc__
    assert shmloader.DataLoader.__module__ == "shmloader.loader"


def test_a_loader_has_no_state_dict_since_its_mere_presence_changes_frameworks() -> None:
    assert not hasattr(DataLoader(Rows(4)), "state_dict")
    assert not hasattr(DataLoader(Rows(4)), "load_state_dict")


def test_data_sets_that_fetch_batches_get_their_indices_and_their_answer_is_passed_on_unchanged() -> None:
    answers = [0, "text", {"a": [1]}, torch.arange(3)]
    for answer in answers:
        loader = DataLoader(Batchwise(4, lambda indices: (indices, answer)), 2, num_workers=1, collate_fn=as_is)  # noqa: B023
        for batch, (indices, got) in enumerate(loader):
            assert indices == [2 * batch, 2 * batch + 1]
            assert type(got) is type(answer)


def test_a_shuffled_loader_uses_torchs_random_sampler() -> None:
    assert type(DataLoader(Rows(8), shuffle=True).sampler) is RandomSampler


def test_no_warning_without_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader(Made(8, worker_pid), 2, num_workers=1))
