"""tensordict."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT, WORKERS
from tests.frameworks.running import assert_kept, assert_same, told_by

pytestmark = pytest.mark.frameworks


def test_batches_are_the_tensordicts_that_torchs_loader_gives() -> None:
    ranks = told_by("tensordict", needs=("tensordict",))
    assert_same(ranks)
    ours = ranks[0]["ours"]
    kinds = {way: {seen[0] for seen in ours[way]["seen"]} for way in ("itself", "collated", "classes")}
    assert kinds == {"itself": {"TensorDict"}, "collated": {"TensorDict"}, "classes": {"Pair"}}
    for way in kinds:
        assert len(ours[way]["trained"]) == COUNT // BATCH
        assert ours[way]["most_workers"] >= WORKERS
    for facts in ours["loader"]:
        assert_kept(facts, COUNT // BATCH)
