"""Two loaders made alike: all arguments, and samplers and generators as they were."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import shmloader
from shmloader import PairedDataset
from shmloader.cli.recipe import KINDS, OF_OURS, OURS, TORCH, Endless, of_dataset, of_loader
from shmloader.cli.target import BenchError
from tests import bench_targets as targets
from tests.datasets import Rows, as_is
from tests.test_loader import EXTRAS

PLAIN = ("batch_size", "drop_last", "collate_fn", "worker_init_fn", "timeout", "in_order", "prefetch_factor")


@pytest.mark.parametrize("kind", KINDS)
def test_all_arguments_are_taken_over(kind: str) -> None:
    given: DataLoader[Any] = DataLoader(
        Rows(40),
        batch_size=4,
        sampler=range(12),
        num_workers=2,
        collate_fn=as_is,
        drop_last=True,
        timeout=9,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        prefetch_factor=5,
        persistent_workers=True,
        in_order=False,
        generator=torch.Generator().manual_seed(1),
    )
    recipe = of_loader(given, None, None)
    made = recipe.make(kind, 3)
    assert type(made) is KINDS[kind]
    assert [getattr(made, name) for name in PLAIN] == [getattr(given, name) for name in PLAIN]
    assert (made.num_workers, made.dataset, made.sampler, recipe.workers) == (3, given.dataset, range(12), 2)
    assert made.persistent_workers
    assert made.multiprocessing_context is given.multiprocessing_context
    assert made.generator is not given.generator
    assert torch.equal(made.generator.get_state(), given.generator.get_state())
    assert recipe.make(kind, 0).num_workers == 0  # what only workers need is left out


def test_our_own_options_are_taken_over_by_ours_alone() -> None:
    recipe = of_loader(targets.ours(), None, None)
    made = recipe.make(OURS, 1)
    assert isinstance(made, shmloader.DataLoader)
    assert (made.memory_limit, made.copy) == ("16MiB", True)
    assert type(recipe.make(TORCH, 1)) is DataLoader


def test_a_batch_size_goes_with_a_loader_that_has_one() -> None:
    assert of_loader(targets.shuffled(), 5, None).make(OURS, 0).batch_size == 5
    assert of_dataset(Rows(8), None, None).make(OURS, 0).batch_size == 32
    for make, why in ((targets.in_place, "a batch_sampler of its own"), (targets.single, "batch_size=None")):
        with pytest.raises(BenchError, match=why):
            of_loader(make(), 5, None)


def test_a_sampler_that_can_be_read_once_is_refused() -> None:
    with pytest.raises(BenchError, match="can be read only once"):
        of_loader(targets.once(), None, None)


@pytest.mark.parametrize("make", [targets.shuffled, targets.in_place, targets.weighted])
def test_every_loader_draws_the_same_order(make: Any) -> None:
    recipe = of_loader(make(), None, None)
    orders = []
    for kind in (TORCH, OURS, TORCH):
        torch.manual_seed(5)
        random.seed(5)
        orders.append(list(recipe.make(kind, 0).batch_sampler))
    assert orders[0] == orders[1] == orders[2]


def test_a_sampler_and_its_loader_still_share_a_generator() -> None:
    recipe = of_loader(targets.shuffled(), None, None)
    made = recipe.make(OURS, 0)
    assert made.sampler.generator is made.generator


class Stateful:
    """A sampler with states of several kinds, two of which are the same object."""

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source
        self.rng, self.array, self.groups = np.random.default_rng(1), np.arange(3), {"a": [1, 2]}
        self.inner = [RandomSampler(range(9), generator=torch.Generator().manual_seed(1))]

    def __iter__(self) -> Any:
        self.array += 1
        self.groups["a"].append(3)
        yield from (int(self.rng.integers(5)), int(self.array[0]), len(self.groups["a"]), next(iter(self.inner[0])))


def test_states_are_copied_and_data_is_not() -> None:
    data = Rows(20)
    sampler = Stateful(data)
    recipe = of_loader(DataLoader(data, 2, sampler=sampler), None, None)
    orders = [list(recipe.make(OURS, 0).sampler) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]
    assert recipe.make(OURS, 0).sampler.data_source is data


def test_an_endless_sampler_repeats_its_passes_and_counts() -> None:
    endless = Endless(BatchSampler(SequentialSampler(range(5)), 2, False))
    assert list(islice(endless, 4)) == [[0, 1], [2, 3], [4], [0, 1]]
    assert endless.mean() == 7 / 4
    assert list(Endless([])) == []


def test_an_overridden_iteration_is_noted() -> None:
    class Special(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    assert of_loader(DataLoader(Rows(4)), None, None).notes == ()
    assert of_loader(Special(Rows(4)), None, None).notes[0].startswith("Special.__iter__ is left out")


OF_OURS_VALUES: dict[str, Any] = {
    "memory_limit": 1 << 22,
    "slots": 5,
    "seeding": "worker",
    "max_workers": 3,
    "copy": True,
    "device": "cpu",
    "late_targets": True,
}


@pytest.mark.parametrize("name", sorted(EXTRAS))
def test_every_option_of_ours_is_taken_over_or_noted(name: str) -> None:
    value = OF_OURS_VALUES[name]
    recipe = of_loader(shmloader.DataLoader(PairedDataset(Rows(4), Rows(4)), 2, **{name: value}), None, None)
    if name in OF_OURS:
        assert getattr(recipe.make(OURS, 0), name) == value
        assert recipe.notes == ()
    else:
        assert [note.split("=")[0].split()[0] for note in recipe.notes] == [name]
