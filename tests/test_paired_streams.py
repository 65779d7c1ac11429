"""Pairs of streams: zipped in each worker, ended together or by an error, repeated on request."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ChainDataset, IterableDataset, StackDataset, get_worker_info

from shmloader import DataLoader, PairedDataset
from shmloader.paired import PairedStream
from tests.datasets import Items, Shards


class Strided(IterableDataset[Any]):
    """Counts to ``count`` times ``scale``; of several workers each counts every so-many-th."""

    def __init__(self, count: int, scale: int = 1) -> None:
        self.count, self.scale = count, scale

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first * self.scale, self.count * self.scale, step * self.scale))


class Once(IterableDataset[Any]):
    """Gives its items once, however often it is iterated; ``log`` says what was asked for."""

    def __init__(self, items: Any) -> None:
        self.log: list[Any] = []
        self.items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            self.log.append(item)
            yield item


def test_streams_are_zipped_into_a_stream() -> None:
    pairs = PairedDataset(Strided(3), Strided(3, 10))
    assert isinstance(pairs, IterableDataset)
    assert isinstance(pairs, PairedDataset)
    assert not isinstance(pairs, StackDataset)
    assert list(pairs) == list(pairs) == [(0, 0), (1, 10), (2, 20)]
    assert len(pairs) == 3
    assert list(PairedDataset(a=Strided(2), b=Strided(2), c=Strided(2, 5))) == [
        {"a": 0, "b": 0, "c": 0},
        {"a": 1, "b": 1, "c": 5},
    ]


def test_streams_of_pairs_chain_with_a_plus() -> None:
    pairs: Any = PairedDataset(Strided(1), Strided(1))
    assert isinstance(pairs + pairs, ChainDataset)
    assert list(pairs + pairs) == [(0, 0)] * 2


def test_a_stream_without_length_has_none_and_lengths_that_differ_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(PairedDataset(Shards("ab"), Strided(2)))
    for refused in (len, list):  # list() asks for the length first
        with pytest.raises(ValueError, match="inputs has 3 items, but targets has 2; pairs need equally many"):
            refused(PairedDataset(Strided(3), Strided(2)))
    assert len(PairedDataset(Strided(3), Shards("a"), cycle="targets")) == 3


@pytest.mark.parametrize("dataset", [PairedDataset(Shards("ab"), Shards("cd")), ChainDataset([Shards("ab")])])
def test_an_automatic_number_of_workers_does_without_a_length(dataset: Any) -> None:
    assert len(list(DataLoader(dataset, num_workers="auto"))) == 2


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_streams_that_shard_alike_are_pairs_under_any_number_of_workers(workers: int) -> None:
    seen: list[int] = []
    with DataLoader(PairedDataset(Strided(20), Strided(20, 7)), 3, num_workers=workers) as loader:
        for batches in (itertools.islice(loader, 2), loader):
            seen = []
            for x, y in batches:
                assert torch.equal(x * 7, y)
                seen += x.tolist()
    assert sorted(seen) == list(range(20))


def test_batches_are_torchs() -> None:
    def batches(kind: Any) -> Any:
        pairs = PairedDataset(a=Strided(20), b=Strided(5), cycle="b")
        return [(batch["a"].tolist(), batch["b"].tolist()) for batch in kind(pairs, 3, num_workers=2)]

    assert batches(DataLoader) == batches(torch.utils.data.DataLoader)


@pytest.mark.slow
def test_spawned_workers_zip() -> None:
    pairs = PairedDataset(a=Strided(12), b=Strided(4, 3), cycle="b", joint_transform=swapped)
    for batch in DataLoader(pairs, 4, num_workers=1, multiprocessing_context="spawn"):
        assert torch.equal(batch["a"], batch["b"] % 4 * 3)


def swapped(item: dict[str, Any]) -> dict[str, Any]:
    return {"b": item["a"], "a": item["b"]}


# -- unequal ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ((5, 3), r"^targets ended after 3 pairs, but inputs goes on; .*\(cycle='targets' would repeat the shorter"),
        ((0, 3), r"^inputs ended after 0 pairs, but targets goes on; .*\(cycle='inputs' would repeat the shorter"),
    ],
)
def test_a_side_that_ends_first_is_an_error_that_names_it(lengths: tuple[int, int], error: str) -> None:
    pairs = PairedDataset(*map(Strided, lengths))
    stream, shorter = iter(pairs), min(lengths)
    assert list(itertools.islice(stream, shorter)) == [(i, i) for i in range(shorter)]
    with pytest.raises(ValueError, match=error):
        next(stream)
    assert list(stream) == []


def test_all_sides_that_ended_are_named() -> None:
    with pytest.raises(ValueError, match="a and c ended after 1 pairs, but b goes on"):
        list(iter(PairedDataset(a=Strided(1), b=Strided(2), c=Strided(1))))


def test_shards_that_end_unequally_are_an_error_that_names_the_worker() -> None:
    pairs = PairedDataset(Shards("ab", "cde"), Shards("ab", "cd"))
    with pytest.raises(
        ValueError, match="in worker 1 of 2, targets ended after 2 pairs, but inputs goes on; pairs nee"
    ):
        list(DataLoader(pairs, 1, num_workers=2))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_side_that_does_not_shard_beside_one_that_does_is_an_error_with_several_workers(workers: int) -> None:
    pairs = PairedDataset(Strided(4), ChainDataset([Same(4)]))
    loader = DataLoader(pairs, 1, num_workers=workers)
    if workers == 1:
        assert len(list(loader)) == 4
    else:
        with pytest.raises(ValueError, match="in worker 0 of 2, inputs ended after 2 pairs, but targets goes on"):
            list(loader)


class Same(Strided):
    """Gives every worker all of it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


# -- repeating -------------------------------------------------------------------------------------------------


@given(count=st.integers(0, 12), short=st.integers(1, 14))
def test_a_side_that_repeats_gives_as_many_as_the_other_has(count: int, short: int) -> None:
    assert list(PairedDataset(Strided(count), Strided(short), cycle="targets")) == [
        (i, i % short) for i in range(count)
    ]
    assert list(PairedDataset(a=Strided(short), b=Strided(count), c=Strided(short), cycle=("c", "a"))) == [
        {"a": i % short, "b": i, "c": i % short} for i in range(count)
    ]


def test_a_side_that_repeats_may_be_endless_and_is_not_asked_for_an_item_too_many() -> None:
    endless = Once(itertools.count())
    assert list(PairedDataset(inputs=endless, targets=Strided(3), cycle="inputs")) == [
        {"inputs": i, "targets": i} for i in range(3)
    ]
    assert endless.log == [0, 1, 2]


def test_unequal_ends_of_the_others_are_an_error_beside_a_side_that_repeats() -> None:
    with pytest.raises(ValueError, match="c ended after 2 pairs, but a goes on"):
        list(iter(PairedDataset(a=Strided(3), b=Strided(1), c=Strided(2), cycle="b")))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_repeats_its_own_shard(workers: int) -> None:
    pairs = PairedDataset(Strided(24), Strided(6), cycle="targets")
    seen = []
    for x, y in DataLoader(pairs, 2, num_workers=workers):
        assert torch.equal(x % 6, y)  # 6 is a multiple of every number of workers here
        seen += x.tolist()
    assert sorted(seen) == list(range(24))


def test_a_side_with_nothing_to_repeat_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match=r"targets is to repeat, but iterating over it \(Strided\) gave nothing"):
        list(PairedDataset(Strided(1), Strided(0), cycle="targets"))
    assert list(PairedDataset(Strided(0), Strided(0), cycle="targets")) == []
    stream = iter(PairedDataset(Strided(3), Once("ab"), cycle="targets"))
    assert [next(stream), next(stream)] == [(0, "a"), (1, "b")]
    with pytest.raises(ValueError, match=r"targets is to repeat, but iterating over it \(Once\) gave nothing"):
        next(stream)


def test_an_empty_shard_that_is_to_repeat_is_an_error_that_names_the_worker() -> None:
    pairs = PairedDataset(Shards("ab", "cd"), Shards("a"), cycle="targets")
    with pytest.raises(ValueError, match="in worker 1 of 2, targets is to repeat, but iterating over it"):
        list(DataLoader(pairs, 1, num_workers=2))
    no_need = PairedDataset(Shards("ab"), Shards("a"), cycle="targets")
    assert len(list(DataLoader(no_need, 1, num_workers=2))) == 2


# -- the rest --------------------------------------------------------------------------------------------------


def test_a_joint_transform_sees_both_items() -> None:
    assert list(PairedDataset(Strided(2), Strided(2), joint_transform=lambda x, y: (x + y, x - y))) == [(0, 0), (2, 0)]
    with pytest.raises(TypeError, match="joint_transform must return a tuple"):
        list(PairedDataset(Strided(2), Strided(2), joint_transform=lambda x, y: x))  # type: ignore[arg-type]


def test_copies_are_streams_of_pairs() -> None:
    pairs = PairedDataset(a=Strided(4), b=Strided(2), cycle="b")
    for again in (copy.copy(pairs), copy.deepcopy(pairs), pickle.loads(pickle.dumps(pairs))):
        assert type(again) is PairedStream
        assert list(again) == list(pairs)


def test_the_class_of_streams_takes_streams_only() -> None:
    with pytest.raises(TypeError, match="inputs must be an IterableDataset, got Items, here: a stream has no item at"):
        PairedStream(Items("a"), Items("a"))
