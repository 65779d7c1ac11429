"""How a loader is timed, and what its figures recommend."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from shmloader.cli import footprint
from shmloader.cli.advice import advise
from shmloader.cli.measurement import Measurement, Terms, measure, median
from shmloader.cli.recipe import OURS, TORCH, of_dataset, of_loader
from shmloader.cli.target import BenchError
from tests import bench_targets as targets
from tests.datasets import Made, Rows

QUICK = Terms(seconds=0.02, step_s=0.0)


@pytest.fixture(autouse=True)
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.cli.measurement.LOOKS", 1)
    monkeypatch.setattr("shmloader.cli.measurement.SETTLE_S", 0.01)


class Once(IterableDataset[Any]):
    """Has samples in its first epoch only."""

    def __init__(self) -> None:
        self.samples = iter(range(40))

    def __iter__(self) -> Any:
        return self.samples


class Clock:
    """Stands in for the module `time`: it moves only when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    thread_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def work(self, index: int) -> int:
        """A sample that takes 10 ms."""
        self.now_s += 0.01
        return index


def test_rates_follow_from_each_other() -> None:
    found = measure(of_dataset(Rows(64), 16, None), OURS, 0, QUICK)
    assert found.samples_per_s == pytest.approx(16 * found.batches_per_s)
    assert found.mb_per_s == pytest.approx(found.batches_per_s * 16 * (8 * 4 + 8) / 1e6)
    assert found.steady
    assert 0 < found.thread_cpu_s < 1
    assert (found.extra_bytes is None) == (not footprint.readable())


@pytest.mark.parametrize(("step_s", "waiting", "rate"), [(0.0, 1.0, 100.0), (0.03, 0.25, 25.0)])
def test_waiting_and_rate_are_those_of_the_clock(
    step_s: float, waiting: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("shmloader.cli.measurement.time", clock)
    found = measure(of_dataset(Made(8, clock.work), 1, None), TORCH, 0, Terms(seconds=2.0, step_s=step_s))
    assert found.waiting == pytest.approx(waiting)
    assert found.batches_per_s == pytest.approx(rate)
    assert found.thread_cpu_s == pytest.approx(1 / rate)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, OURS])
def test_an_epoch_that_is_shorter_than_the_time_does_not_end(kind: str) -> None:
    found = measure(of_loader(targets.careful(), None, None), kind, 1, QUICK)
    assert found.steady
    assert found.batches_per_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [None, 200])
def test_iterable_data_sets_are_timed_where_they_are_steady(count: int | None) -> None:
    assert measure(of_dataset(targets.Stream(count), 4, None), OURS, 1, QUICK).steady


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, OURS])
def test_epochs_that_are_too_short_are_timed_whole_and_said_to_be(kind: str) -> None:
    found = measure(of_loader(targets.short(), None, None), kind, 1, QUICK)
    assert not found.steady
    assert found.batches_per_s < 1 / 0.0005  # starting a worker takes longer


def test_a_data_set_that_is_used_up_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(BenchError, match="it can be read only once"):
        measure(of_loader(DataLoader(Once(), batch_size=20), None, None), TORCH, 0, QUICK)


def test_samples_of_a_batch_that_only_the_data_set_knows_are_not_guessed() -> None:
    loader: DataLoader[Any] = DataLoader(targets.Stream(None), batch_size=None)
    assert measure(of_loader(loader, None, None), TORCH, 0, QUICK).samples_per_s is None
    found = measure(of_loader(targets.in_place(), None, None), TORCH, 0, QUICK)
    assert 6 < (found.samples_per_s or 0) / found.batches_per_s <= 7


def test_a_loaders_own_verdict_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = of_dataset(Rows(64), 16, None)
    assert isinstance(measure(recipe, OURS, 0, QUICK).diagnosis, (str, type(None)))
    stats = SimpleNamespace(verdict=SimpleNamespace(kind="copy", text="Copying takes the time."))
    monkeypatch.setattr("shmloader.DataLoader.stats", lambda self: stats)
    assert measure(recipe, OURS, 0, QUICK).diagnosis == "Copying takes the time."


def figures(loader: str, workers: int, rate: float, waiting: float = 1.0) -> Measurement:
    return Measurement(loader, workers, rate, None, rate, waiting, 0.001, None, steady=True)


def test_medians_are_taken_figure_by_figure() -> None:
    rounds = [replace(figures(OURS, 2, rate), extra_bytes=extra) for rate, extra in ((1, 9.0), (3, None), (2, 7.0))]
    middle = median([*rounds[:2], replace(rounds[2], steady=False)])
    assert (middle.batches_per_s, middle.extra_bytes, middle.samples_per_s, middle.steady) == (2, 8.0, None, False)


@pytest.mark.parametrize(
    ("rates", "workers", "words"),
    [
        ({0: (50, 50), 1: (20, 90), 2: (40, 92)}, 1, "4.50x torch's 20.0 batches/s, and 1.80x torch's best, 50.0"),
        ({0: (10, 10), 2: (40, 90)}, 2, "2.25x torch's 40.0 batches/s, which is torch's best"),
        ({0: (99, 100), 2: (40, 90)}, 0, "without workers both loaders do the same"),
        ({1: (100, 101)}, 1, "1.01x (about equal)"),
    ],
)
def test_the_fewest_workers_that_are_fast_are_recommended(
    rates: dict[int, tuple[float, float]], workers: int, words: str
) -> None:
    medians = [figures(kind, count, rate) for count, pair in rates.items() for kind, rate in zip((TORCH, OURS), pair)]
    advice = advise(medians)
    assert advice.workers == workers
    assert words in advice.text


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (figures(OURS, 1, 10, waiting=0.02), "the training step takes the time"),
        (figures(OURS, 1, 10, waiting=0.7), "70% of the time the training waits for the workers"),
        (figures(OURS, 0, 10, waiting=0.7), "70% of the time the training process makes batches itself"),
        (replace(figures(OURS, 0, 10), diagnosis="As the loader says."), "As the loader says."),
    ],
)
def test_the_diagnosis_says_where_the_time_goes(ours: Measurement, words: str) -> None:
    assert words in advise([figures(TORCH, ours.workers, 5), ours]).diagnosis
