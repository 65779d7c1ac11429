"""torch's loader beside ours, on very little data."""

from __future__ import annotations

import pytest
import torch

from shmloader import PairedDataset
from shmloader.cli import footprint
from shmloader.cli.comparison import KINDS, OURS, THEIRS, Race, hold, race
from shmloader.cli.photographs import Rows
from shmloader.cli.readout import verdict

pytestmark = pytest.mark.slow


def rows(count: int) -> PairedDataset:
    images = torch.arange(8 * 3 * 16 * 16, dtype=torch.int64).to(torch.uint8).view(8, 3, 16, 16)
    return PairedDataset(Rows(images, count), Rows(images.flip(0), count))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_race_measures_both_whatever_the_number_of_workers(workers: int) -> None:
    figures = race(rows, batch_size=4, workers=workers, batches=2, rounds=3)
    assert (figures.batch_bytes, figures.rounds) == (2 * 4 * 3 * 16 * 16, 3)
    assert min(figures.torch_batches_per_s, figures.shmloader_batches_per_s) > 0
    assert (figures.torch_cpu_s is None) == (not footprint.readable())
    assert figures.ratio_low <= figures.ratio <= figures.ratio_high


@pytest.mark.skipif(not footprint.readable(), reason="needs Linux's /proc")
def test_ours_needs_no_descriptor_for_a_kept_tensor() -> None:
    held = {kind: hold(kind, rows(40 * 4), batch_size=4, workers=1) for kind in KINDS}
    assert {figures.batches for figures in held.values()} == {40}
    assert held[THEIRS].descriptors >= 80
    assert held[OURS].descriptors < 20


@pytest.mark.parametrize(
    ("ratio", "low", "high", "words"),
    [
        (1.04, 0.7, 1.3, "about equal"),
        (4.0, 3.5, 4.4, "ours is faster"),
        (0.5, 0.4, 0.6, "ours is slower"),
        (1.5, 0.6, 2.0, "the rounds differ too much to tell"),
    ],
)
def test_the_verdict_claims_no_more_than_the_rounds_show(ratio: float, low: float, high: float, words: str) -> None:
    assert verdict(Race(1, 5, 1.0, ratio, ratio, low, high, None, None)) == words
