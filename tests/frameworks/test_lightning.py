"""Lightning and Fabric."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.material import BATCH, COUNT, WORKERS
from tests.frameworks.running import (
    OUR_CLASS,
    RUN,
    SLOTS,
    assert_equal,
    assert_kept,
    assert_patched,
    assert_same,
    ran,
    reported,
    told_by,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(100)]  # several jobs in one process, imported once
LIMIT_S = 80.0
PER_EPOCH = COUNT // BATCH
#: An automatic number of workers need not be torch's.
NOT_COMPARED = ("loader", "validating loader", "most_workers")


def told(what: str) -> Any:
    """What a job told, by rank."""
    return told_by("lightning", what, needs=("lightning",), limit_s=LIMIT_S)


@pytest.fixture(scope="module")
def one() -> Any:
    """All that is done in one process."""
    return told("one")


@pytest.fixture(scope="module")
def two() -> Any:
    """All that is done in two."""
    return told("two")


def test_fit_trains_and_validates_as_with_torchs_loader(one: Any) -> None:
    assert_same(one, of=("fit",), except_for=("loader", "validating loader"))
    ours = one[0]["fit"]["ours"]
    assert len(ours["trained"]) == 2 * PER_EPOCH
    assert len(ours["validated"]) == 2 + 2 * 3  # the sanity check's, and two epochs'
    assert ours["most_workers"] >= WORKERS
    assert ours["iterators"] == [True, True]
    assert_kept(ours["loader"], 2 * PER_EPOCH)
    assert_kept(ours["validating loader"], 2 + 2 * 3)


@pytest.mark.parametrize("made", ["hooks", "overfit"])
def test_a_loader_that_is_built_again_keeps_its_options(one: Any, made: str) -> None:
    assert_same(one, of=(made,))
    assert_kept(one[0][made]["ours"]["loader"], 2 * 3)


def test_predict_tells_the_writer_which_samples_are_in_which_batch(one: Any) -> None:
    assert_same(one, of=("predict",))
    ours = one[0]["predict"]["ours"]
    assert [indices for _, indices in ours["batches"]] == [
        list(range(first, first + BATCH)) for first in range(0, COUNT, BATCH)
    ]
    assert_kept(ours["loader"], PER_EPOCH)


@pytest.mark.parametrize(("made", "batches"), [("hooks", 2 * 3), ("overfit", 2 * 3), ("predict", PER_EPOCH)])
def test_a_loader_that_is_built_again_keeps_its_automatic_number_of_workers(one: Any, made: str, batches: int) -> None:
    assert_same(one, of=("automatic", made), except_for=NOT_COMPARED)
    assert_kept(one[0]["automatic"][made]["ours"]["loader"], batches, num_workers="AutoWorkers")


def test_two_processes_train_as_with_torchs_loader(two: Any) -> None:
    assert_same(two, ranks=2, of=("ddp",), except_for=("loader", "validating loader"))
    for rank in two:
        ours = rank["ddp"]["ours"]
        assert_kept(ours["loader"], PER_EPOCH)
        assert ours["validating loader"]["class"] == OUR_CLASS
        assert ours["validating loader"]["slots"] == SLOTS
    first, second = (rank["ddp"]["ours"]["trained"] for rank in two)
    assert first != second  # each has its own half


def test_in_two_processes_the_number_of_workers_stays_automatic(two: Any) -> None:
    for what in ("ddp", "fabric_ddp"):
        assert_same(two, ranks=2, of=("automatic", what), except_for=NOT_COMPARED)
        for rank in two:
            assert_kept(rank["automatic"][what]["ours"]["loader"], PER_EPOCH, num_workers="AutoWorkers")


def test_a_fabric_loop_trains_as_with_torchs_loader(one: Any) -> None:
    assert_same(one, of=("fabric",))
    assert_kept(one[0]["fabric"]["ours"]["loader"], 2 * PER_EPOCH)


def test_fabric_loops_in_two_processes_train_as_with_torchs_loader(two: Any) -> None:
    assert_same(two, ranks=2, of=("fabric_ddp",))
    first, second = (rank["fabric_ddp"]["ours"] for rank in two)
    for ours in (first, second):
        assert_kept(ours["loader"], PER_EPOCH)
    assert first["weights"] == second["weights"]
    assert first["trained"] != second["trained"]


def test_shmloader_run_reaches_the_process_that_the_launcher_starts(two: Any) -> None:
    ranks, output = ran("lightning", "script", launcher=RUN, needs=("lightning",), limit_s=LIMIT_S)
    assert reported(output) == ["0", "1"]
    assert len(ranks) == 2
    for seen, rank in zip(ranks, two):
        assert_equal(seen, rank["ddp"]["torch"], except_for=("loader", "validating loader"))
        assert_patched(seen["loader"], PER_EPOCH, slots=None)
