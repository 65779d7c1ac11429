"""Starts: what they cost in descriptors, and those that fail half-way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.faulty import Unpicklable
from tests.loaders import COUNT, loader, numbers
from tests.programs import (
    Forked,
    Teller,
    children,
    descriptors,
    mappings,
)

# -- 30: descriptors ------------------------------------------------------------------------------------------------


class Nested(Dataset[Any]):
    """Many tensors an item."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return {str(key): torch.full((4,), index * 10 + key) for key in range(10)}


def test_descriptors_and_mappings_depend_on_neither_tensors_nor_batches() -> None:
    held = []
    for number, batch in enumerate(loader(Nested(), batch_size=1)):
        held.append(batch)
        if number == 10:
            before = descriptors(), mappings()
    # A mapping may be split or joined by the allocator at any time; a hundred batches of ten tensors would show.
    assert descriptors() <= before[0]
    assert mappings() <= before[1] + 10
    for number, batch in enumerate(held):
        assert all(batch[str(key)].tolist() == [[number * 10 + key] * 4] for key in range(10))


@pytest.mark.parametrize("workers", [1, 4])
def test_an_iterator_costs_two_descriptors_and_four_per_worker(workers: int) -> None:
    before = descriptors()
    iterator = iter(loader(num_workers=workers))
    next(iterator)
    assert descriptors() - before <= 2 + 4 * workers
    del iterator


# -- starts that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_set_that_cannot_be_sent_is_refused_with_torchs_warning(method: str) -> None:
    source = loader(Unpicklable(), multiprocessing_context=method)
    before = descriptors(), children()
    with (
        pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker Process"),
        pytest.raises((AttributeError, TypeError)),
    ):
        iter(source)
    source.close()
    assert (descriptors(), children()) == before


def limit_for(spare: int) -> int:
    """The limit of descriptors under which ``spare`` more can be opened."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(1 << 16) if number not in used)
    return next(itertools.islice(free, spare, None))


def ours_open() -> Iterator[str]:
    """Descriptors of kinds that a loader opens."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("/memfd:shmloader", "anon_inode:[pidfd]", "socket:")):
                yield target


@pytest.mark.slow
def test_a_lack_of_descriptors_at_any_point_of_the_start_leaves_nothing() -> None:
    def starve(teller: Teller) -> None:
        source = loader(num_workers=3)
        assert numbers(source) == list(range(COUNT))
        source.close()
        gc.collect()
        opened, open_before = descriptors(), set(ours_open())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        failures = 0
        for spare in range(1, 24):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(spare), hard))
            try:
                for batch in source:
                    del batch
            except OSError:
                failures += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            source.close()
            gc.collect()
            assert not multiprocessing.active_children()
            teller.tell((spare, children(), [*set(ours_open()) - open_before]))
        teller.tell((failures, numbers(source), descriptors() - opened))

    with Forked(starve) as child:
        while len(told := child.hear()) and not isinstance(told[1], list):
            spare, left, kinds = told
            assert (left, kinds) == (set(), []), f"left behind with {spare} descriptors"
        failures, seen, grown = told
    assert failures > 5
    assert seen == list(range(COUNT))
    # multiprocessing itself loses two when its second pipe fails.
    assert grown <= 2 * failures
