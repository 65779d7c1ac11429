"""The constructor: whatever it is given, it does with it what torch's does with it."""

from __future__ import annotations

import multiprocessing
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from tests.beside import KINDS, of_forking
from tests.datasets import Items, Rows, Shards, as_is
from tests.equal import assert_same

ROWS = Rows(10)
SAMPLER = SequentialSampler(range(10))
BATCHES = BatchSampler(SAMPLER, 2, False)
FORK = multiprocessing.get_context("fork")


def seen_of(kind: Any, *args: Any, **options: Any) -> list[Any]:
    """What comes of constructing: the error, or what is stored, with what torch makes described; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loader = kind(*args, **options)
        except Exception as error:
            found: Any = [type(error).__name__, str(error)]
        else:
            found = {name: described(getattr(loader, name)) for name in PUBLIC}
            found["context"] = id(loader.multiprocessing_context)
            found["kind"] = loader._dataset_kind
            found["batched"] = loader._auto_collation
            found["index sampler"] = described(loader._index_sampler)
            found["iterator"] = loader._iterator
    return [found, [f"{one.category.__name__}: {one.message}" for one in caught if not of_forking(one)]]


PUBLIC = [name for name in vars(torch.utils.data.DataLoader(ROWS)) if not name.startswith("_")]


def described(value: Any) -> Any:
    """A stored value: samplers that torch makes by what they consist of, everything else by identity or value."""
    if type(value) is BatchSampler and value is not BATCHES:
        return ["BatchSampler", described(value.sampler), value.batch_size, value.drop_last]
    if type(value) in (RandomSampler, SequentialSampler) and value is not SAMPLER:
        return [type(value).__name__, id(value.data_source), id(getattr(value, "generator", None))]
    return value if isinstance(value, (int, float, str, type(None))) else [type(value).__name__, id_of(value)]


def id_of(value: Any) -> int:
    """Its identity, but for the sampler of iterable data sets, of which torch makes one each time."""
    return 0 if type(value).__name__ == "_InfiniteConstantSampler" else id(value)


OPTIONS: dict[str, list[Any]] = {
    "dataset": [ROWS, Items([]), Shards([1, 2]), Shards([1, 2], length=2), None],
    "batch_size": [1, 4, None, 0, -1, 2.0, True, "2"],
    "shuffle": [None, False, True, 1, 0, "yes"],
    "sampler": [None, SAMPLER, [3, 1], []],
    "batch_sampler": [None, BATCHES, [[1, 2]], []],
    "num_workers": [0, 1, 2, -1, True, 1.0],
    "collate_fn": [None, as_is],
    "pin_memory": [False, True],
    "drop_last": [False, True, 1, None],
    "timeout": [0, 2.5, -1],
    "worker_init_fn": [None, print],
    "multiprocessing_context": [None, "fork", "spawn", "teleport", FORK, 5],
    "generator": [None, torch.Generator()],
    "prefetch_factor": [None, 1, 3, 0, -1],
    "persistent_workers": [False, True],
    "pin_memory_device": ["", "cuda"],
    "in_order": [True, False],
}


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Up to five arguments of any value, right or wrong, beside a data set; alone, most are refused for one reason."""
    names = draw(st.lists(st.sampled_from([name for name in OPTIONS if name != "dataset"]), max_size=5, unique=True))
    return {name: draw(st.sampled_from(OPTIONS[name])) for name in ["dataset", *names]}


@pytest.mark.slow
@settings(max_examples=600)
@given(arguments())
def test_any_arguments_come_to_the_same_loader_or_to_the_same_error(options: dict[str, Any]) -> None:
    mine, its = (seen_of(kind, **options) for kind in KINDS)
    assert_same(mine, its)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_value_of_every_argument_by_itself_comes_to_the_same(name: str) -> None:
    for value in OPTIONS[name]:
        for workers in (0, 2):
            options = {"dataset": ROWS, "num_workers": workers, name: value}
            mine, its = (seen_of(kind, **options) for kind in KINDS)
            assert_same(mine, its)


def test_arguments_may_be_positional_as_far_as_torchs_may() -> None:
    values = [ROWS, 2, None, SAMPLER, None, 1, as_is, True, True, 3.5, print, FORK, torch.Generator()]
    for count in range(len(values) + 2):
        mine, its = (seen_of(kind, *[*values, 1][:count]) for kind in KINDS)
        if isinstance(its[0], list):  # too few or too many: Python's words name the class's __init__, and its bounds
            assert mine[0][0] == its[0][0] == "TypeError"
        else:
            assert_same(mine, its)
