"""How to make torch's loader and ours alike, again and again, from what the user gave."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from torch import Generator, Tensor
from torch.utils.data import IterableDataset, SequentialSampler

import shmloader
from shmloader.cli.target import BenchError
from shmloader.loader import TorchLoader

Loader: TypeAlias = TorchLoader[Any]

TORCH, OURS = "torch", "shmloader"
KINDS: dict[str, Callable[..., Loader]] = {TORCH: TorchLoader, OURS: shmloader.DataLoader}
BATCH_SIZE = 32  # for a dataset, where the user names none
OF_OURS = ("memory_limit", "slots", "seeding", "max_workers", "copy")
GENERATORS = (Generator, np.random.Generator, np.random.RandomState, random.Random)
SHARED = ("dataset", "data_source")  # attributes of samplers that are read only, and may be large


@dataclass(frozen=True)
class Recipe:
    """All arguments of a loader but the number of workers."""

    dataset: Any
    batching: dict[str, Any]  # batch_size, drop_last and sampler; or batch_sampler; and generator
    others: dict[str, Any]
    crew: dict[str, Any] = field(default_factory=dict)  # what only a loader with workers may be given
    of_ours: dict[str, Any] = field(default_factory=dict)  # what only our loader may be given
    workers: int | None = None  # the given loader's own number
    notes: tuple[str, ...] = ()  # what is not taken over as it stands, for the user

    @property
    def iterable(self) -> bool:
        """Whether the dataset decides about the order itself."""
        return isinstance(self.dataset, IterableDataset)

    def make(self, kind: str, workers: int, **changes: Any) -> Loader:
        """A fresh loader whose sampler and generators are in the state in which they were given."""
        crew = self.crew if workers else {}
        of_ours = self.of_ours if kind == OURS else {}
        # One memo: a sampler often draws from the very generator that the loader was given.
        batching = _twin(self.batching, {})
        given = {**batching, **self.others, **crew, **of_ours, **changes}
        return KINDS[kind](self.dataset, num_workers=workers, **given)

    def endless(self, kind: str, workers: int) -> tuple[Loader, "Endless | None"]:
        """A loader whose epoch does not end, where the sampler decides about that, and the sampler that sees to it."""
        if self.iterable:
            return self.make(kind, workers), None
        batching = _twin(self.batching, {})
        name = "batch_sampler" if "batch_sampler" in batching else "sampler"
        endless = Endless(batching.get(name) or SequentialSampler(self.dataset))
        batching[name] = endless
        return self.make(kind, workers, **batching), endless

    def samples_per_batch(self, endless: "Endless | None") -> float | None:
        """Samples in a batch, on average; None where only the dataset knows."""
        batch_size: int | None = self.batching.get("batch_size")
        return batch_size or (endless.mean() if endless else None)


class Endless:
    """The passes of a sampler, one after the other; ends after one that is empty."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._pulled = self._samples = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            before = self._pulled
            for indices in self.sampler:
                self._pulled += 1
                self._samples += len(indices) if isinstance(indices, (list, tuple, np.ndarray)) else 1
                yield indices
            if self._pulled == before:
                return

    def mean(self) -> float | None:
        """Samples of what was drawn, for each draw."""
        return self._samples / self._pulled if self._pulled else None


class Run:
    """A loader in use."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._iterator: Any = None

    def begin(self) -> Iterator[Any]:
        """Starts an epoch; the one before has come to its end."""
        self._iterator = None
        self._iterator = iter(self.loader)
        return self._iterator  # type: ignore[no-any-return]

    def end(self) -> None:
        """Ends the workers, wherever in an epoch they are."""
        if isinstance(self.loader, shmloader.DataLoader):
            self.loader.close()
        elif hasattr(self._iterator, "_shutdown_workers"):  # torch's loader has no close()
            self._iterator._shutdown_workers()
        self.loader._iterator = self._iterator = None


@contextmanager
def running(loader: Loader) -> Iterator[Run]:
    """A loader whose workers have ended when this is left."""
    run = Run(loader)
    try:
        yield run
    finally:
        run.end()


def of_dataset(dataset: Any, batch_size: int | None, start_method: str | None) -> Recipe:
    """A recipe with torch's defaults."""
    return Recipe(
        dataset,
        batching={"batch_size": batch_size or BATCH_SIZE},
        others={},
        crew={"multiprocessing_context": start_method},
    )


def of_loader(loader: Loader, batch_size: int | None, start_method: str | None) -> Recipe:
    """A recipe that takes over all that a loader was given.

    Raises:
        BenchError: `batch_size` contradicts the loader, or its sampler can be read only once.
    """
    crew = {
        "multiprocessing_context": start_method or loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "timeout": loader.timeout,
    }
    others = {name: getattr(loader, name) for name in ("collate_fn", "pin_memory", "worker_init_fn", "in_order")}
    if loader.pin_memory_device:
        others["pin_memory_device"] = loader.pin_memory_device
    return Recipe(
        loader.dataset,
        batching=_batching(loader, batch_size),
        others=others,
        crew={name: value for name, value in crew.items() if value is not None},
        of_ours={name: getattr(loader, name) for name in OF_OURS} if isinstance(loader, shmloader.DataLoader) else {},
        workers=int(loader.num_workers),
        notes=_notes(loader),
    )


def _batching(loader: Loader, batch_size: int | None) -> dict[str, Any]:
    generator = {"generator": loader.generator}
    if loader.batch_size is not None:
        sizes = {"batch_size": batch_size or loader.batch_size, "drop_last": loader.drop_last}
        iterable = isinstance(loader.dataset, IterableDataset)
        return {**sizes, **generator, **({} if iterable else {"sampler": _repeatable(loader.sampler)})}
    if batch_size is not None:
        who = "a batch_sampler of its own" if loader.batch_sampler is not None else "batch_size=None"
        raise BenchError(f"--batch-size does not go with a DataLoader that has {who}; leave it out")
    if loader.batch_sampler is not None:
        return {"batch_sampler": _repeatable(loader.batch_sampler), **generator}
    iterable = isinstance(loader.dataset, IterableDataset)
    return {"batch_size": None, **generator, **({} if iterable else {"sampler": _repeatable(loader.sampler)})}


def _repeatable(sampler: Any) -> Any:
    if hasattr(sampler, "__next__"):
        raise BenchError(
            f"the DataLoader's sampler is an iterator ({type(sampler).__name__}) that can be read only once; "
            "a list or a Sampler can be read by one loader after the other"
        )
    return sampler


def _notes(loader: Loader) -> tuple[str, ...]:
    plain = TorchLoader, shmloader.DataLoader
    hooks = ("__iter__", "_get_iterator")
    own = [hook for hook in hooks if all(getattr(type(loader), hook) is not getattr(each, hook) for each in plain)]
    notes = []
    if own:
        notes.append(f"{type(loader).__name__}.{own[0]} is left out: compared are plain loaders with its arguments")
    if isinstance(loader, shmloader.DataLoader):
        if loader.device is not None:
            notes.append(
                f"device={loader.device!r} is left out: compared are batches on the CPU, as torch's loader has them"
            )
        if loader.late_targets:
            notes.append("late_targets is left out: compared are whole pairs")
    return tuple(notes)


def _twin(value: Any, memo: dict[int, Any]) -> Any:
    """A copy whose iteration does not change the original: of generators, samplers, lists and arrays, not of data."""
    if id(value) not in memo:
        memo[id(value)] = value  # for those that are not copied, and for circles
        memo[id(value)] = _copied(value, memo)
    return memo[id(value)]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, GENERATORS):
        return _generator(value)
    if isinstance(value, dict):
        return {key: _twin(part, memo) for key, part in value.items()}
    if isinstance(value, (Tensor, np.ndarray)):
        return copy.deepcopy(value)
    if type(value) is list:
        return [_twin(part, memo) for part in value] if _holds_samplers(value) else list(value)
    if _is_sampler(value):
        twin = copy.copy(value)
        for name, part in vars(value).items():
            if name not in SHARED:
                vars(twin)[name] = _twin(part, memo)
        return twin
    return value


def _generator(value: Any) -> Any:
    if not isinstance(value, Generator):
        return copy.deepcopy(value)
    twin = Generator(device=value.device)
    twin.set_state(value.get_state())
    return twin


def _holds_samplers(values: list[Any]) -> bool:
    return bool(values) and _is_sampler(values[0])


def _is_sampler(value: Any) -> bool:
    """Something with attributes that can be iterated and is no data: `Sampler` need not be its base."""
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__") and not hasattr(type(value), "__getitem__")
