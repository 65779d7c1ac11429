"""patch_torch: torch's names stand for ours, wherever they are bound, and are given back."""

from __future__ import annotations

import abc
import copy
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data
import torch.utils.data.dataloader as torch_dataloader
from torch.utils.data import IterableDataset, TensorDataset

import shmloader
from shmloader import patch_torch, patched_torch, patching, unpatch_torch
from shmloader.iterator import ShmIter
from shmloader.tuning.auto import AutoWorkers
from tests.equal import assert_same

#: Not as names of this module: those would be swapped, too.
torchs = types.SimpleNamespace(Loader=patching.TorchLoader, Iter=patching._MultiProcessingDataLoaderIter)
NUMBERS = TensorDataset(torch.arange(12))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Derived(torch.utils.data.DataLoader[Any]):
    """Of torch's loader, before anything is patched."""


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    unpatch_torch()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Somebody's module that is imported already."""
    made = types.ModuleType("somebodys")
    vars(made).update(
        DataLoader=torchs.Loader, Loader=torchs.Loader, pair=(torchs.Iter, 7), other=[torchs.Loader], text="DataLoader"
    )
    monkeypatch.setitem(sys.modules, "somebodys", made)
    return made


# -- names ------------------------------------------------------------------------------------------------------


def test_every_name_for_torchs_loader_is_swapped_and_given_back(module: types.ModuleType) -> None:
    before = dict(vars(module))
    with patched_torch():
        assert torch.utils.data.DataLoader is torch_dataloader.DataLoader is patching.DataLoader
        assert module.DataLoader is module.Loader is patching.DataLoader
        assert module.pair == (patching.MultiProcessingIter, 7)
        assert module.other == [torchs.Loader], "only names, not what is inside of objects"
        namespace: dict[str, Any] = {}
        exec("from torch.utils.data import DataLoader", namespace)
        assert namespace["DataLoader"] is patching.DataLoader
    assert vars(module) == before
    assert torch.utils.data.DataLoader is torch_dataloader.DataLoader is torchs.Loader
    assert torch_dataloader._MultiProcessingDataLoaderIter is torchs.Iter


def test_a_module_that_was_imported_meanwhile_gets_torchs_loader_back(module: types.ModuleType) -> None:
    patch_torch()
    vars(module)["DataLoader"] = torch.utils.data.DataLoader
    unpatch_torch()
    assert module.DataLoader is torchs.Loader


def test_lazy_modules_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if name != "__dict__":
                raise AssertionError(f"{name} was looked up")
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    monkeypatch.setitem(sys.modules, "nothing", None)
    with patched_torch():
        assert torch.utils.data.DataLoader is patching.DataLoader


def test_patches_nest_and_unpatching_may_be_repeated() -> None:
    with patched_torch(slots=5):
        with patched_torch(slots=6, copy=True):
            assert torch.utils.data.DataLoader(NUMBERS, copy=False).slots == 6  # type: ignore[call-arg]
        loader: Any = torch.utils.data.DataLoader(NUMBERS)
        assert (loader.slots, loader.copy) == (5, False)
    unpatch_torch()
    unpatch_torch()
    assert torch.utils.data.DataLoader is torchs.Loader


def test_an_exception_inside_unpatches_too() -> None:
    with pytest.raises(ZeroDivisionError), patched_torch():
        1 / 0  # noqa: B018
    assert torch.utils.data.DataLoader is torchs.Loader


# -- classes ----------------------------------------------------------------------------------------------------


def test_loaders_of_before_are_still_instances_of_what_the_name_stands_for() -> None:
    before, derived = torchs.Loader(NUMBERS), Derived(NUMBERS)
    iterator = iter(torchs.Loader(NUMBERS, num_workers=1))
    with patched_torch():
        name = torch.utils.data.DataLoader
        assert isinstance(before, name)
        assert isinstance(derived, name)
        assert issubclass(Derived, name)
        assert not isinstance(NUMBERS, name)
        assert isinstance(iterator, torch_dataloader._MultiProcessingDataLoaderIter)
        made = name(NUMBERS, num_workers=1)
        assert type(made) is name
        assert isinstance(made, shmloader.DataLoader)
        assert not isinstance(before, shmloader.DataLoader), "only torch's names stand for more than they are"
        assert isinstance(iter(made), torch_dataloader._MultiProcessingDataLoaderIter)


def test_classes_can_be_derived_from_what_the_name_stands_for() -> None:
    with patched_torch(slots=7):

        class Mine(torch.utils.data.DataLoader[Any], abc.ABC):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)

        loader: Any = Mine(NUMBERS, 5, num_workers=1)
        assert (type(loader).__name__, loader.slots) == ("Mine", 7)
        assert not isinstance(torchs.Loader(NUMBERS), Mine)
        with pytest.raises(ValueError, match="should not be set after Mine is initialized"):
            loader.batch_size = 3
        assert_same(list(loader), list(torchs.Loader(NUMBERS, 5)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_loaders_outlive_the_patch_in_every_form(again: Any) -> None:
    with patched_torch(slots=7):
        loader: Any = torch.utils.data.DataLoader(NUMBERS, 5, num_workers=1)
    for each in (loader, again(loader), type(loader)(NUMBERS, 5, num_workers=loader.num_workers, slots=loader.slots)):
        assert each.slots == 7
        assert_same(list(each), list(torchs.Loader(NUMBERS, 5)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [torchs.Loader, Derived])
def test_loaders_with_torchs_code_get_our_iterators(make: Any, workers: int) -> None:
    loader = make(NUMBERS, 5, num_workers=workers, persistent_workers=workers > 0)
    with patched_torch(copy=True):
        iterator = iter(loader)
        assert isinstance(iterator, ShmIter) == (workers > 0)
        assert_same(list(iterator), list(torchs.Loader(NUMBERS, 5)))
        assert_same(list(loader), list(torchs.Loader(NUMBERS, 5)))
    assert loader not in shmloader.loaders(), "it has no read-outs"


def test_data_pipes_keep_torchs_iterator() -> None:
    with patched_torch():
        pipe = torch.utils.data.datapipes.iter.IterableWrapper(range(4))
        loader = torchs.Loader(pipe, num_workers=1)
        iterator = iter(loader)
        assert type(iterator) is torchs.Iter
        assert [int(batch) for batch in iterator] == [0, 1, 2, 3]


# -- options ----------------------------------------------------------------------------------------------------


def test_options_are_defaults_and_what_a_loader_says_itself_goes_before_them() -> None:
    with patched_torch(memory_limit="64MiB", slots=5, seeding="batch", max_workers=3, copy=True):
        loader: Any = torch.utils.data.DataLoader(NUMBERS, slots=8)  # type: ignore[call-arg]
        given = (loader.memory_limit, loader.slots, loader.seeding, loader.max_workers, loader.copy)
        assert given == ("64MiB", 8, "batch", 3, True)
        assert shmloader.DataLoader(NUMBERS).slots is None, "who names ours says what it wants"


@pytest.mark.parametrize("asked", [1, 2, "auto"])
def test_a_number_of_workers_goes_before_the_one_that_was_asked_for(asked: Any) -> None:
    with patched_torch(num_workers=3):
        assert torch.utils.data.DataLoader(NUMBERS, num_workers=2).num_workers == 3
        assert torch.utils.data.DataLoader(NUMBERS, 1, None, None, None, 2).num_workers == 3
        assert torch.utils.data.DataLoader(NUMBERS).num_workers == 0, "none are not turned into some"
        assert torch.utils.data.DataLoader(Counting(), num_workers=1).num_workers == 1, "nor is data doubled"
    with patched_torch(num_workers=asked):
        found = torch.utils.data.DataLoader(NUMBERS, num_workers=5, persistent_workers=True).num_workers
        assert isinstance(found, AutoWorkers) == (asked == "auto")
        assert asked == "auto" or found == asked


def test_force_means_every_loader() -> None:
    with patched_torch(num_workers=2, force=True):
        assert torch.utils.data.DataLoader(NUMBERS).num_workers == 2
        assert torch.utils.data.DataLoader(Counting(), num_workers=1).num_workers == 2
        with pytest.raises(ValueError, match="non-negative"):
            torch.utils.data.DataLoader(NUMBERS, num_workers=-1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_workers": 0}, ValueError, "patching turns no workers off"),
        ({"num_workers": "many"}, TypeError, "'auto' or None, got 'many'"),
        ({"num_workers": True}, TypeError, "got True"),
        ({"slots": 0}, ValueError, "slots"),
        ({"memory_limit": "lots"}, ValueError, "memory_limit"),
        ({"batch_size": 4}, TypeError, "unexpected keyword argument 'batch_size'"),
    ],
)
def test_wrong_options_patch_nothing(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        patch_torch(**options)
    assert torch.utils.data.DataLoader is torchs.Loader
