"""Transformers, with datasets."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT, WORKERS
from tests.frameworks.running import assert_patched, assert_same, told_by

pytestmark = pytest.mark.frameworks


def test_the_trainer_trains_and_evaluates_as_with_torchs_loader() -> None:
    ranks = told_by("transformers", needs=("transformers", "accelerate", "datasets"))
    assert_same(ranks)
    ours = ranks[0]["ours"]
    assert len([entry for entry in ours["logged"] if "loss" in entry]) == 2 * 2  # six batches are four and two
    assert ours["evaluated"] > 0
    assert len(ours["losses"]) == 2 * COUNT // BATCH + 3
    assert ours["most_workers"] >= WORKERS
    assert_patched(ours["loader"], 2 * COUNT // BATCH)
