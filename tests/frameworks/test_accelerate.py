"""Accelerate."""

from __future__ import annotations

import pytest

from tests.frameworks.material import BATCH, COUNT
from tests.frameworks.running import TWO_PROCESSES, assert_patched, assert_same, told_by

pytestmark = pytest.mark.frameworks
SKIPPED = 2


@pytest.mark.parametrize(("ranks", "launcher"), [(1, ()), (2, TWO_PROCESSES)], ids=["one process", "two processes"])
def test_prepared_and_shortened_loaders_train_as_with_torchs_loader(ranks: int, launcher: tuple[str, ...]) -> None:
    told = told_by("accelerate", needs=("accelerate",), launcher=launcher)
    assert_same(told, ranks=ranks)
    per_epoch = COUNT // BATCH // ranks
    for rank in told:
        ours = rank["ours"]
        assert len(ours["trained"]) == 3 * per_epoch - SKIPPED
        assert ours["processes"] == ranks
        assert ours["is a DataLoader"]
        prepared, rest = ours["loader"]
        assert_patched(prepared, 2 * per_epoch)
        assert_patched(rest, per_epoch - SKIPPED)
