"""Without workers: torch's batches to the letter, the large ones in memory that is used again."""

from __future__ import annotations

import collections
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data.dataloader import DataLoader as Stock

from shmloader import DataLoader
from shmloader.inprocess import LEAST_RECYCLED_BYTES
from tests.datasets import Items, Made
from tests.equal import assert_same

SIDE = 1024  # a float32 tensor of SIDE x SIDE takes 4 MiB
Pair = collections.namedtuple("Pair", "x y")


def image(index: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((SIDE, SIDE), index, dtype=dtype)


def recycled(loader: DataLoader[Any]) -> bool:
    return loader.stats().memory.pool > 0


PLAIN: dict[str, Callable[[int], Any]] = {
    "tensor": image,
    "pair": lambda n: (image(n), n),
    "dict": lambda n: {"x": image(n), "y": [n, 0.5 * n], "name": f"{n}.jpg", "flag": n > 1},
    "namedtuple": lambda n: Pair(image(n), np.int64(n)),
    "array": lambda n: (np.full((SIDE, SIDE), n, np.float32).T, n),
}
OTHERS: dict[str, Callable[[int], Any]] = {
    "small": lambda n: torch.full((LEAST_RECYCLED_BYTES // 4 // 2 - 1,), float(n)),
    "mixed dtypes": lambda n: image(n, torch.float64 if n % 2 else torch.float32),
    "grad": lambda n: image(n).requires_grad_(n % 2 == 1),
    "sparse": lambda n: image(n).to_sparse(),
    "ragged": lambda n: torch.zeros(SIDE * SIDE + n),
    "unknown": lambda n: (image(n), object()),
    "empty": lambda n: (image(n), torch.zeros(0)),
}


def epoch(loader: Any) -> list[Any]:
    """Everything that comes, an error by its type and text."""
    items: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            items.append(next(iterator))
        except StopIteration:
            return items
        except Exception as error:
            items.append((type(error).__name__, str(error)))


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_batches_are_torchs_and_only_large_plain_ones_are_recycled(name: str) -> None:
    data = Made(4, {**PLAIN, **OTHERS}[name])
    ours = DataLoader(data, 2)
    assert_same(epoch(ours), epoch(Stock(data, 2)))
    assert recycled(ours) is (name in PLAIN)


def test_batches_may_be_held_and_changed() -> None:
    loader = DataLoader(Made(12, image), 2)
    held = []
    for batch in loader:
        held.append(batch)
        batch.add_(100)
    assert [batch.unique().tolist() for batch in held] == [[100 + 2 * n, 101 + 2 * n] for n in range(6)]


def test_dropped_batches_are_the_next_ones_memory_in_this_epoch_and_the_next() -> None:
    loader = DataLoader(Made(20, image), 2)
    for _ in range(2):
        assert len({batch.data_ptr() for batch in loader}) == 2
    assert loader.stats().memory.pool == 2 * 2 * 4 * SIDE * SIDE
    loader.close()
    assert loader.stats().memory.pool == 0


def test_batches_in_memory_that_is_used_again_cost_no_page_faults() -> None:
    """Of 40 MiB each, for which the allocator would ask the system anew every time."""
    iterator = iter(DataLoader(Items([image(1)] * 80), 10))
    for _ in range(3):
        batch = next(iterator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        batch = next(iterator)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < batch.nbytes // resource.getpagesize() / 2, "in five batches, less than half of one's pages"


def test_collated_in_inference_mode_batches_are_inference_tensors_as_torchs() -> None:
    with torch.inference_mode():
        assert next(iter(DataLoader(Made(2, image), 2))).is_inference()


class Passing(TorchFunctionMode):
    """Sees every call of a torch function, as a default device or a tracer does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_where_something_watches_torchs_functions_torchs_functions_are_called() -> None:
    loader = DataLoader(Made(2, image), 2)
    with Passing():
        assert_same(list(loader), [torch.stack([image(0), image(1)])])
    assert not recycled(loader)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_collate_function_of_ones_own_is_called_as_ever(seeding: str) -> None:
    loader = DataLoader(Made(4, image), 2, collate_fn=lambda samples: [int(sample[0, 0]) for sample in samples])
    assert list(loader) == [[0, 1], [2, 3]]
    loader = DataLoader(Made(4, image), 2, seeding=seeding)
    assert [batch[:, 0, 0].tolist() for batch in loader] == [[0.0, 1.0], [2.0, 3.0]]
    assert recycled(loader)
