"""Pairs stay pairs, whoever shuffles, fetches and delivers them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from shmloader import DataLoader, PairedDataset
from tests.datasets import Items, Rows


class Inputs(Dataset[Any]):
    """Input *i* is a page of *i*'s, which draws on the way."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((1024,), float(index))


class Targets(Inputs):
    """Target *i* belongs to input *i*."""

    def __getitem__(self, index: int) -> Any:
        return {"label": index, "mask": np.full((64,), index, np.uint8)}


class AtOnce(Inputs):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_an_item_is_an_input_with_its_target() -> None:
    pairs = PairedDataset(Items("abc"), [1, 2, 3])
    assert len(pairs) == 3
    assert [pairs[index] for index in range(3)] == [("a", 1), ("b", 2), ("c", 3)]
    assert isinstance(pairs, StackDataset)
    assert pairs.inputs.items == "abc"
    assert pairs.targets == [1, 2, 3]


def test_unequal_lengths_are_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="inputs has 3 items, but targets has 4; pairs need equally many"):
        PairedDataset(Items("abc"), Items("abcd"))


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("inputs", "targets", "name"),
    [
        (Stream(), Items("a"), "inputs"),
        (Items("a"), Stream(), "targets"),
        ({1}, Items("a"), "inputs"),
        (1, 2, "inputs"),
    ],
)
def test_what_is_not_map_style_is_an_error_that_names_the_side(inputs: Any, targets: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a map-style data set with __getitem__ and __len__"):
        PairedDataset(inputs, targets)


def test_empty_pairs_are_pairs() -> None:
    assert len(PairedDataset(Items(""), Items(""))) == 0


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Inputs, AtOnce])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_no_shuffling_and_no_number_of_workers_parts_them(workers: int, kind: type[Inputs], seeding: str) -> None:
    pairs = PairedDataset(kind(50), Targets(50))
    loader = DataLoader(pairs, batch_size=4, shuffle=True, num_workers=workers, seeding=seeding)
    seen: list[int] = []
    for x, y in loader:
        assert x[:, 0].tolist() == x[:, -1].tolist() == y["label"].tolist() == y["mask"][:, 5].tolist()
        seen += y["label"].tolist()
    assert sorted(seen) == list(range(50))
    assert seen != list(range(50))


def test_both_halves_of_a_batch_lie_in_one_slot() -> None:
    loader = DataLoader(PairedDataset(Inputs(8), Targets(8)), batch_size=4, num_workers=1)
    x, y = next(iter(loader))
    ends = [x.data_ptr(), y["label"].data_ptr(), y["mask"].data_ptr()]
    assert loader.stats().slots["LEASED"] == 1
    assert max(ends) - min(ends) < max(loader.stats().slot_bytes.values())


def test_pairs_can_be_pickled_and_taken_apart() -> None:
    pairs = PairedDataset(Rows(5), Rows(5))
    again = pickle.loads(pickle.dumps(pairs))
    assert type(again) is PairedDataset
    assert len(again.inputs) == 5
    assert Subset(pairs, [3])[0][1][1] == 3


def test_pairs_come_in_the_same_order_as_torchs_stack_of_the_two() -> None:
    x, y = TensorDataset(torch.arange(20)), TensorDataset(torch.arange(20) * 10)

    def batches(dataset: Any, kind: Any) -> list[Any]:
        torch.manual_seed(0)
        return [[half[0].tolist() for half in batch] for batch in kind(dataset, 3, shuffle=True, num_workers=2)]

    assert batches(PairedDataset(x, y), DataLoader) == batches(StackDataset(x, y), torch.utils.data.DataLoader)
