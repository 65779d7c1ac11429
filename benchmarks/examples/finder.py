"""What all examples train: a small network that finds the bright pixels of a picture."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
WIDTH = 16  # channels between the layers
WHITE = 255.0


class Finder(nn.Sequential):
    """(n, 3, height, width) float32 in; (n, 1, height, width) out, above 0 where it takes a pixel to be bright.

    The layers see squares of 2x2 pixels folded into channels, which is a quarter of the arithmetic.
    """

    def __init__(self) -> None:
        layers = nn.Conv2d(12, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, 4, 3, padding=1)
        super().__init__(nn.PixelUnshuffle(2), *layers, nn.PixelShuffle(2))


class Trainer:
    """A network and its optimizer, the same ones whenever they are made.

    It computes on one core, which leaves the others to the workers.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(SEED)
        self.model = Finder()
        self._optimizer = torch.optim.Adam(self.model.parameters(), 3e-3)

    def predict(self, pictures: Tensor) -> Tensor:
        """The forward pass on a batch of uint8 pictures."""
        prediction: Tensor = self.model(pictures.float() / WHITE)
        return prediction

    def learn(self, prediction: Tensor, masks: Tensor) -> float:
        """The backward pass and the optimizer's step; the loss."""
        loss = functional.binary_cross_entropy_with_logits(prediction, masks.float())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def step(self, pictures: Tensor, masks: Tensor) -> float:
        """One training step; the loss."""
        return self.learn(self.predict(pictures), masks)


def warm_up(shape: tuple[int, ...]) -> None:
    """One step of a network that is dropped again: what torch does once in a process is no example's to measure."""
    pictures = torch.zeros(shape, dtype=torch.uint8)
    Trainer().step(pictures, pictures[:, :1])
