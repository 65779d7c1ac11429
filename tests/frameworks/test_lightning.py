"""Lightning and Fabric."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH, COUNT, WORKERS
from tests.frameworks.running import OUR_CLASS, SLOTS, assert_kept, assert_same, told_by

pytestmark = pytest.mark.frameworks
PER_EPOCH = COUNT // BATCH


def told(what: str) -> Any:
    """What a job told, by rank."""
    return told_by("lightning", what, needs=("lightning",))


def test_fit_trains_and_validates_as_with_torchs_loader() -> None:
    ranks = told("fit")
    assert_same(ranks, except_for=("loader", "validating loader"))
    ours = ranks[0]["ours"]
    assert len(ours["trained"]) == 2 * PER_EPOCH
    assert len(ours["validated"]) == 2 + 2 * 3  # the sanity check's, and two epochs'
    assert ours["most_workers"] >= WORKERS
    assert ours["iterators"] == [True, True]
    assert_kept(ours["loader"], 2 * PER_EPOCH)
    assert_kept(ours["validating loader"], 2 + 2 * 3)


def test_a_loader_made_in_a_hook_and_built_again_keeps_its_options() -> None:
    ranks = told("hooks")
    assert_same(ranks)
    assert_kept(ranks[0]["ours"]["loader"], 2 * 3)


def test_predict_tells_the_writer_which_samples_are_in_which_batch() -> None:
    ranks = told("predict")
    assert_same(ranks)
    ours = ranks[0]["ours"]
    assert [indices for _, indices in ours["batches"]] == [
        list(range(first, first + BATCH)) for first in range(0, COUNT, BATCH)
    ]
    assert_kept(ours["loader"], PER_EPOCH)


def test_two_processes_train_as_with_torchs_loader() -> None:
    ranks = told("ddp")
    assert_same(ranks, ranks=2, except_for=("loader", "validating loader"))
    for rank in ranks:
        assert_kept(rank["ours"]["loader"], PER_EPOCH)
        assert rank["ours"]["validating loader"]["class"] == OUR_CLASS
        assert rank["ours"]["validating loader"]["slots"] == SLOTS
    assert ranks[0]["ours"]["trained"] != ranks[1]["ours"]["trained"]  # each has its own half


def test_a_fabric_loop_trains_as_with_torchs_loader() -> None:
    ranks = told("fabric")
    assert_same(ranks)
    assert_kept(ranks[0]["ours"]["loader"], 2 * PER_EPOCH)
