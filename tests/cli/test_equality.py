"""Our batches beside torch's: equal, different, or left to chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import shmloader
from shmloader.cli.equality import compare
from shmloader.cli.recipe import KINDS, OURS, Recipe, of_dataset, of_loader
from shmloader.cli.target import BenchError
from tests import bench_targets as targets
from tests.datasets import Made, Rows

pytestmark = pytest.mark.slow  # each starts worker processes two or three times


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.cli.equality.MOST_BATCHES", 15)
    monkeypatch.setattr("shmloader.cli.equality.MOST_SECONDS", 60.0)


def recipe_of(target: Any) -> Recipe:
    of = of_loader if isinstance(target, DataLoader) else of_dataset
    return of(target, None, None)


@pytest.mark.parametrize(
    ("make", "workers", "batches"),
    [
        (targets.odd, 2, 14),
        (targets.shuffled, 2, 10),
        (targets.in_place, 1, 12),
        (targets.ours, 1, 10),
        (targets.careful, 2, 10),
        (targets.stream, 2, 12),
        (targets.endless, 1, 15),
        (targets.single, 0, 15),
    ],
)
def test_both_loaders_have_the_same_batches_in_both_epochs(make: Callable[[], Any], workers: int, batches: int) -> None:
    equality = compare(recipe_of(make()), workers)
    assert (equality.verdict, equality.batches) == ("equal", batches)
    assert str(equality).startswith(f"equal to torch's batches: {batches} batches compared, num_workers={workers}")


def altered(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Our loader with a fault."""

    def make(dataset: Any, **given: Any) -> Any:
        return shmloader.DataLoader(
            dataset, **{**given, "collate_fn": lambda samples: change(default_collate(samples))}
        )

    return make


def other_value(batch: Any) -> Any:
    rows, numbers = batch
    return [torch.where(rows == 40, rows + 1, rows), numbers]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_value, "batch 1, at [0]: other values of float32 (32, 8)"),
        (tuple, "batch 0: tuple for list"),
        (lambda batch: [batch[0].double(), batch[1]], "batch 0, at [0]: float64 (32, 8) for float32 (32, 8)"),
        (lambda batch: batch[:1], "batch 0: 1 elements for 2 elements"),
        (lambda batch: 1 / 0, "batch 0: shmloader has ZeroDivisionError (ZeroDivisionError: division by zero"),
    ],
)
def test_a_difference_is_told_with_its_place(
    change: Callable[[Any], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, OURS, altered(change))
    equality = compare(recipe_of(Rows(64)), 0)
    assert equality.verdict == "different"
    assert equality.why.startswith(why)
    assert str(equality).startswith("NOT equal to torch's batches: batch")


def test_an_epoch_of_another_length_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(dataset: Any, **given: Any) -> Any:
        return shmloader.DataLoader(dataset, **{**given, "sampler": range(32)})

    monkeypatch.setitem(KINDS, OURS, shorter)
    equality = compare(recipe_of(Rows(64)), 0)
    assert equality.why == "batch 1: shmloader has the end of the epoch, torch's loader a batch"


def test_what_torch_does_not_repeat_is_not_held_against_ours() -> None:
    equality = compare(recipe_of(targets.by_chance()), 0)
    assert equality.verdict == "unrepeatable"
    assert equality.why == "torch's own batches differ from run to run, at [0]; all else is equal"


def test_a_fault_shows_beside_what_is_left_to_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, OURS, altered(lambda batch: [batch[0], batch[1] + 1]))
    equality = compare(recipe_of(targets.by_chance()), 0)
    assert equality.verdict == "different"
    assert equality.why.startswith("batch 0, at [1]: ")


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (targets.empty, "not one batch"),
        (targets.dropped, "not one batch"),
        (targets.failing, "with torch's loader either: ValueError: sample 2 is broken (bench_targets.py"),
        (targets.unpicklable, r"batch[1] cannot be sent to the main process: Can't pickle local object"),
    ],
)
def test_what_lies_with_the_data_set_is_told(make: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(BenchError) as refused:
        compare(recipe_of(make()), 1)
    assert complaint in str(refused.value)
    assert "Traceback" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_class_that_spawned_workers_cannot_find_is_told() -> None:
    with pytest.raises(BenchError, match="define its class at the top level of a module"):
        compare(of_dataset(targets.local(), None, "spawn"), 1)


def test_what_can_only_be_compared_by_type_is_named() -> None:
    loader: DataLoader[Any] = DataLoader(Made(4, lambda index: (each for each in [index])), batch_size=None)
    equality = compare(recipe_of(loader), 0)
    assert (equality.verdict, equality.opaque) == ("equal", ("generator",))
    assert "of generator only the type" in str(equality)
