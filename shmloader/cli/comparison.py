"""torch's loader beside ours: how fast each hands batches over, and what each holds while they are kept."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.cli import footprint

Pair: TypeAlias = tuple[Tensor, Tensor]
Loader: TypeAlias = TorchLoader[Pair]

OURS, THEIRS = "shmloader", "torch"
KINDS: dict[str, Callable[..., Loader]] = {THEIRS: TorchLoader, OURS: DataLoader}
SAMPLE_EVERY = 10  # batches between two looks at the memory; a look costs milliseconds


@dataclass(frozen=True)
class Race:
    """Both loaders on one dataset in alternating rounds."""

    batch_bytes: int
    rounds: int
    torch_batches_per_s: float  # median
    shmloader_batches_per_s: float  # median
    ratio: float  # median of the rounds' own ratios, above 1 where ours is faster


@dataclass(frozen=True)
class Holding:
    """What a loader adds to the process tree while its batches are kept."""

    batches: int
    batch_bytes: int
    peak_bytes: int  # above what there was before the loader
    descriptors: int  # in the training process, above what there was before the loader


def race(dataset: Dataset[Pair], batch_size: int, workers: int, rounds: int) -> Race:
    """Times both loaders over the whole dataset, one after the other, `rounds` times."""
    spent: dict[str, list[float]] = {name: [] for name in KINDS}
    with _loader(THEIRS, dataset, batch_size, workers) as theirs, _loader(OURS, dataset, batch_size, workers) as ours:
        loaders = {THEIRS: theirs, OURS: ours}
        for loader in loaders.values():
            batch_bytes = _drain(loader)  # starts the workers and warms every cache; not counted
        for _ in range(rounds):
            for name, loader in loaders.items():
                spent[name].append(_seconds_per_batch(loader))
    ratios = [slow / fast for slow, fast in zip(spent[THEIRS], spent[OURS])]
    rates = {name: 1 / median(seconds) for name, seconds in spent.items()}
    return Race(batch_bytes, rounds, rates[THEIRS], rates[OURS], median(ratios))


def hold(kind: str, dataset: Dataset[Pair], batch_size: int, workers: int) -> Holding:
    """Keeps every batch of the dataset and looks at the process tree now and then."""
    gc.collect()
    memory_before, descriptors_before = footprint.tree_bytes(), footprint.descriptors()
    kept: list[Pair] = []
    peak_bytes = 0
    with _loader(kind, dataset, batch_size, workers) as loader:
        for batch in loader:
            kept.append(batch)
            if len(kept) % SAMPLE_EVERY == 0:
                peak_bytes = max(peak_bytes, footprint.tree_bytes())
        descriptors = footprint.descriptors()
    return Holding(len(kept), _nbytes(kept[0]), peak_bytes - memory_before, descriptors - descriptors_before)


@contextmanager
def _loader(kind: str, dataset: Dataset[Pair], batch_size: int, workers: int) -> Iterator[Loader]:
    """A loader whose workers live from round to round and are gone afterwards."""
    arguments: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "persistent_workers": True}
    loader = KINDS[kind](dataset, **arguments)
    try:
        yield loader
    finally:
        if isinstance(loader, DataLoader):
            loader.close()
        else:
            loader._iterator = None  # torch's has no close(): its workers go with its iterator


def _drain(loader: Loader) -> int:
    """Reads one epoch; the bytes of its last batch."""
    nbytes = 0
    for batch in loader:
        nbytes = _nbytes(batch)
    return nbytes


def _seconds_per_batch(loader: Loader) -> float:
    """Over one epoch, less the batches that the workers are given at once before the first is asked for."""
    batches = iter(loader)
    for _ in range(loader.num_workers * (loader.prefetch_factor or 1)):
        next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - start) / count


def _nbytes(batch: Pair) -> int:
    return sum(tensor.nbytes for tensor in batch)
