"""Ignite."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import assert_kept, assert_same, told_by

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def told() -> Any:
    """What the job told."""
    return told_by("ignite", needs=("pytorch-ignite",))


def test_a_deterministic_engine_trains_and_resumes_as_with_torchs_loader(told: Any) -> None:
    for draws in ("noisy", "plain"):
        assert_same(told, of=(draws,))
        ours = told[0][draws]["ours"]
        assert (len(ours["whole"]), len(ours["rest"])) == (12, 4)
        assert_kept(ours["loader"], 2 * COUNT // BATCH)
    plain = told[0]["plain"]["ours"]
    assert plain["rest"] == plain["whole"][8:]


def test_a_loader_that_is_built_again_keeps_its_automatic_number_of_workers(told: Any) -> None:
    assert_same(told, of=("automatic",))
    assert_kept(told[0]["automatic"]["ours"]["loader"], 2 * COUNT // BATCH, num_workers="AutoWorkers")
