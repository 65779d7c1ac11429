"""The restorer: a small convolutional network that takes blur, noise and JPEG blocks out of an image."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 32  # channels between the layers
LAYERS = 4
PEAK_RATE = 3e-3
WARM_UP_STEPS = 20  # without them the first large steps leave the network at "change nothing" for good
WHITE = 255.0


class Restorer(nn.Module):
    """Says what to take away from a degraded image.

    The layers see squares of 2x2 pixels folded into channels: a quarter of the arithmetic, twice the field of view.
    """

    def __init__(self) -> None:
        super().__init__()
        widths = [12, *[WIDTH] * (LAYERS - 1), 12]
        convolutions = [nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)]
        for convolution in convolutions:
            _initialise(convolution)
        with torch.no_grad():
            convolutions[-1].weight.mul_(0.1)  # starts close to "change nothing"
        steps: list[nn.Module] = [convolutions[0]]
        for convolution in convolutions[1:]:
            steps += [nn.LeakyReLU(0.1), convolution]
        self.damage = nn.Sequential(*steps)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, height, width) float32 in 0..1, even sides; the same shape comes back, not clipped."""
        folded = functional.pixel_unshuffle(images - 0.5, 2)
        return images - functional.pixel_shuffle(self.damage(folded), 2)


def _initialise(convolution: nn.Conv2d) -> None:
    nn.init.orthogonal_(convolution.weight, math.sqrt(2))
    if convolution.bias is not None:
        nn.init.zeros_(convolution.bias)


class Trainer:
    """Adam with a warm-up and a cosine down to nothing."""

    def __init__(self, model: Restorer) -> None:
        self.model = model
        self.steps = 0
        self._optimizer = torch.optim.Adam(model.parameters(), PEAK_RATE)

    def step(self, degraded: Tensor, clean: Tensor, progress: float) -> float:
        """One step on uint8 batches (n, 3, height, width); `progress` in 0..1. Returns the mean absolute error."""
        self._set_rate(progress)
        loss = functional.l1_loss(self.model(to_unit(degraded)), to_unit(clean))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        return loss.item()

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def _set_rate(self, progress: float) -> None:
        warmth = min(1.0, (self.steps + 1) / (WARM_UP_STEPS + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK_RATE * warmth * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def to_unit(images: Tensor) -> Tensor:
    """uint8 to float32 in 0..1."""
    return images.float() / WHITE


@torch.inference_mode()
def restore(model: Restorer, images: Tensor) -> Tensor:
    """Restored images, uint8 as the given ones: what a viewer would see, rounding included."""
    restored: Tensor = model(to_unit(images))
    return (restored * WHITE).round().clamp(0, WHITE).to(torch.uint8)


def psnr_db(images: Tensor, target: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of uint8 images of one shape; infinite when they are equal."""
    error = (images.double() - target.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(WHITE**2 / error)
