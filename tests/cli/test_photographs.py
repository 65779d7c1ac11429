"""The data: each pair a pure function of its index, training and held-out apart."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shmloader import DataLoader, PairedDataset
from shmloader.cli.photographs import (
    HELD_OUT,
    PATCH,
    TRAINING,
    Clean,
    Degraded,
    Patches,
    Rows,
    WholePhotographs,
    photograph,
)
from shmloader.cli.restorer import psnr_db


def pairs(count: int = 24, seed: int = 3) -> PairedDataset:
    views = Patches(TRAINING, count, seed)
    return PairedDataset(Degraded(views, seed), Clean(views))


def test_no_photograph_is_both_trained_on_and_held_out() -> None:
    assert not set(TRAINING) & set(HELD_OUT)
    assert {name.partition("_")[0] for name in TRAINING}.isdisjoint(name.partition("_")[0] for name in HELD_OUT)


@pytest.mark.parametrize("name", TRAINING + HELD_OUT)
def test_every_photograph_is_in_the_wheel_in_colour_and_larger_than_a_patch(name: str) -> None:
    pixels = photograph(name)
    height, width, channels = pixels.shape
    assert pixels.dtype == np.uint8
    assert (channels, height % 2, width % 2) == (3, 0, 0)
    assert min(height, width) > PATCH
    assert pixels.std() > 10


def test_grey_photographs_get_three_equal_channels() -> None:
    pixels = photograph("camera.png")
    assert (pixels[..., 0] == pixels[..., 2]).all()


def test_pairs_do_not_depend_on_the_order_of_visits_or_on_global_random_state() -> None:
    there, back = pairs(), pairs()
    first = [there[index] for index in range(24)]
    order = list(range(24))
    random.Random(1).shuffle(order)
    torch.manual_seed(9)
    second = {index: back[index] for index in order}
    for index, (degraded, clean) in enumerate(first):
        assert torch.equal(degraded, second[index][0])
        assert torch.equal(clean, second[index][1])


def test_another_seed_gives_other_patches() -> None:
    assert not torch.equal(pairs(seed=1)[0][1], pairs(seed=2)[0][1])


def test_an_input_is_its_own_target_damaged_and_nobody_elses() -> None:
    items = [pairs()[index] for index in range(24)]
    for index, (degraded, clean) in enumerate(items):
        nearest = max(range(24), key=lambda other: psnr_db(degraded, items[other][1]))
        assert nearest == index
        assert 12 < psnr_db(degraded, clean) < 35


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_pairs_come_out_of_worker_processes_as_they_are_without(workers: int) -> None:
    dataset = pairs()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(5)).tolist()
    with DataLoader(dataset, batch_size=4, sampler=order, num_workers=workers) as loader:
        for first, (degraded, clean) in zip(range(0, 24, 4), loader):
            for row, index in enumerate(order[first : first + 4]):
                assert torch.equal(degraded[row], dataset[index][0])
                assert torch.equal(clean[row], dataset[index][1])


def test_images_are_channels_first_bytes_in_memory_of_their_own() -> None:
    degraded, clean = pairs()[0]
    for image in (degraded, clean):
        assert (image.shape, image.dtype) == ((3, PATCH, PATCH), torch.uint8)
    clean.zero_()
    assert pairs()[0][1].any()


def test_whole_photographs_come_round_repeatedly_with_other_damage() -> None:
    views = WholePhotographs(HELD_OUT, repeats=2)
    assert len(views) == 2 * len(HELD_OUT)
    assert views[0] is views[len(HELD_OUT)]
    inputs = Degraded(views, seed=0)
    assert not torch.equal(inputs[0], inputs[len(HELD_OUT)])


def test_rows_come_round_and_end() -> None:
    rows = Rows(torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1), count=7)
    assert [int(rows[index]) for index in range(len(rows))] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(IndexError):
        rows[7]


@pytest.mark.parametrize("index", [-1, 24])
def test_an_index_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"index {index} of 24"):
        pairs().targets[index]
