"""Late targets: which frameworks let a loop have its inputs first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH
from tests.frameworks.running import told_by

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def lightning() -> Any:
    """What Lightning and Fabric do."""
    return told_by("late", "lightning", needs=("lightning",))[0]


@pytest.fixture(scope="module")
def accelerate() -> Any:
    """What Accelerate does."""
    return told_by("late", "accelerate", needs=("accelerate",))[0]


def assert_late(seen: list[Any]) -> None:
    """Fails unless each batch came before its targets were made, and its pairs were right."""
    assert seen == [{"type": "LateBatch", "made": BATCH * place, "right": True} for place in range(3)]


@pytest.mark.parametrize("way", ["trainer", "fabric"])
def test_lightning_moves_a_batch_without_asking_for_its_targets(lightning: Any, way: str) -> None:
    assert_late(lightning[way])


def test_accelerate_moves_a_batch_without_asking_for_its_targets(accelerate: Any) -> None:
    assert_late(accelerate["moved"])


def test_the_loader_that_accelerate_makes_for_itself_gives_whole_pairs(accelerate: Any) -> None:
    assert [batch["type"] for batch in accelerate["prepared"]] == ["list"] * 3
    assert all(batch["right"] for batch in accelerate["prepared"])
