"""Warnings and other things that can be observed from outside: as with torch's loader."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shmloader import DataLoader
from tests.beside import (
    KINDS,
    assert_same_epochs,
    both,
    epochs,
    of_forking,
)
from tests.datasets import (
    Made,
    Rows,
    as_is,
    first,
)


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught if not of_forking(warning)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"pin_memory": True},
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning works here"),
        ),
        {"pin_memory": True, "pin_memory_device": "cuda"},
        pytest.param({"num_workers": 7}, marks=pytest.mark.slow),
        {},
    ],
    ids=str,
)
def test_torchs_warnings_come_as_often_and_in_the_same_words(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def run(kind: Any) -> list[str]:
        def use() -> None:
            loader = kind(Rows(2), **{"num_workers": 1, **options})
            for _ in range(2):
                next(iter(loader))

        return warned(use)

    mine = both(run)
    assert bool(mine) is bool(options)


def test_a_profiler_sees_the_ranges_that_tools_group_by() -> None:
    with torch.autograd.profiler.profile() as profile:
        list(DataLoader(Rows(2), num_workers=1))
    names = {event.name for event in profile.function_events}
    assert any(name.startswith("enumerate(DataLoader)#") and name.endswith(".__next__") for name in names)


def test_workers_are_gone_when_the_epoch_has_ended() -> None:
    for kind in KINDS:
        iterator = iter(kind(Rows(4), num_workers=2))
        workers = list(iterator._workers)
        assert len(list(iterator)) == 4
        assert not any(worker.is_alive() for worker in workers)


def test_grad_mode_reaches_forked_workers() -> None:
    def run(kind: Any) -> list[Any]:
        with torch.no_grad():
            return epochs(kind, Made(2, lambda _: torch.is_grad_enabled()), num_workers=1, collate_fn=first)

    assert both(run) == [[False, False]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_data_pipes_are_left_to_torchs_own_iterator() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    def run(kind: Any) -> list[Any]:
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter()
        return epochs(kind, pipe, 4, shuffle=True, num_workers=2, count=2)

    both(run)
    gc.collect()


def test_index_types_reach_the_data_set_as_they_are() -> None:
    class Typed(Made):
        def __getitem__(self, index: Any) -> Any:
            return type(index).__name__, repr(index)

    indices = [1, np.int64(2), "name", (1, "a"), None, torch.tensor(3), 2**70, 1.5, True]
    for how in ({"sampler": indices, "batch_size": 2}, {"batch_sampler": [indices, [True, 2], ()]}):
        mine = assert_same_epochs(lambda: Typed(9, int), num_workers=1, collate_fn=as_is, **how)
        assert len(mine[0]) > 2
