"""torchrun."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import TWO_PROCESSES, assert_kept, assert_same, told_by

pytestmark = pytest.mark.frameworks


def test_two_ranks_train_as_with_torchs_loader() -> None:
    ranks = told_by("torchrun", launcher=TWO_PROCESSES)
    assert_same(ranks, ranks=2)
    for rank in ranks:
        assert_kept(rank["ours"]["loader"], COUNT // BATCH)  # two epochs of half of the batches
    first, second = (rank["ours"] for rank in ranks)
    assert first["weights"] == second["weights"]
    assert first["trained"] != second["trained"]
