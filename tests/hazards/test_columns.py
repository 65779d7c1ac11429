"""Columns that are not what their first sample looks like, and which of torch's loaders says what a batch is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader import UnpicklableBatchError
from tests.datasets import Items, first
from tests.equal import assert_same
from tests.loaders import loader

# -- 8: columns that are not what their first sample looks like -----------------------------------------------------


class Labelled(torch.Tensor):
    """A subclass without anything of its own."""


COLUMNS: dict[str, list[Any]] = {
    "int then float": [(1,), (2.5,)],
    "float then int": [(2.5,), (1,)],
    "bool then int": [(True,), (3,)],
    "int then bool": [(3,), (True,)],
    "int then huge int": [(1,), (2**40,)],
    "int then numpy int": [(1,), (np.int32(3),)],
    "numpy ints of two kinds": [(np.int64(1),), (np.int32(3),)],
    "numpy then tensor": [(np.ones(3, np.float32),), (torch.ones(3),)],
    "arrays of two kinds": [(np.ones(3, np.float64),), (np.ones(3, np.float32),)],
    "tensors of one kind": [(torch.ones(3),), (torch.zeros(3),)],
    "subclass first": [(torch.ones(3).as_subclass(Labelled),), (torch.zeros(3),)],
    "subclass second": [(torch.ones(3),), (torch.zeros(3).as_subclass(Labelled),)],
    "zero-dimensional": [(torch.tensor(1.0),), (torch.tensor(2.0),)],
    "strings and bytes": [("a", b"b"), ("c", b"d")],
    "tuples of lists": [([1, 2.5], {"a": 1}), ([3, 4.0], {"a": 2})],
    "non-contiguous": [(torch.arange(6).reshape(2, 3).t(),), (torch.arange(6).reshape(2, 3).t(),)],
    "expanded": [(torch.ones(1).expand(4),), (torch.zeros(1).expand(4),)],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_collated_as_torch_collates_it(name: str) -> None:
    items = COLUMNS[name]
    (theirs,) = TorchLoader(Items(items), 2, num_workers=1)
    for batch in loader(Items(items * 3), batch_size=2):  # the later batches come from the slot, through a number
        assert_same(batch, theirs)


class Temperature:
    """A type that default_collate knows nothing of."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def collate_temperatures(batch: list[Temperature], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor([one.degrees for one in batch])


def collate_ints_loudly(batch: list[int], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor(batch) * 1000


def test_types_that_are_registered_later_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    source = loader(Items([(Temperature(1.5), 1), (Temperature(2.5), 2)] * 2), batch_size=2)
    monkeypatch.setitem(default_collate_fn_map, Temperature, collate_temperatures)
    monkeypatch.setitem(default_collate_fn_map, int, collate_ints_loudly)
    for temperatures, numbers in source:
        assert temperatures.tolist() == [1.5, 2.5]
        assert numbers.tolist() == [1000, 2000]


# -- 26: which torch is the reference -------------------------------------------------------------------------------


#: Items, and the number of workers of the torch loader that gets them right.
REFERENCES: dict[str, tuple[list[Any], int]] = {
    "float32 then float64": ([torch.ones(2), torch.ones(2, dtype=torch.float64)], 1),
    "int64 then float32": ([torch.ones(2, dtype=torch.int64), torch.full((2,), 2.5)], 0),
    "negated views": ([torch.tensor([1j, 2j]).conj().imag, torch.tensor([1j, 2j]).conj().imag], 0),
    "conjugated views": ([torch.tensor([1j, 2 + 1j]).conj(), torch.tensor([1j, 2 + 1j]).conj()], 0),
    "a parameter": ([torch.nn.Parameter(torch.ones(3))] * 2, 0),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_batch_is_what_torch_makes_with_as_many_workers_or_else_with_none(name: str) -> None:
    items, workers = REFERENCES[name]
    options = {"collate_fn": first} if name == "a parameter" else {}
    theirs = next(iter(TorchLoader(Items(items), 2, num_workers=workers, **options)))
    for ours in loader(Items(items * 2), batch_size=2, **options):
        assert_same(ours, theirs)


def test_a_graph_that_cannot_leave_its_worker_is_refused_with_the_remedy() -> None:
    """Leaves that require grad: stacked they are none any more. torch's loader fails or hangs here."""
    leaves = [torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    with pytest.raises(UnpicklableBatchError, match=r"call detach\(\) on the tensor"):
        next(iter(loader(Items(leaves), batch_size=2)))
