"""A loader with workers inside a worker, which may have no children."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader, PlatformWarning
from tests.datasets import Rows
from tests.equal import assert_same


class Stream(IterableDataset[int]):
    """The numbers from 0 to 5."""

    def __iter__(self) -> Any:
        return iter(range(6))


class Nesting(Dataset[Any]):
    """Each item is what a loader of its own gives, twice over, and how many warnings that came with."""

    def __init__(self, inner: Any, loader: type[Any], **options: Any) -> None:
        self.inner, self.loader, self.options = inner, loader, options

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = self.loader(self.inner, 2, **self.options)
            found = list(loader), list(loader)
        return found, sum(issubclass(each.category, PlatformWarning) for each in caught), torch.rand(1)


@pytest.mark.parametrize("inner", [Rows(6), Stream()], ids=["map-style", "iterable"])
@pytest.mark.parametrize("persistent", [False, True])
def test_it_makes_its_batches_in_the_worker_and_warns_once(inner: Any, persistent: bool) -> None:
    options: dict[str, Any] = {"persistent_workers": True} if persistent else {}
    nesting = Nesting(inner, DataLoader, num_workers=2, timeout=5, **options)
    torch.manual_seed(1)
    ours = list(DataLoader(nesting, None, num_workers=1))
    torch.manual_seed(1)
    theirs = list(TorchLoader(Nesting(inner, TorchLoader), None, num_workers=1))
    assert [warned for _, warned, _ in ours] == [1, 0], "once per process"
    for (mine, _, drawn), (torchs, _, torchs_drawn) in zip(ours, theirs, strict=True):
        assert_same(mine, torchs)
        assert_same(drawn, torchs_drawn)


def test_torchs_loader_raises_there() -> None:
    with pytest.raises(AssertionError, match="daemonic processes are not allowed to have children"):
        list(TorchLoader(Nesting(Rows(6), TorchLoader, num_workers=1), None, num_workers=1))
