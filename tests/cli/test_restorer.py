"""The model, its training and the measure that judges it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from shmloader.cli.restorer import PEAK_RATE, Restorer, Trainer, psnr_db, restore


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Images this small take no longer so, and with two each step would wait for the one whose core is taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noisy_ramps(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth images and the same with noise, (count, 3, 32, 32) uint8."""
    ramp = torch.linspace(40, 200, 32)
    clean = (ramp[:, None] * 0.5 + ramp[None, :] * 0.5).expand(count, 3, 32, 32)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)) * 25
    return (clean + noise).clamp(0, 255).to(torch.uint8), clean.to(torch.uint8)


def test_psnr_of_a_known_error() -> None:
    target = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
    assert psnr_db(target + 5, target) == pytest.approx(20 * math.log10(255 / 5))
    assert psnr_db(target, target + 5) == pytest.approx(20 * math.log10(255 / 5))  # bytes do not wrap
    assert psnr_db(torch.zeros_like(target), torch.full_like(target, 255)) == 0
    assert psnr_db(target, target) == math.inf


def test_a_restored_image_has_the_shape_and_dtype_of_the_given_one() -> None:
    images = torch.randint(0, 256, (2, 3, 10, 14), dtype=torch.uint8)
    restored = restore(Restorer(), images)
    assert (restored.shape, restored.dtype) == (images.shape, torch.uint8)


@pytest.mark.slow
def test_training_restores_and_is_the_same_for_the_same_seed() -> None:
    degraded, clean = noisy_ramps(4)
    outputs = []
    for _ in range(2):
        torch.manual_seed(1)
        model = Restorer()
        trainer = Trainer(model)
        for step in range(60):
            trainer.step(degraded, clean, step / 60)
        outputs.append(restore(model, degraded))
    assert psnr_db(outputs[0], clean) > psnr_db(degraded, clean) + 3
    assert torch.equal(*outputs)


@pytest.mark.slow
def test_the_rate_rises_then_falls_to_nothing() -> None:
    model = Restorer()
    trainer = Trainer(model)
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    rates = []
    for step in range(101):
        trainer.step(images, images, step / 100)
        rates.append(trainer.rate)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert PEAK_RATE * 0.8 < max(rates) <= PEAK_RATE
    assert rates[-1] == 0
