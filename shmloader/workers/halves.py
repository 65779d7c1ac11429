"""The halves of a data set of pairs, each a data set of its own, so that inputs need not wait for targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

from shmloader.workers.protocol import HALVES

LOADERS = ("load_input", "load_target")


def fetched_by(dataset: Any, collate_fns: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """What is fetched with each of the collate functions: the data set itself, or its halves."""
    parts = halves_of(dataset) if len(collate_fns) == HALVES else (dataset,)
    return list(zip(parts, collate_fns))


def halves_of(dataset: Any) -> tuple[Any, Any]:
    """The inputs and the targets of ``dataset``, indexed as it is.

    That are those of a :class:`~shmloader.PairedDataset`, the members of a ``StackDataset`` of two, or what its methods
    ``load_input(index)`` and ``load_target(index)`` return; also within torch's ``Subset`` and ``ConcatDataset``.

    Raises:
        TypeError: it has no halves that can be had one without the other.
    """
    present = [name for name in LOADERS if callable(getattr(dataset, name, None))]
    if len(present) == HALVES:
        return _Loaded(dataset, dataset.load_input), _Loaded(dataset, dataset.load_target)
    kind = type(dataset)
    if present:
        missing = next(name for name in LOADERS if name not in present)
        raise TypeError(f"late_targets needs both load_input and load_target; {kind.__name__} has no {missing}")
    if callable(getattr(kind, "_halves", None)):  # a PairedDataset
        inputs, targets = dataset._halves()
        return inputs, targets
    # Exact types: a subclass may have items of its own.
    if kind is StackDataset and isinstance(dataset.datasets, tuple) and len(dataset.datasets) == HALVES:
        first, second = (_Member(dataset, place) for place in range(HALVES))
        return first, second
    if kind is Subset:
        inputs, targets = halves_of(dataset.dataset)
        return Subset(inputs, dataset.indices), Subset(targets, dataset.indices)
    if kind is ConcatDataset:
        pairs = [halves_of(part) for part in dataset.datasets]
        return ConcatDataset([inputs for inputs, _ in pairs]), ConcatDataset([targets for _, targets in pairs])
    raise TypeError(
        f"late_targets needs a data set whose inputs can be had without its targets: a map-style PairedDataset, a "
        f"StackDataset of two, or one with load_input(index) and load_target(index), also in a Subset or a "
        f"ConcatDataset; got {kind.__name__}"
    )


class _Loaded(Dataset[Any]):
    """What one of a data set's two methods loads."""

    def __init__(self, dataset: Any, load: Callable[[Any], Any]) -> None:
        self._dataset, self._load = dataset, load

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._load(index)


class _Member(Dataset[Any]):
    """One member of a ``StackDataset``, asked as the whole asks it."""

    def __init__(self, stack: Any, place: int) -> None:
        self._stack, self._place = stack, place

    def __len__(self) -> int:
        return len(self._stack)

    def __getitem__(self, index: Any) -> Any:
        return self._stack.datasets[self._place][index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The items at these indices."""
        member = self._stack.datasets[self._place]
        if not callable(getattr(member, "__getitems__", None)):
            return [member[index] for index in indices]
        items = list(member.__getitems__(indices))
        if len(items) != len(indices):
            raise ValueError(f"__getitems__ of {type(member).__name__} returned {len(items)} items for {len(indices)}")
        return items
