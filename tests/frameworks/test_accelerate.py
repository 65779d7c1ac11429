"""Accelerate."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import (
    RUN,
    TWO_PROCESSES,
    assert_equal,
    assert_patched,
    assert_same,
    ran,
    reported,
    told_by,
)

pytestmark = pytest.mark.frameworks
SKIPPED = 2
ACCELERATES_LAUNCHER = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")  # without GPUs, too


@pytest.fixture(scope="module")
def one() -> Any:
    """In one process."""
    return told_by("accelerate", needs=("accelerate",))


@pytest.fixture(scope="module")
def two() -> Any:
    """In two."""
    return told_by("accelerate", needs=("accelerate",), launcher=TWO_PROCESSES)


@pytest.fixture(params=["one", "two"])
def told(request: pytest.FixtureRequest) -> Any:
    """What each rank told."""
    return request.getfixturevalue(request.param)


def test_prepared_and_shortened_loaders_train_as_with_torchs_loader(told: Any) -> None:
    assert_same(told, ranks=len(told))
    for rank in told:
        ours = rank["ours"]
        assert len(ours["trained"]) == 3 * COUNT // BATCH // len(told) - SKIPPED
        assert ours["processes"] == len(told)
        assert ours["is a DataLoader"]
        assert_both(ours["loader"], ranks=len(told))


@pytest.mark.parametrize("loader", ["patched", "given"])
def test_prepared_and_shortened_loaders_keep_an_automatic_number_of_workers(told: Any, loader: str) -> None:
    assert_same(told, ranks=len(told), of=("automatic", loader))
    for rank in told:
        assert_both(rank["automatic"][loader]["ours"]["loader"], ranks=len(told), num_workers="AutoWorkers")


def test_shmloader_run_reaches_the_ranks_of_accelerates_launcher(two: Any) -> None:
    launcher = (*RUN, *ACCELERATES_LAUNCHER)
    ranks, output = ran("accelerate", "script", needs=("accelerate",), launcher=launcher)
    assert reported(output) == ["0", "1"]
    assert len(ranks) == 2
    for seen, rank in zip(ranks, two):
        assert_equal(seen, rank["torch"])
        assert_both(seen["loader"], ranks=2, slots=None)


def assert_both(facts: Any, *, ranks: int, **expected: Any) -> None:
    """Fails unless the prepared loader and the shortened one are ours, and each was iterated."""
    prepared, rest = facts
    per_epoch = COUNT // BATCH // ranks
    assert_patched(prepared, 2 * per_epoch, **expected)
    assert_patched(rest, per_epoch - SKIPPED, **expected)
