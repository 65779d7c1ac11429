"""torch's loader beside ours: how fast each hands batches over, and what each holds while they are kept."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import TypeAlias

from torch import Tensor
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.cli import footprint
from shmloader.loader import TorchLoader

Pair: TypeAlias = tuple[Tensor, Tensor]
Loader: TypeAlias = TorchLoader[Pair]

OURS, THEIRS = "shmloader", "torch"
KINDS: dict[str, Callable[..., Loader]] = {THEIRS: TorchLoader, OURS: DataLoader}
PREFETCH = 2  # batches that each worker is given ahead of need
LOOK_EVERY = 10  # batches between two looks at the memory; a look costs milliseconds


@dataclass(frozen=True)
class Race:
    """Both loaders on one dataset in alternating rounds."""

    batch_bytes: int
    rounds: int
    torch_batches_per_s: float  # median
    shmloader_batches_per_s: float  # median
    ratio: float  # median of the rounds' own ratios, above 1 where ours is faster
    ratio_low: float  # half of the rounds lie between these two
    ratio_high: float
    torch_cpu_s: float | None  # processor seconds a batch, in all processes; None where the system does not tell
    shmloader_cpu_s: float | None


@dataclass(frozen=True)
class Holding:
    """What a loader adds to the process tree while its batches are kept."""

    batches: int
    batch_bytes: int
    peak_bytes: int  # above what there was before the loader
    descriptors: int  # in the training process, above what there was before the loader


def race(pairs: Callable[[int], Dataset[Pair]], batch_size: int, workers: int, batches: int, rounds: int) -> Race:
    """Times both loaders, one after the other, `rounds` times over `batches` batches.

    Rounds are short and many: what else the machine does comes in bursts, which should hit both alike.
    `pairs(count)` makes the dataset; it is asked for the batches of the warm-up as well.
    """
    dataset = pairs(batch_size * (batches + PREFETCH * workers))
    with _loader(THEIRS, dataset, batch_size, workers) as theirs, _loader(OURS, dataset, batch_size, workers) as ours:
        lanes = _Lane(theirs), _Lane(ours)
        for _ in range(rounds):
            for lane in lanes:
                lane.run()
    return _judge(*lanes)


class _Lane:
    """One loader's side of a race."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.batch_bytes = _drain(loader)  # starts the workers and warms every cache; not counted
        self.batch_s: list[float] = []  # by round
        self.cpu_s: list[float] = []  # a batch, by round

    def run(self) -> None:
        """One round."""
        before = footprint.tree_cpu_s() if footprint.readable() else 0.0
        self.batch_s.append(_seconds_per_batch(self.loader))
        if footprint.readable():
            self.cpu_s.append((footprint.tree_cpu_s() - before) / len(self.loader))


def _judge(theirs: _Lane, ours: _Lane) -> Race:
    low, middle, high = quantiles((their_s / our_s for their_s, our_s in zip(theirs.batch_s, ours.batch_s)), n=4)
    return Race(
        batch_bytes=ours.batch_bytes,
        rounds=len(ours.batch_s),
        torch_batches_per_s=1 / median(theirs.batch_s),
        shmloader_batches_per_s=1 / median(ours.batch_s),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        torch_cpu_s=fmean(theirs.cpu_s) if theirs.cpu_s else None,
        shmloader_cpu_s=fmean(ours.cpu_s) if ours.cpu_s else None,
    )


def hold(kind: str, dataset: Dataset[Pair], batch_size: int, workers: int) -> Holding:
    """Reads and keeps every batch of the dataset, and looks at the process tree now and then."""
    gc.collect()
    bytes_before, descriptors_before = footprint.tree_bytes(), footprint.descriptors()
    kept: list[Pair] = []
    peak_bytes = 0
    with _loader(kind, dataset, batch_size, workers) as loader:
        for batch in loader:
            _read(batch)
            kept.append(batch)
            if len(kept) % LOOK_EVERY == 0:
                peak_bytes = max(peak_bytes, footprint.tree_bytes())
        descriptors = footprint.descriptors()
    return Holding(len(kept), _nbytes(kept[0]), peak_bytes - bytes_before, descriptors - descriptors_before)


@contextmanager
def _loader(kind: str, dataset: Dataset[Pair], batch_size: int, workers: int) -> Iterator[Loader]:
    """A loader whose workers live from round to round and are gone afterwards."""
    loader = KINDS[kind](
        dataset, batch_size=batch_size, num_workers=workers, prefetch_factor=PREFETCH, persistent_workers=True
    )
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
    """Over one epoch, less the batches that the workers are given before the first is asked for."""
    batches = iter(loader)
    for _ in range(PREFETCH * loader.num_workers):
        next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return (time.perf_counter() - start) / count


def _read(batch: Pair) -> None:
    """Looks at every byte, as a training step does: shared pages that nobody has looked at appear in no process."""
    for tensor in batch:
        tensor.max()


def _nbytes(batch: Pair) -> int:
    return sum(tensor.nbytes for tensor in batch)
