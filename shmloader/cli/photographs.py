"""Photographs as pairs: a degraded image and the clean one that it was made from.

Every view and every degradation is a pure function of (seed, index). The two halves of a pair are fetched by two
datasets that know nothing of each other, in whatever worker the batch goes to; only that purity keeps them together.
"""

import io
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch.utils.data import Dataset

Pixels: TypeAlias = NDArray[np.uint8]
"""One image, (height, width, 3) uint8, RGB."""

# Read straight from scikit-image's wheel: skimage.data would fall back to a download when a file is missing.
FOLDER = files("skimage") / "data"
TRAINING = (
    "astronaut.png",
    "brick.png",
    "chelsea.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "motorcycle_left.png",
)
HELD_OUT = ("camera.png", "coffee.png", "rocket.jpg")

PATCH = 64  # pixels a side; even, since the restorer folds squares of 2x2 pixels
BLUR_PIXELS = (0.3, 0.8)  # standard deviation of the Gaussian blur
NOISE_LEVELS = (15.0, 30.0)  # standard deviation of the noise, of 255
JPEG_QUALITY = (50, 90)

_CROP, _DEGRADATION = 0, 1  # one random stream each: a view must not shift when a degradation draws once more

ItemT = TypeVar("ItemT")


class Views(Protocol):
    """Clean images by index, the same ones for whoever asks."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Pixels: ...


@cache
def photograph(name: str) -> Pixels:
    """One photograph of the wheel with even sides; grey ones get three equal channels.

    Cached per process: a dataset carries names only, so that it costs a worker nothing to receive.
    """
    with (FOLDER / name).open("rb") as file, Image.open(file) as image:
        pixels = np.array(image.convert("RGB"))
    height, width, _ = pixels.shape
    pixels = pixels[: height - height % 2, : width - width % 2]
    pixels.flags.writeable = False
    return pixels


def degrade(pixels: Pixels, draws: np.random.Generator) -> Pixels:
    """Blur, noise and a JPEG round trip, of random strengths. Same shape and dtype."""
    blur, noise = draws.uniform(*BLUR_PIXELS), draws.uniform(*NOISE_LEVELS)
    quality = int(draws.integers(*JPEG_QUALITY, endpoint=True))
    blurred = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(blur))
    grain = draws.standard_normal(pixels.shape, dtype=np.float32) * np.float32(noise)
    noisy = (np.asarray(blurred) + grain).clip(0, 255).round().astype(np.uint8)
    return _through_jpeg(noisy, quality)


def _through_jpeg(pixels: Pixels, quality: int) -> Pixels:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    file.seek(0)
    with Image.open(file) as image:
        return np.array(image)


class Patches:
    """`count` square patches at random places of the named photographs, each photograph as likely as the others."""

    def __init__(self, names: Sequence[str], count: int, seed: int) -> None:
        self.names = tuple(names)
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pixels:
        """Patch `index`, (PATCH, PATCH, 3) uint8."""
        draws = _draws(self.seed, _in_range(index, self.count), _CROP)
        pixels = photograph(self.names[draws.integers(len(self.names))])
        top = draws.integers(pixels.shape[0] - PATCH, endpoint=True)
        left = draws.integers(pixels.shape[1] - PATCH, endpoint=True)
        return pixels[top : top + PATCH, left : left + PATCH]


class WholePhotographs:
    """The named photographs, one after the other, `repeats` times over."""

    def __init__(self, names: Sequence[str], repeats: int) -> None:
        self.names = tuple(names) * repeats

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Pixels:
        """Photograph `index`, (height, width, 3) uint8."""
        return photograph(self.names[_in_range(index, len(self))])


class Clean(Dataset[torch.Tensor]):
    """The targets: each view as it is."""

    def __init__(self, views: Views) -> None:
        self.views = views

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, index: int) -> torch.Tensor:
        """(3, height, width) uint8."""
        return _channels_first(self.views[index])


class Degraded(Dataset[torch.Tensor]):
    """The inputs: each view blurred, noisy and JPEG-coded, the same way at every visit."""

    def __init__(self, views: Views, seed: int) -> None:
        self.views = views
        self.seed = seed

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, index: int) -> torch.Tensor:
        """(3, height, width) uint8."""
        return _channels_first(degrade(self.views[index], _draws(self.seed, index, _DEGRADATION)))


class Rows(Dataset[torch.Tensor]):
    """Images that lie decoded in memory, read `count` times round."""

    def __init__(self, images: torch.Tensor, count: int) -> None:
        """`images`: (n, 3, height, width) uint8."""
        self.images = images
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """(3, height, width) uint8, a view."""
        return self.images[_in_range(index, self.count) % len(self.images)]


def _in_range(index: int, count: int) -> int:
    """`index`, or the IndexError that ends a plain `for` over a dataset."""
    if not 0 <= index < count:
        raise IndexError(f"index {index} of {count}")
    return index


def _draws(seed: int, index: int, stream: int) -> np.random.Generator:
    """The random numbers of one index, whoever asks and in whatever order."""
    return np.random.default_rng((seed, index, stream))


def _channels_first(pixels: Pixels) -> torch.Tensor:
    """(height, width, 3) to (3, height, width), in memory of its own."""
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
