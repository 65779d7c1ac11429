"""What all examples read: pictures and their masks, as two data sets that know nothing of each other.

A picture is a piece of one of the demo's photographs, and its mask says which of its pixels are bright. Item `i` of
either data set is a pure function of `i`, as if it were read from a file.
"""

from __future__ import annotations

import random
from typing import TypeAlias

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.utils.data import Dataset

from shmloader.cli.photographs import PATCH, TRAINING, Clean, Patches, photograph

SEED = 0
BRIGHT = 120  # of 255
SIDE = PATCH  # pixels, of a picture
CROP = 48  # pixels a side, of a part of it
GRAIN = 7  # pixels a side of the window whose median takes the grain out; this many take a while

Place: TypeAlias = tuple[int, int]


class Pictures(Clean):
    """The inputs: (3, SIDE, SIDE) uint8."""

    def __init__(self, count: int) -> None:
        super().__init__(Patches(TRAINING, count, SEED))
        for name in TRAINING:
            photograph(name)  # decoded here, so that no clock counts it


class Masks(Dataset[Tensor]):
    """The targets: (1, SIDE, SIDE) uint8, 1 where the picture of the same index is bright."""

    def __init__(self, count: int) -> None:
        self.pictures = Pictures(count)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Tensor:
        return bright(self.pictures[index])


class SmoothMasks(Masks):
    """Targets that take long to make: the masks of the pictures without their grain."""

    def __getitem__(self, index: int) -> Tensor:
        return bright(without_grain(self.pictures[index]))


def bright(pictures: Tensor) -> Tensor:
    """The mask of one picture, or the masks of a batch of them: pixel by pixel."""
    return (pictures.sum(dim=-3, keepdim=True) > 3 * BRIGHT).to(torch.uint8)


def without_grain(picture: Tensor) -> Tensor:
    """Each pixel's median with those around it."""
    image = Image.fromarray(picture.permute(1, 2, 0).numpy()).filter(ImageFilter.MedianFilter(GRAIN))
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3).permute(2, 0, 1)


def random_place() -> Place:
    """Where a crop begins, drawn from the worker's `random`."""
    return random.randint(0, SIDE - CROP), random.randint(0, SIDE - CROP)


def crop(image: Tensor, place: Place) -> Tensor:
    """A piece of CROP x CROP pixels of a picture or of a mask."""
    top, left = place
    return image[:, top : top + CROP, left : left + CROP]
