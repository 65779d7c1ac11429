"""torchrun."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import (
    RUN,
    TWO_PROCESSES,
    assert_equal,
    assert_kept,
    assert_patched,
    assert_same,
    ran,
    reported,
    told_by,
)

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def told() -> Any:
    """What each rank told."""
    return told_by("torchrun", launcher=TWO_PROCESSES)


def test_two_ranks_train_as_with_torchs_loader(told: Any) -> None:
    assert_same(told, ranks=2)
    for rank in told:
        assert_kept(rank["ours"]["loader"], COUNT // BATCH)  # two epochs of half of the batches
    first, second = (rank["ours"] for rank in told)
    assert first["weights"] == second["weights"]
    assert first["trained"] != second["trained"]


def test_each_rank_may_be_a_shmloader_run(told: Any) -> None:
    ranks, output = ran("torchrun", "script", launcher=(*TWO_PROCESSES, *RUN))
    assert reported(output) == ["0", "1"]
    assert len(ranks) == 2
    for seen, rank in zip(ranks, told):
        assert_equal(seen, rank["torch"])
        assert_patched(seen["loader"], COUNT // BATCH, slots=None)
