"""Putting this loader in the place of torch's, for code that cannot be edited.

While patched, every module's name for torch's ``DataLoader`` (and for its multi-process iterator, which torch's own
class and fastai's make) stands for the classes below. Modules that are imported later find them under torch's names.
What was bound otherwise before, such as the base of a class that exists already, stays torch's: such loaders are
torch's to the outside, and only their iterators are ours.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shmloader import loader as ours
from shmloader.iterator import ShmIter
from shmloader.loader import TorchLoader, check_options
from shmloader.memory import segment

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class _Patch:
    """What loaders that are made by torch's name get."""

    num_workers: int | str | None = None
    force: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    max_batches: int | None = None

    def workers(self, dataset: Any, asked: Any) -> Any:
        """How many workers a loader gets that asked for ``asked``."""
        if self.num_workers is None or not isinstance(asked, int) or asked < 0:
            return asked
        fixed = asked == 0 or isinstance(dataset, IterableDataset)
        return asked if fixed and not self.force else self.num_workers


_patch: _Patch | None = None


class _StandsFor(ABCMeta):
    """Lets a class answer for torch's, whose instances and subclasses were perhaps made before.

    An ABCMeta, or ``class X(DataLoader, ABC)`` would not do any more.
    """

    torchs: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.torchs) if "torchs" in cls.__dict__ else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.torchs) if "torchs" in cls.__dict__ else super().__subclasscheck__(subclass)


class DataLoader(ours.DataLoader[T_co], metaclass=_StandsFor):
    """What torch's name stands for while patched: :class:`shmloader.DataLoader` with the options of the patch."""

    torchs = TorchLoader

    def _resolve(self, dataset: Any, num_workers: Any, options: dict[str, Any]) -> Any:
        if _patch is None:
            return num_workers
        for name, value in _patch.options.items():
            if options[name] in (None, False):
                options[name] = value
        return _patch.workers(dataset, num_workers)

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        if _patch is None or _patch.max_batches is None:
            return iterator
        return _First(iterator, _patch.max_batches)

    def __len__(self) -> int:
        length = super().__len__()
        return length if _patch is None or _patch.max_batches is None else min(length, _patch.max_batches)


class _First:
    """The first batches of an epoch: all else is the iterator's own."""

    def __init__(self, iterator: Any, count: int) -> None:
        self._iterator, self._left = iterator, count

    def __iter__(self) -> _First:
        return self

    def __next__(self) -> Any:
        if not self._left:
            self._iterator = None  # ends its workers, unless the loader keeps it
            raise StopIteration
        batch = next(self._iterator)
        self._left -= 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class MultiProcessingIter(ShmIter, metaclass=_StandsFor):
    """What the name of torch's multi-process iterator stands for while patched: ours, for loaders that are not."""

    torchs = _MultiProcessingDataLoaderIter

    def __new__(cls, loader: Any) -> Any:
        """Ours for what it can serve, torch's for the rest: data pipes change their own graph."""
        if not segment.supported() or isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
            return _MultiProcessingDataLoaderIter(loader)
        return super().__new__(cls)

    def __init__(self, loader: Any) -> None:
        named = {"memory_limit": None, "slots": None, "seeding": None, "copy": False, "device": None}
        named["late_targets"] = False  # no option of a patch: foreign code unpacks plain pairs
        named |= _patch.options if _patch is not None else {}
        options = SimpleNamespace(num_workers=loader.num_workers, **named)
        super().__init__(loader, ours.terms_of(loader, options))


#: torch's classes and what stands for them.
_STAND_INS: dict[type, type] = {TorchLoader: DataLoader, _MultiProcessingDataLoaderIter: MultiProcessingIter}


def patch_torch(
    *,
    num_workers: int | str | None = None,
    force: bool = False,
    memory_limit: int | str | None = None,
    slots: int | None = None,
    seeding: str | None = None,
    max_workers: int | None = None,
    copy: bool = False,
    device: str | int | torch.device | None = None,
) -> None:
    """From now on, let torch's ``DataLoader`` be shmloader's, wherever in this process its name is used.

    That is ``torch.utils.data.DataLoader`` and every module's global that refers to it, in modules that are imported
    (Accelerate, Transformers, your own) as in those that will be. Classes that were derived from it before keep
    torch's code, but get our iterators. Patching again replaces the options.

    Args:
        num_workers: instead of the number that a loader asks for, if it asks for workers and its data set is
            map-style: an int of 1 or more, or ``"auto"``. Default: what it asks for.
        force: ``num_workers`` also for iterable data sets, and for loaders that ask for no workers.
        memory_limit, slots, seeding, max_workers, copy, device: as of :class:`shmloader.DataLoader`, for every loader
            that is made by torch's name and does not say so itself.

    Raises:
        TypeError, ValueError: as :class:`shmloader.DataLoader` would for these options; then nothing is patched.
    """
    options: dict[str, Any] = {"memory_limit": memory_limit, "slots": slots, "seeding": seeding}
    options |= {"max_workers": max_workers, "copy": copy, "device": device}
    check_options(**options)
    _apply(_Patch(_checked(num_workers), force, options))


def unpatch_torch() -> None:
    """Give torch's names back. Loaders that were made meanwhile stay what they are. Safe to call twice."""
    _apply(None)


@contextmanager
def patched_torch(
    *,
    num_workers: int | str | None = None,
    force: bool = False,
    memory_limit: int | str | None = None,
    slots: int | None = None,
    seeding: str | None = None,
    max_workers: int | None = None,
    copy: bool = False,
    device: str | int | torch.device | None = None,
) -> Iterator[None]:
    """:func:`patch_torch` inside, and what was before afterwards."""
    before = _patch
    patch_torch(
        num_workers=num_workers,
        force=force,
        memory_limit=memory_limit,
        slots=slots,
        seeding=seeding,
        max_workers=max_workers,
        copy=copy,
        device=device,
    )
    try:
        yield
    finally:
        _apply(before)


def end_epochs_after(max_batches: int | None) -> None:
    """While patched as now, end the epochs of loaders that are made by torch's name after so many batches."""
    assert _patch is not None
    _apply(replace(_patch, max_batches=max_batches))


def _checked(num_workers: int | str | None) -> int | str | None:
    automatic = num_workers in (None, "auto")
    if not automatic and (not isinstance(num_workers, int) or isinstance(num_workers, bool)):
        raise TypeError(f"num_workers must be an int of 1 or more, 'auto' or None, got {num_workers!r}")
    if isinstance(num_workers, int) and num_workers < 1:
        raise ValueError(f"num_workers must be 1 or more: patching turns no workers off, got {num_workers}")
    return num_workers


def _apply(patch: _Patch | None) -> None:
    global _patch
    _patch = patch
    swap = _STAND_INS if patch is not None else {ours: torchs for torchs, ours in _STAND_INS.items()}
    for name, module in tuple(sys.modules.items()):
        # Our own modules mean torch's loader where they say so. By type(): isinstance() would wake the odd object that
        # warns, or imports, when its attributes are looked at.
        if issubclass(type(module), ModuleType) and name.partition(".")[0] != "shmloader":
            _rebind(module, swap)


def _rebind(module: ModuleType, swap: dict[type, type]) -> None:
    # The dict, not getattr: lazy modules would import what they only promise.
    names = vars(module)
    for name, value in tuple(names.items()):
        for before, after in swap.items():
            if value is before:
                names[name] = after
            elif type(value) is tuple and any(part is before for part in value):  # fastai's pair of iterators
                names[name] = value = tuple([after if part is before else part for part in value])
