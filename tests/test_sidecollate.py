"""A collate function per side: what it makes, which loader uses it, what hides it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
    random_split,
)

import shmloader
from shmloader import DataLoader, PairedDataset
from shmloader.sidecollate import SideCollate
from tests.datasets import Items, Rows, as_is
from tests.equal import assert_same


class Ragged(Dataset[Any]):
    """Item *i* has *i* + 1 elements."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((index + 1,), index)


class Stream(IterableDataset[Any]):
    """The items of a data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[i] for i in range(len(self.dataset)))


def padded(halves: list[Any]) -> Any:
    return pad_sequence(halves, batch_first=True, padding_value=-1)


def sized(halves: list[Any]) -> Any:
    return len(halves), torch.stack(halves)


def ragged(collate: Any = (padded, None), count: int = 8) -> Any:
    return PairedDataset(Ragged(count), range(count), collate=collate)


def check(batch: Any) -> list[int]:
    """The labels of a batch of ragged pairs, after a look at the padding."""
    x, y = batch
    assert type(batch) is list
    for row, label in zip(x, y):
        assert row.tolist() == [label] * (label + 1) + [-1] * (x.shape[1] - label - 1)
    return list(y.tolist())


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_side_is_collated_by_its_own_function(workers: int) -> None:
    for collate in ((padded, None), {"inputs": padded}, [padded, default_collate]):
        with DataLoader(ragged(collate), 3, shuffle=True, num_workers=workers) as loader:
            seen = [label for batch in loader for label in check(batch)]
        assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [{"y": sized, "x": padded}, (padded, sized, None), {"x": padded, "y": sized}])
def test_sides_with_names_are_collated_by_name_or_in_order(workers: int, collate: Any) -> None:
    pairs = PairedDataset(x=Ragged(4), y=Items([torch.tensor(i) for i in range(4)]), z=range(4), collate=collate)
    for batch in DataLoader(pairs, 2, num_workers=workers):
        assert list(batch) == ["x", "y", "z"]
        count, y = batch["y"]
        assert count == 2
        assert torch.equal(y, batch["z"])
        check([batch["x"], y])


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_are_collated_alike(workers: int) -> None:
    pairs = PairedDataset(Stream(Ragged(4)), Stream(range(4)), collate=(padded, None))
    seen = [label for batch in DataLoader(pairs, 2, num_workers=workers) for label in check(batch)]
    assert sorted(seen) == sorted([*range(4)] * max(1, workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_loader_takes_it_when_it_is_handed_over(workers: int) -> None:
    pairs = ragged()
    for torchs, ours in zip(
        torch.utils.data.DataLoader(pairs, 3, collate_fn=pairs.collate_fn, num_workers=workers),
        DataLoader(pairs, 3, num_workers=workers),
    ):
        assert_same(torchs, ours)


@pytest.mark.parametrize("by_name", [False, True])
def test_none_for_every_side_makes_what_the_default_makes(by_name: bool) -> None:
    args, names = ((), {"a": Rows(4), "b": Rows(4)}) if by_name else ((Rows(4), Rows(4)), {})
    pairs: Any = PairedDataset(*args, **names, collate=(None, None))  # type: ignore[call-overload]
    assert_same(pairs.collate_fn([pairs[0], pairs[3]]), default_collate([pairs[0], pairs[3]]))


def test_the_parts_lie_in_one_slot() -> None:
    pairs = PairedDataset(Rows(8, 1024), Rows(8, 1024), collate=(None, as_first))
    with DataLoader(pairs, 4, num_workers=1) as loader:
        x, y = next(iter(loader))
        assert loader.stats().slots["LEASED"] == 1
        assert abs(x[0].data_ptr() - y.data_ptr()) < max(loader.stats().slot_bytes.values())


def as_first(halves: list[Any]) -> Any:
    return torch.stack([row for row, _ in halves])


def test_without_collate_the_loader_has_torchs_own_function() -> None:
    pairs = ragged(None)
    assert pairs.collate_fn is None
    assert DataLoader(pairs).collate_fn is default_collate
    assert DataLoader(pairs, batch_size=None).collate_fn is torch.utils.data._utils.collate.default_convert


def test_a_function_that_the_loader_is_given_wins() -> None:
    pairs = ragged()
    assert DataLoader(pairs).collate_fn is pairs.collate_fn
    assert DataLoader(pairs, collate_fn=as_is).collate_fn is as_is
    assert DataLoader(pairs, None, collate_fn=as_is).collate_fn is as_is


def test_a_loader_made_again_from_its_attributes_has_it_too() -> None:
    loader = DataLoader(ragged(), 4)
    again = DataLoader(loader.dataset, 4, collate_fn=loader.collate_fn)
    for batch in again:
        check(batch)
    with shmloader.patched_torch():
        assert torch.utils.data.DataLoader(ragged(), 4).collate_fn == loader.collate_fn


def test_it_can_be_copied_compared_and_pickled() -> None:
    collate = ragged().collate_fn
    for again in (copy.deepcopy(collate), pickle.loads(pickle.dumps(collate))):
        assert again == collate
        assert hash(again) == hash(collate)
    assert ragged((padded, as_is)).collate_fn != collate


# -- wrapped ---------------------------------------------------------------------------------------------------


class Wrapper(Dataset[Any]):
    """A user's own."""

    def __init__(self, pairs: Any, **attributes: Any) -> None:
        self.pairs = pairs
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(ragged(), [1, 2]),
        random_split(ragged(), [0.5, 0.5])[0],
        ConcatDataset([ragged(), Subset(Subset(ragged(count=30), range(9)), [3])]),
        Wrapper(None, collate_fn=ragged().collate_fn),
        Subset(Wrapper(None, collate_fn=ragged().collate_fn), [0]),
    ],
)
def test_torchs_wrappers_and_those_that_say_so_hand_it_on(dataset: Any) -> None:
    assert DataLoader(dataset, 2).collate_fn == ragged().collate_fn


def test_chained_streams_hand_it_on() -> None:
    def pairs() -> Any:
        return PairedDataset(Stream(Ragged(4)), Stream(range(4)), collate=(padded, None))

    assert [label for batch in DataLoader(pairs() + pairs(), 4) for label in check(batch)] == [*range(4)] * 2


def test_pairs_as_a_side_of_pairs_are_collated_as_they_ask() -> None:
    triple: Any = PairedDataset(ragged(), Rows(8))
    for (x, y), (_, index) in DataLoader(triple, 4, num_workers=1):
        assert check([x, y]) == index.tolist()
    instead: Any = PairedDataset(ragged(), Rows(8), collate=(as_is, None))
    assert instead.collate_fn.functions == (as_is, default_collate)


@pytest.mark.parametrize(
    ("dataset", "error"),
    [
        (Wrapper(ragged()), "Wrapper wraps pairs with a collate= that the loader would not use; give it an attribute"),
        (Wrapper([0, ragged()]), "Wrapper wraps pairs"),
        (Wrapper(Subset(ragged(), [0])), "Wrapper wraps pairs"),
        (StackDataset(ragged(), ragged()), "StackDataset wraps pairs"),
        (StackDataset(a=Rows(8), b=ragged()), "StackDataset wraps pairs"),
        (
            ConcatDataset([ragged(), ragged(None)]),
            "the parts of this ConcatDataset differ in their collate=; pass a co",
        ),
        (ConcatDataset([Rows(3), ragged()]), "the parts of this ConcatDataset differ"),
        (ConcatDataset([ragged()] * 20 + [ragged((as_is, None))]), "the parts of this ConcatDataset differ"),
    ],
)
def test_what_would_hide_it_is_an_error_unless_the_loader_is_given_a_function(dataset: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        DataLoader(dataset, 2)
    assert DataLoader(dataset, 2, collate_fn=as_is).collate_fn is as_is


def test_data_sets_that_refer_to_each_other_are_looked_at_once() -> None:
    one, other = Wrapper(None), Wrapper(None)
    one.pairs, other.pairs = [other, one, range(3)], one
    assert DataLoader(one).collate_fn is default_collate
    assert DataLoader(Subset(other, [0])).collate_fn is default_collate


def test_nothing_to_collate_is_an_error() -> None:
    with pytest.raises(ValueError, match="the pairs have a collate= for batches, but batch_size=None makes none"):
        DataLoader(ragged(), batch_size=None)
    assert DataLoader(ragged(), batch_sampler=[[0, 1]]).collate_fn == ragged().collate_fn


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collate", "kind", "error"),
    [
        (
            padded,
            TypeError,
            "collate must be a tuple or a dict .* each of inputs, targets, got function; a function of",
        ),
        ("ab", TypeError, "collate must be a tuple or a dict .* got str"),
        ((padded,), ValueError, r"collate has 1 functions for 2 sides \(inputs, targets\)"),
        ((padded, 3), TypeError, "collate has no function for targets, but int"),
        ({"inputs": "pad"}, TypeError, "collate has no function for inputs, but str"),
        ({"labels": padded}, ValueError, "collate names 'labels', but the sides are inputs, targets"),
    ],
)
def test_wrong_functions_are_errors(collate: Any, kind: Any, error: str) -> None:
    with pytest.raises(kind, match=error):
        ragged(collate)


@pytest.mark.parametrize(
    ("by_name", "samples", "kind", "error"),
    [
        (False, (1, 2), TypeError, "collate= takes lists of samples, as a loader with batching gives them, got tuple"),
        (False, [(1, 2), torch.zeros(2)], TypeError, "collate= takes a tuple of x, y as a sample, got Tensor"),
        (False, [(1, 2), (1, 2, 3)], ValueError, "collate= takes a tuple of x, y as a sample, got one of 3 parts"),
        (True, [(1, 2)], TypeError, "collate= takes a dict of x, y as a sample, got tuple"),
        (True, [{"x": 1}], ValueError, "collate= takes a dict of x, y as a sample, got one of 1 parts"),
        (True, [{"x": 1, "z": 1}], ValueError, "collate= takes a dict of x, y as a sample, got one of x, z"),
    ],
)
def test_samples_that_are_no_such_pairs_are_errors(by_name: bool, samples: Any, kind: Any, error: str) -> None:
    with pytest.raises(kind, match=error):
        SideCollate(("x", "y"), (as_is, as_is), by_name)(samples)
