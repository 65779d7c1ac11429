"""Pairs that stay pairs: one stream of indices, or of items, over the data sets of inputs and of targets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

from torch.utils.data import Dataset, IterableDataset, StackDataset

from shmloader.sidecollate import Collate, SideCollate, checked_collate
from shmloader.sides import (
    check_repeating,
    checked_cycle,
    checked_dict,
    checked_pair,
    checked_sides,
    common_length,
    kind_of,
    named,
    zipped,
)

T_co = TypeVar("T_co", covariant=True)
X = TypeVar("X")
Y = TypeVar("Y")
X2 = TypeVar("X2")
Y2 = TypeVar("Y2")
P = TypeVar("P", bound="PairedDataset[Any]")

Names = str | Sequence[str] | None
ByName = dict[str, Collate | None]


class PairedDataset(Dataset[T_co]):
    """Items that belong together, out of a data set of inputs and one of targets.

    ``PairedDataset(inputs, targets)`` has the items ``(inputs[i], targets[i])``. With names, two or more sides give
    dicts, as torch's ``StackDataset`` does: ``PairedDataset(inputs=a, targets=b, weights=c)`` has the items
    ``{"inputs": a[i], "targets": b[i], "weights": c[i]}``.

    Over map-style data sets it is a :class:`PairedItems`, one of torch's ``StackDataset``, and one sampler drives all
    sides. Over iterable ones it is a :class:`PairedStream`, an ``IterableDataset``, and each worker zips what it sees
    itself. All parts of a batch lie in one slot and are published together, or with late targets in one slot for each
    half, made from the same indices; so no shuffling, no number of workers and no restart can part them.

    Args:
        sides: the inputs and the targets, by position; both map-style or both iterable.
        members: two or more sides by name, instead. The names of the options below are taken.
        cycle: name of the side that repeats from its beginning where it is shorter, or a list of such names; sides by
            position are ``"inputs"`` and ``"targets"``. Default: none, and sides of unequal length are an error.
            A map-style side repeats by its index modulo its length, an iterable one is iterated anew.
        joint_transform: sees the whole item, so that a random crop is the same crop on all sides:
            ``joint_transform(input, target) -> (input, target)``, or ``joint_transform(item) -> item`` for dicts.
        collate: a collate function for each side, from the list of its halves to its part of the batch: a tuple in
            order or a dict by name, with None, or no entry, for torch's ``default_collate`` (or what pairs as a side
            ask for themselves). The batch is a list of the sides' parts, or a dict. It becomes :attr:`collate_fn`,
            which shmloader's ``DataLoader`` uses unless it is given a ``collate_fn`` of its own; torch's must be
            given it.

    Attributes:
        datasets: the sides: a tuple, or a dict if they have names.
        cycle: the names of the sides that repeat.
        joint_transform: as given.
        collate_fn: the collate function for loaders; None without ``collate``.

    Raises:
        TypeError: map-style and iterable sides are mixed; a side is neither; there are fewer than two sides, or more
            than two without names; an option is of the wrong type.
        ValueError: unequal lengths; a side that is to repeat is empty or is the longer one; an option names a side that
            is not there.
    """

    datasets: tuple[Any, ...] | dict[str, Any]

    def __new__(cls: type[P], *sides: Any, **options: Any) -> P:
        """One of the two kinds, by the sides."""
        if issubclass(cls, (PairedItems, PairedStream)):
            return super().__new__(cls)
        streams = any(isinstance(side, IterableDataset) for side in (*sides, *options.values()))
        kind: type[PairedDataset[Any]] = PairedStream if streams else PairedItems
        if cls is not PairedDataset:
            raise TypeError(f"{cls.__name__} must derive from shmloader.paired.{kind.__name__}, not from PairedDataset")
        return cast(P, object.__new__(kind))

    @overload
    def __init__(
        self: PairedDataset[tuple[X, Y]],
        inputs: Dataset[X] | Sequence[X],
        targets: Dataset[Y] | Sequence[Y],
        /,
        *,
        cycle: Names = None,
        joint_transform: None = None,
        collate: tuple[Collate | None, Collate | None] | ByName | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: PairedDataset[tuple[X2, Y2]],
        inputs: Dataset[X] | Sequence[X],
        targets: Dataset[Y] | Sequence[Y],
        /,
        *,
        cycle: Names = None,
        joint_transform: Callable[[X, Y], tuple[X2, Y2]],
        collate: tuple[Collate | None, Collate | None] | ByName | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: PairedDataset[dict[str, Any]],
        /,
        *,
        cycle: Names = None,
        joint_transform: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        collate: Sequence[Collate | None] | ByName | None = None,
        **members: Dataset[Any] | Sequence[Any],
    ) -> None: ...
    def __init__(
        self, /, *sides: Any, cycle: Any = None, joint_transform: Any = None, collate: Any = None, **members: Any
    ) -> None:
        self.datasets = checked_sides(sides, members)
        self.cycle = checked_cycle(cycle, tuple(self._sides))
        if joint_transform is not None and not callable(joint_transform):
            raise TypeError(f"joint_transform must be callable or None, got {type(joint_transform).__name__}")
        self.joint_transform: Callable[..., Any] | None = joint_transform
        self.collate_fn: SideCollate | None = checked_collate(collate, self._sides, by_name=bool(members))

    def __len__(self) -> int:
        return common_length(self._sides, self.cycle)

    @property
    def inputs(self) -> Any:
        """The side of that name."""
        return self._side("inputs")

    @property
    def targets(self) -> Any:
        """The side of that name."""
        return self._side("targets")

    def _side(self, name: str) -> Any:
        if name not in self._sides:
            raise AttributeError(f"no side is named {name!r}; they are {', '.join(self._sides)}", name=name, obj=self)
        return self._sides[name]

    @property
    def _sides(self) -> dict[str, Any]:
        return named(self.datasets)

    def _items(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The items out of what the sides gave for them. A generator, so that no StopIteration in it goes unnoticed."""
        names = tuple(self.datasets) if isinstance(self.datasets, dict) else None
        transform = self.joint_transform
        for row in rows:
            item = row if names is None else dict(zip(names, row))
            if transform is None:
                yield item
            elif names is None:
                yield checked_pair(transform(*row))
            else:
                yield checked_dict(transform(item), names)


class PairedItems(PairedDataset[T_co], StackDataset[Any]):
    """A :class:`PairedDataset` over map-style sides.

    Integer indices lie in ``range(-len(pairs), len(pairs))``; the sides get them counted from the front. Any other key
    is passed on to all sides as it is, as by ``StackDataset``, unless one of them repeats. A side that has
    ``__getitems__`` is asked once per batch.

    Raises:
        IndexError: an index is out of range.
        TypeError: a key is no integer, and a side is to repeat.
        ValueError: a side's ``__getitems__`` returns more or fewer items than it was asked for.
    """

    def __init__(self, /, *sides: Any, **options: Any) -> None:
        PairedDataset.__init__(cast("PairedDataset[Any]", self), *sides, **options)
        for name, side in self._sides.items():
            if isinstance(side, IterableDataset) or not (hasattr(side, "__getitem__") and hasattr(side, "__len__")):
                raise TypeError(
                    f"{name} must be a map-style data set with __getitem__ and __len__, or an IterableDataset like all "
                    f"other sides, got {kind_of(side)}"
                )
        self._length = common_length(self._sides, self.cycle)
        check_repeating({name: len(self._sides[name]) for name in self.cycle}, self._length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> T_co:
        index = self._from_front(index)
        row = tuple(side[self._within(name, side, index)] for name, side in self._sides.items())
        return cast(T_co, next(self._items([row])))

    def __getitems__(self, indices: Sequence[Any]) -> list[T_co]:
        """The items at these indices."""
        indices = [self._from_front(index) for index in indices]
        return list(self._items(zip(*(self._fetch(name, side, indices) for name, side in self._sides.items()))))

    def _fetch(self, name: str, side: Any, indices: Sequence[Any]) -> list[Any]:
        # A list of its own for each side: one that sorts it in place would part all pairs of the batch.
        indices = [self._within(name, side, index) for index in indices]
        if not callable(getattr(side, "__getitems__", None)):
            return [side[index] for index in indices]
        asked = len(indices)
        items = list(side.__getitems__(indices))
        if len(items) != asked:
            raise ValueError(
                f"__getitems__ of {name} ({kind_of(side)}) returned {len(items)} items for {asked} indices"
            )
        return items

    def _from_front(self, index: Any) -> Any:
        try:
            number = operator.index(index)
        except TypeError:
            if not self.cycle:
                return index
            raise TypeError(f"{self.cycle[0]} repeats, so indices must be integers, got {kind_of(index)}") from None
        if not -self._length <= number < self._length:
            raise IndexError(f"index {number} is out of range for {self._length} pairs")
        return index if number >= 0 else number + self._length

    def _halves(self) -> tuple[PairedHalf, PairedHalf]:
        """The inputs and the targets of these pairs as data sets of their own, for ``late_targets``.

        Raises:
            TypeError: they cannot be had one without the other.
        """
        if self.joint_transform is not None:
            raise TypeError("late_targets loads inputs before targets, but joint_transform needs both at once")
        if isinstance(self.datasets, dict):
            raise TypeError(
                f"late_targets is for inputs and targets by position, but these pairs have names "
                f"({', '.join(self.datasets)})"
            )
        for name in ("__getitem__", "__getitems__"):
            if getattr(type(self), name) is not getattr(PairedItems, name):
                raise TypeError(
                    f"late_targets would go around {kind_of(self)}.{name}; give the class load_input(index) and "
                    "load_target(index) instead"
                )
        return PairedHalf(self, "inputs"), PairedHalf(self, "targets")

    def _within(self, name: str, side: Any, index: Any) -> Any:
        return operator.index(index) % len(side) if name in self.cycle else index


class PairedHalf(Dataset[Any]):
    """One side of :class:`PairedItems`, by the pairs' own indices."""

    def __init__(self, pairs: PairedItems[Any], name: str) -> None:
        self._pairs, self._name = pairs, name

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: Any) -> Any:
        pairs, side = self._pairs, self._pairs._sides[self._name]
        return side[pairs._within(self._name, side, pairs._from_front(index))]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """The items at these indices."""
        pairs = self._pairs
        return pairs._fetch(self._name, pairs._sides[self._name], [pairs._from_front(index) for index in indices])


class PairedStream(PairedDataset[T_co], IterableDataset[T_co]):
    """A :class:`PairedDataset` over iterable sides, zipped.

    Each worker zips what its own ``iter()`` of every side gives. Sides that give each worker a share of their items
    must therefore share alike; a side that repeats gives a worker its own share again. It gives as many items as the
    others need, and may have more.

    ``len()`` is that of the sides that do not repeat; TypeError if one of them has none.

    Raises:
        ValueError: (while iterating) one side ends before another; a side that is to repeat gives nothing.
    """

    def __init__(self, /, *sides: Any, **options: Any) -> None:
        PairedDataset.__init__(cast("PairedDataset[Any]", self), *sides, **options)
        streams = [name for name, side in self._sides.items() if isinstance(side, IterableDataset)]
        for name, side in self._sides.items():
            if name not in streams:
                other = f"while {streams[0]} ({kind_of(self._sides[streams[0]])}) is iterable" if streams else "here"
                raise TypeError(
                    f"{name} must be an IterableDataset, got {kind_of(side)}, {other}: a stream has no item at an "
                    "index, so make all sides map-style or all iterable"
                )

    def __iter__(self) -> Iterator[T_co]:
        return self._items(zipped(self._sides, self.cycle))
