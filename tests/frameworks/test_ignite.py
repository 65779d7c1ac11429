"""Ignite."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import assert_kept, assert_same, told_by

pytestmark = pytest.mark.frameworks


def test_a_deterministic_engine_trains_and_resumes_as_with_torchs_loader() -> None:
    ranks = told_by("ignite", needs=("pytorch-ignite",))
    assert_same(ranks)
    ours = ranks[0]["ours"]
    assert len(ours["plain"]["whole"]) == 12
    assert ours["plain"]["rest"] == ours["plain"]["whole"][8:]
    assert len(ours["noisy"]["rest"]) == 4
    for facts in ours["loader"]:
        assert_kept(facts, 2 * COUNT // BATCH)
