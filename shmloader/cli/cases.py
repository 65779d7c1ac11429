"""The transport cases: datasets that only hand out what lies in memory, in the shapes that people really send.

Fetching, collating, handing over and using memory again is then all there is to measure. In the case "photo" every
sample is decoded from JPEG instead, so that the workers' own work dominates and a loader can only lose.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

ENDLESS = 1 << 40  # samples in a dataset: no round comes to the end of an epoch
DISTINCT_ROWS = 64  # samples that a case cycles through

Collate: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Case:
    """A dataset and how it is batched."""

    dataset: Callable[[], Dataset[Any]]
    batch_size: int
    what: str
    collate_fn: Collate | None = None


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows of one tensor, over and over."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.rows = torch.rand(DISTINCT_ROWS, *shape).mul_(255).to(dtype)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index % DISTINCT_ROWS], index


class Samples(Dataset[Any]):
    """A few samples that are there already, over and over."""

    def __init__(self, make: Callable[[int], Any], count: int = DISTINCT_ROWS) -> None:
        self.samples = [make(number) for number in range(count)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class Photos(Dataset[tuple[Tensor, int]]):
    """A few photograph-like JPEGs, kept in memory; each sample is one of them decoded, cropped and resized."""

    EDGE = 224  # pixels of a finished sample

    def __init__(self, sizes: Iterable[tuple[int, int]] = ((640, 480), (480, 640), (800, 600), (500, 375))) -> None:
        self.files = [encode_photo(width, height, seed) for seed, (width, height) in enumerate(sizes)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as file:
            image = file.convert("RGB")
        side = min(image.size) * (4 + index % 4) // 8
        left = (image.width - side) * (index % 5) // 4
        top = (image.height - side) * (index % 3) // 2
        box = (left, top, left + side, top + side)
        pixels = np.array(image.resize((self.EDGE, self.EDGE), Image.Resampling.BILINEAR, box=box))
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), index


def encode_photo(width: int, height: int, seed: int) -> bytes:
    """JPEG bytes with the spectrum of a photograph (detail fades with frequency) and correlated colours."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falloff = np.maximum(np.hypot(fy, fx), 1 / max(width, height)) ** -1.4
    noise = np.fft.rfft2(rng.standard_normal((3, height, width))) * falloff
    planes = np.fft.irfft2(noise, s=(height, width))
    planes = planes[:1] + 0.2 * planes  # mostly brightness, a little colour
    low, high = np.percentile(planes, (1, 99))
    pixels = (np.clip((planes - low) / (high - low), 0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _record(number: int) -> dict[str, Any]:
    return {
        "image": torch.rand(3, 64, 64),
        "mask": torch.ones(64, dtype=torch.bool),
        "box": torch.rand(4),
        "name": f"image-{number:06}.jpg",
        "label": number,
    }


def _pair(_: int) -> tuple[Tensor, Tensor]:
    return torch.rand(3, 64, 32), torch.rand(3, 64, 32)


def _arrays(number: int) -> tuple[Any, int]:
    return np.random.default_rng(number).random((3, 64, 64), dtype=np.float32), number


def _sequence(number: int) -> tuple[Tensor, int]:
    return torch.rand(70 + 187 * number // DISTINCT_ROWS, 48), number


def pad(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences padded to the longest, their lengths, and their targets."""
    sequences, targets = zip(*samples)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return pad_sequence(list(sequences), batch_first=True), lengths, torch.tensor(targets)


def _detection(number: int) -> dict[str, Tensor]:
    boxes = 1 + number % 8
    return {
        "boxes": torch.rand(boxes, 4),
        "labels": torch.arange(boxes),
        "area": torch.rand(boxes),
        "image_id": torch.tensor([number]),
    }


def as_list(samples: list[Any]) -> list[Any]:
    """The batch is the list of its samples."""
    return samples


@dataclass
class Graph:
    """A graph, or several that were joined into one."""

    x: Tensor  # (nodes, features)
    edge_index: Tensor  # (2, edges)
    edge_attr: Tensor  # (edges, features)
    y: Tensor
    batch: Tensor | None = None  # (nodes,): to which of the joined graphs a node belongs
    ptr: Tensor | None = None  # where each of the joined graphs begins


def _graph(number: int) -> Graph:
    nodes = 200 + number % 100
    edges = torch.randint(nodes, (2, 4 * nodes))
    return Graph(torch.rand(nodes, 32), edges, torch.rand(4 * nodes, 2), torch.tensor([number]))


def join_graphs(graphs: list[Graph]) -> Graph:
    """One graph whose parts are not connected, as graph libraries batch them."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Graph(
        x=torch.cat([graph.x for graph in graphs]),
        edge_index=torch.cat([graph.edge_index + start for graph, start in zip(graphs, ptr)], dim=1),
        edge_attr=torch.cat([graph.edge_attr for graph in graphs]),
        y=torch.cat([graph.y for graph in graphs]),
        batch=torch.arange(len(graphs)).repeat_interleave(sizes),
        ptr=ptr,
    )


CASES = {
    "L": Case(lambda: Rows((3, 224, 224), torch.float32), 64, "38.5 MB a batch: float images"),
    "M": Case(lambda: Rows((3, 64, 64), torch.float32), 32, "1.6 MB a batch: small images"),
    "S": Case(lambda: Rows((256,), torch.float32), 32, "33 kB a batch: feature vectors"),
    "XS": Case(lambda: Rows((16,), torch.float32), 1, "64 B a batch: one short row"),
    "U8": Case(lambda: Rows((3, 224, 224), torch.uint8), 128, "19.3 MB a batch: images as bytes"),
    "photo": Case(Photos, 16, "9.6 MB a batch: JPEGs decoded by the workers"),
    "dict": Case(lambda: Samples(_record), 32, "1.6 MB a batch: dict of three tensors, a str and an int"),
    "pairs": Case(lambda: Samples(_pair), 32, "1.6 MB a batch: (input, target) tensors"),
    "numpy": Case(lambda: Samples(_arrays), 32, "1.6 MB a batch: samples are numpy arrays"),
    "ragged": Case(lambda: Samples(_sequence), 32, "about 1.3 MB a batch: a collate function that pads", pad),
    "many": Case(lambda: Samples(_detection), 25, "100 small tensors a batch: a list of dicts", as_list),
    "graphs": Case(lambda: Samples(_graph), 16, "0.8 MB a batch: one object with six tensors", join_graphs),
}
