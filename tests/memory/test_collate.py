"""Collating inside the slot: torch's own result, in memory that nobody else may touch."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader import DataLoader
from shmloader.memory.budget import PAGE_BYTES
from shmloader.memory.codec import ALIGN_BYTES
from shmloader.memory.collate import MOST_ROOMS, Arena, allocating_in
from shmloader.memory.columns import MOST_BLOCKS, Stacked
from shmloader.memory.rebuild import decode
from shmloader.memory.segment import Segment
from tests.datasets import Items, Made, Rows
from tests.equal import assert_same
from tests.nests import DTYPES, Point, Sample, random_array, random_tensor, tagged


@contextmanager
def as_in_a_worker() -> Iterator[None]:
    """torch's collate allocates its output with ``_new_shared`` only where it takes itself to be in a worker."""
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    try:
        yield
    finally:
        torch_worker._worker_info = before


def arena_of(nbytes: int = 16 * PAGE_BYTES, offset: int = PAGE_BYTES) -> Arena:
    segment = Segment(64 * PAGE_BYTES, lambda: 1 << 40)
    segment.reserve(0, 64 * PAGE_BYTES)
    arena = Arena(segment)
    arena.open(offset, nbytes)
    return arena


def lies_in(arena: Arena, tensor: torch.Tensor) -> bool:
    return 0 <= tensor.data_ptr() - arena.address < arena.capacity


def collate_in(arena: Arena, samples: Any, collate_fn: Callable[[Any], Any] = default_collate) -> Any:
    with as_in_a_worker(), allocating_in(arena):
        return built(arena.collating(collate_fn)(samples))


def built(made: Any) -> Any:
    """The batch that was stacked, or that was made at once."""
    if not isinstance(made, Stacked):
        return made
    (region,) = made.regions
    memory = (ctypes.c_char * region.nbytes).from_address(region.address)
    memory.owner = region.owner
    return decode(made.layout([0]), memory, 0, made.values)


ROWS = [(torch.full((8,), float(n)), n) for n in range(4)]


def by_torch(samples: Any) -> Any:
    """A collate function that is not ``default_collate`` itself, but built on it."""
    return default_collate(samples)


# -- in the range -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collate_fn", [default_collate, by_torch])
def test_what_torch_collates_lies_in_the_range_aligned_and_one_behind_the_other(
    collate_fn: Callable[[Any], Any],
) -> None:
    arena = arena_of()
    x, _ = collate_in(arena, ROWS, collate_fn)
    z = collate_in(arena, [torch.ones(3), torch.ones(3)], collate_fn)
    assert_same(x, torch.stack([row for row, _ in ROWS]))
    assert lies_in(arena, x)
    assert lies_in(arena, z)
    assert x.data_ptr() % ALIGN_BYTES == z.data_ptr() % ALIGN_BYTES == 0
    assert x.data_ptr() + x.nbytes <= z.data_ptr()


@pytest.mark.parametrize("collate_fn", [default_collate, by_torch])
def test_what_does_not_fit_any_more_is_private_and_right(collate_fn: Callable[[Any], Any]) -> None:
    arena = arena_of(PAGE_BYTES)
    samples = [(torch.full((100,), float(n)),) * 3 for n in range(4)]
    fields = collate_in(arena, samples, collate_fn)
    # Stacked directly, the batch lies in one place or the other.
    assert [lies_in(arena, field) for field in fields] == [collate_fn is by_torch] * 2 + [False]
    assert_same(fields, [torch.stack([sample[0] for sample in samples])] * 3 and [*map(torch.clone, fields)])


@pytest.mark.parametrize("collate_fn", [default_collate, by_torch])
def test_without_a_range_everything_is_private(collate_fn: Callable[[Any], Any]) -> None:
    arena = arena_of(0, 0)
    x, y = collate_in(arena, ROWS, collate_fn)
    assert_same([x, y], [torch.stack([row for row, _ in ROWS]), torch.arange(4)])
    assert arena.close() is False


@pytest.mark.parametrize("collate_fn", [default_collate, by_torch])
def test_empty_fields_need_no_range(collate_fn: Callable[[Any], Any]) -> None:
    arena = arena_of()
    assert_same(collate_in(arena, [torch.empty(0, 3)] * 2, collate_fn), torch.empty(2, 0, 3))
    assert arena.used == 0


def test_only_the_final_collate_function_allocates_in_the_range() -> None:
    arena = arena_of()
    with as_in_a_worker(), allocating_in(arena):
        in_the_data_set = default_collate(ROWS)
        final = arena.collating(by_torch)(ROWS)
        afterwards = default_collate(ROWS)
    assert [lies_in(arena, batch[0]) for batch in (in_the_data_set, final, afterwards)] == [False, True, False]


def test_an_error_in_the_collate_function_ends_the_time_of_the_range() -> None:
    arena = arena_of()
    with pytest.raises(RuntimeError, match="equal size"):
        collate_in(arena, [torch.ones(1), torch.ones(2)])
    with as_in_a_worker(), allocating_in(arena):
        assert not lies_in(arena, default_collate(ROWS)[0])


def test_what_torch_allocates_elsewhere_is_none_of_our_business(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def original(size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        asked.append((size, device))
        return torch.UntypedStorage(size)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", staticmethod(original))
    with allocating_in(arena_of()):
        torch.UntypedStorage._new_shared(8, device="meta")
        torch.UntypedStorage._new_shared(8)
    assert asked == [(8, "meta")]
    assert torch.UntypedStorage._new_shared is original


# -- what is kept -----------------------------------------------------------------------------------------------


def test_a_batch_that_was_dropped_is_not_kept() -> None:
    arena = arena_of()
    for _ in range(3):
        arena.open(PAGE_BYTES, PAGE_BYTES)
        batch = collate_in(arena, ROWS, by_torch)
        del batch
        assert arena.close() is False
    assert arena.direct
    assert not arena.returned


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x[0], lambda x: x.numpy(), lambda x: x.untyped_storage()])
def test_whatever_part_is_kept_it_is_noticed_and_so_is_its_end(keep: Callable[[torch.Tensor], Any]) -> None:
    arena = arena_of()
    kept = keep(collate_in(arena, ROWS, by_torch)[0])
    assert arena.close() is True
    arena.open(2 * PAGE_BYTES, PAGE_BYTES)
    assert not lies_in(arena, collate_in(arena, ROWS, by_torch)[0]), "from now on collated outside"
    assert arena.close() is False
    del kept
    assert [offset for offset, _ in arena.returned] == [PAGE_BYTES]


# -- the same as torch's ----------------------------------------------------------------------------------------


def outcome(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate_fn(samples)
    except Exception as error:
        return type(error), str(error)


def is_error(result: Any) -> bool:
    return type(result) is tuple and isinstance(result[0], type)


def torchs(samples: Any) -> Any:
    """What torch's collate makes of it in a worker, or, where that fails, without workers."""
    with as_in_a_worker(), allocating_in(arena_of(0, 0)):
        result = outcome(default_collate, samples)
    if is_error(result) and issubclass(result[0], (RuntimeError, TypeError)):  # it depends on torch's version
        result = outcome(default_collate, samples)
    return result


def ours(samples: Any) -> Any:
    arena = arena_of()
    with as_in_a_worker(), allocating_in(arena):
        return outcome(lambda its: built(arena.collating(default_collate)(its)), samples)


seeds = st.integers(0, 9)
shapes = st.sampled_from([(), (3,), (0,), (2, 2)])
#: Strategies for what one column's elements may be: mostly of one kind, as in real life.
kinds = st.one_of(
    st.tuples(st.sampled_from(DTYPES), shapes).map(lambda kind: st.builds(random_tensor, *map(st.just, kind), seeds)),
    st.tuples(st.sampled_from(["?", "u1", "i4", "i8", "f4", "f8", "c8", "U3", "M8[s]"]), shapes).map(
        lambda kind: st.builds(random_array, *map(st.just, kind), seeds)
    ),
    st.just(st.integers()),
    st.just(st.integers(-5, 5)),
    st.just(st.floats()),
    st.just(st.booleans()),
    st.just(st.text(max_size=3)),
    st.just(st.binary(max_size=3)),
    st.just(st.one_of(st.integers(-5, 5), st.floats(-1, 1), st.booleans())),
    st.just(st.floats(-1, 1).map(np.float32)),
    st.just(st.integers(0, 9).map(np.int16)),
    st.just(st.just(None)),
    st.just(st.builds(Sample, st.integers(0, 1))),
    st.just(st.sampled_from([torch.float32, torch.float64, torch.int64]).map(lambda dtype: torch.ones(2, dtype=dtype))),
    st.just(st.sampled_from([torch.ones(2), torch.ones(2, requires_grad=True)])),
    st.just(st.sampled_from([torch.ones(2), torch.ones(3)])),
    st.just(st.sampled_from([torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64)])),
    st.just(st.sampled_from([torch.ones(2, dtype=torch.complex64).conj().imag])),
    st.just(st.sampled_from([tagged(torch.ones(2)), torch.ones(2)])),
    st.just(st.sampled_from([torch.ones(2), torch.ones(2).to_sparse()])),
)


def structures(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inside, max_size=3)
    return st.one_of(
        several.map(lambda parts: st.tuples(*parts)),
        several.map(lambda parts: st.tuples(*parts).map(list)),
        several.map(lambda parts: st.fixed_dictionaries({str(n): part for n, part in enumerate(parts)})),
        several.map(lambda parts: st.fixed_dictionaries(dict(enumerate(parts))).map(collections.OrderedDict)),
        st.tuples(inside, inside).map(lambda parts: st.builds(Point, *parts)),
        several.map(lambda parts: st.lists(st.one_of(*parts), max_size=2) if parts else st.just([])),
    )


batches_of_samples = st.recursive(kinds, structures, max_leaves=5).flatmap(
    lambda sample: st.lists(sample, min_size=1, max_size=4)
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@settings(max_examples=300)
@given(batches_of_samples)
@example([(1,), (2.5,)])
@example([(1, "a"), [2, "b"]])
@example([2**63, 1])
@example([{"a": 1}, {"b": 1}])
@example([(1, 2), (1,)])
@example([[1, 2], 5])
def test_samples_are_stacked_exactly_as_torch_collates_them(samples: list[Any]) -> None:
    mine, theirs = ours(samples), torchs(samples)
    if is_error(theirs):
        assert mine == theirs
    else:
        assert_same(mine, theirs)


@pytest.mark.parametrize("places", [3, MOST_ROOMS + 5])
@pytest.mark.parametrize("shapes", [2, MOST_BLOCKS + 3])
def test_batches_of_any_shape_come_to_the_same_places_again_and_again(places: int, shapes: int) -> None:
    arena = arena_of()
    for turn in range(2 * max(places, shapes)):
        arena.open(turn % places * 1024, 1024)
        size = turn % shapes + 1
        samples = [(torch.full((size,), turn + n, dtype=torch.bfloat16), np.ones(size) * n, turn) for n in range(2)]
        assert_same(collate_in(arena, samples), default_collate(samples))


@pytest.mark.parametrize(
    "culprit", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, requires_grad=True)]
)
def test_samples_that_do_not_go_together_leave_no_trace_in_the_next_batch(culprit: torch.Tensor) -> None:
    arena, plain = arena_of(), [torch.zeros(2), torch.ones(2)]
    assert_same(collate_in(arena, plain), default_collate(plain))
    for samples in ([torch.ones(2), culprit], plain):
        arena.open(arena.offset, arena.capacity)
        with as_in_a_worker(), allocating_in(arena):
            made = outcome(lambda its: built(arena.collating(default_collate)(its)), samples)
        expected = torchs(samples)
        if is_error(expected):
            assert is_error(made)
        else:
            assert_same(made, expected)


def test_a_column_of_mixed_numbers_is_not_judged_by_its_first() -> None:
    assert_same(ours([(1,), (2.5,)]), torchs([(1,), (2.5,)]))
    assert ours([1, 2.5]).tolist() == [1.0, 2.5]
    assert ours([True, 2]).dtype is torchs([True, 2]).dtype


def collate_samples(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return "samples", len(batch)


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return "tensors", len(batch)


@pytest.mark.usefixtures("restored_map")
@pytest.mark.parametrize(("kind", "function"), [(Sample, collate_samples), (torch.Tensor, collate_tensors)])
def test_an_entry_that_is_put_into_torchs_map_later_counts(kind: type, function: Callable[..., Any]) -> None:
    samples = [(Sample(1) if kind is Sample else 1, torch.ones(2))] * 2
    default_collate_fn_map[kind] = function
    assert_same(ours(samples), torchs(samples))
    assert (function.__name__.removeprefix("collate_"), 2) in ours(samples)


# -- in real workers --------------------------------------------------------------------------------------------


class Caching(Rows):
    """Returns parts of batches that it has collated itself, once, and goes on reading them."""

    def __init__(self) -> None:
        super().__init__(400)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        key = index // 50
        if key not in self.cache:
            self.cache[key] = default_collate([torch.full((64,), 50 * key + n) for n in range(50)])
        return self.cache[key][index % 50]


def test_a_data_set_may_cache_what_it_collates() -> None:
    loader = DataLoader(Caching(), batch_size=10, num_workers=2)
    for batch, x in enumerate(loader):
        assert x[:, 0].tolist() == x[:, -1].tolist() == list(range(10 * batch, 10 * batch + 10))


class KeepsPrevious:
    """A collate function that returns its previous batch with each one."""

    def __init__(self) -> None:
        self.previous: Any = None

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        previous, self.previous = self.previous, batch
        return [batch, previous]


@pytest.mark.parametrize("slots", [None, 6])
def test_a_collate_function_may_keep_what_it_returned(slots: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    loader = DataLoader(Rows(80, 1024), batch_size=4, num_workers=1, collate_fn=KeepsPrevious(), slots=slots)
    for batch, (current, previous) in enumerate(loader):
        assert current[1].tolist() == current[0][:, 9].tolist() == list(range(4 * batch, 4 * batch + 4))
        if batch:
            assert previous[1].tolist() == previous[0][:, 9].tolist() == list(range(4 * batch - 4, 4 * batch))
    assert loader.stats().slots.get("KEPT", 0) == 0, "the workers are gone"


class KeepsAll:
    """A collate function that never lets go of a batch, and goes on reading all of them."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, samples: Any) -> Any:
        self.all.append(default_collate(samples))
        return [self.all[-1], [int(y.sum()) for _, y in self.all]]


def test_a_collate_function_may_keep_everything() -> None:
    loader = DataLoader(Rows(80, 1024), 4, num_workers=1, collate_fn=KeepsAll(), slots=3)
    sums = []
    for batch, ((x, y), sums_there) in enumerate(loader):
        assert x[:, 0].tolist() == y.tolist() == list(range(4 * batch, 4 * batch + 4))
        sums.append(int(y.sum()))
        assert sums_there == sums
        x.zero_()
        y.zero_()


def first_of_each_row(samples: Any) -> Any:
    """Many small views of what torch collated: aligned nowhere in particular, larger apart than together."""
    return [row[:1] for row in default_collate(samples)[0]]


def growing(index: int) -> torch.Tensor:
    return torch.arange(400.0 * (index + 1)).reshape(-1, 10)


@pytest.mark.parametrize("workers", [1, 2])
def test_small_views_of_what_was_collated_in_the_range_are_sent_while_batches_grow(workers: int) -> None:
    loader = DataLoader(Made(20, growing), batch_size=1, num_workers=workers, collate_fn=first_of_each_row)
    for batch, views in enumerate(loader):
        assert torch.equal(torch.cat(views), growing(batch)[:, 0])


def test_a_list_of_plain_samples_is_collated_where_the_training_loop_reads_it() -> None:
    loader = DataLoader(Items([{"x": torch.full((4096,), float(n)), "n": n} for n in range(64)]), 8, num_workers=1)
    for batch in loader:
        assert batch["n"].tolist() == batch["x"][:, 7].tolist()
    assert loader.stats().private_copies == 0
