"""Ray Train."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import assert_kept, assert_same, told_by

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120)]  # Ray alone starts for half a minute on two cores


def test_two_workers_train_as_with_torchs_loader() -> None:
    ranks = told_by("ray", limit_s=90.0, needs=("ray",))
    assert_same(ranks, ranks=2)
    for rank in ranks:
        assert_kept(rank["ours"]["loader"], COUNT // BATCH)  # two epochs of half of the batches
    assert ranks[0]["ours"]["trained"] != ranks[1]["ours"]["trained"]
