"""The sides of pairs: which there are, which of them repeat, how many items they have, how streams are zipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import get_worker_info

#: The names of sides that are given by position.
POSITIONAL = ("inputs", "targets")
_END = object()


def named(datasets: tuple[Any, ...] | dict[str, Any]) -> dict[str, Any]:
    """The sides by name."""
    return datasets if isinstance(datasets, dict) else dict(zip(POSITIONAL, datasets))


def zipped(sides: dict[str, Any], cycle: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """One item of each stream at a time, until all that do not repeat have ended.

    Raises:
        ValueError: one ends before another; one that is to repeat gives nothing.
    """
    streams = {name: _repeated(name, side) if name in cycle else iter(side) for name, side in sides.items()}
    return _rows(streams, cycle)


def _rows(streams: dict[str, Iterator[Any]], cycle: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    leading = [name for name in streams if name not in cycle]
    for pairs in count():
        row = {name: next(streams[name], _END) for name in leading}
        if _over(row, pairs):
            return
        # Only now, or a side that repeats would be asked for an item too many.
        row.update((name, next(streams[name])) for name in cycle)
        yield tuple(row[name] for name in streams)


def _over(row: dict[str, Any], pairs: int) -> bool:
    """Whether the streams have ended, which they must do together."""
    ended = [name for name, item in row.items() if item is _END]
    if ended and len(ended) < len(row):
        longer = next(name for name in row if name not in ended)
        raise ValueError(
            f"{_in_worker()}{' and '.join(ended)} ended after {pairs} pairs, but {longer} goes on; pairs need equally "
            f"many, in every worker (cycle={ended[0]!r} would repeat the shorter side)"
        )
    return bool(ended)


def _repeated(name: str, side: Iterable[Any]) -> Iterator[Any]:
    while True:
        item = _END
        for item in side:
            yield item
        if item is _END:
            raise ValueError(f"{_in_worker()}{name} is to repeat, but iterating over it ({kind_of(side)}) gave nothing")


def _in_worker() -> str:
    info = get_worker_info()
    return f"in worker {info.id} of {info.num_workers}, " if info is not None else ""


def common_length(sides: dict[str, Any], cycle: tuple[str, ...]) -> int:
    """How many pairs there are: the length of the sides that do not repeat.

    Raises:
        TypeError: one of them has no length.
        ValueError: their lengths differ.
    """
    lengths = {name: len(side) for name, side in sides.items() if name not in cycle}
    first, length = next(iter(lengths.items()))
    for name, other in lengths.items():
        if other != length:
            shorter = first if length < other else name
            raise ValueError(
                f"{first} has {length} items, but {name} has {other}; pairs need equally many "
                f"(cycle={shorter!r} would repeat the shorter side)"
            )
    return length


def check_repeating(lengths: dict[str, int], pairs: int) -> None:
    """Whether sides of these lengths can repeat to so many pairs.

    Raises:
        ValueError: one is longer, or empty.
    """
    for name, length in lengths.items():
        if length > pairs:
            raise ValueError(f"{name} is to repeat, but has {length} items for {pairs} pairs; only a shorter side can")
        if not length and pairs:
            raise ValueError(f"{name} is to repeat, but has no items")


def checked_sides(sides: tuple[Any, ...], members: dict[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
    """The sides, two by position or two or more by name.

    Raises:
        TypeError: both, or too few, or too many by position.
    """
    if sides and members:
        raise TypeError(
            f"sides are given by position or by name, not both; got {len(sides)} by position and "
            f"{', '.join(members)}: name them all"
        )
    if len(sides) > len(POSITIONAL):
        raise TypeError(f"got {len(sides)} sides; more than inputs and targets need names: PairedDataset(a=..., b=...)")
    if len(sides or members) < len(POSITIONAL):
        raise TypeError(f"pairs need two sides or more, got {len(sides or members)}: PairedDataset(inputs, targets)")
    return sides or members


def checked_cycle(cycle: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the sides that repeat.

    Raises:
        TypeError: neither a name, a list of names, nor None.
        ValueError: there is no such side, or all of them are named.
    """
    if cycle is None:
        return ()
    cycled = (cycle,) if isinstance(cycle, str) else cycle
    if not isinstance(cycled, (tuple, list)) or not all(isinstance(name, str) for name in cycled):
        raise TypeError(f"cycle must be the name of a side, a list of names, or None, got {cycle!r}")
    for name in cycled:
        if name not in names:
            raise ValueError(f"cycle names {name!r}, but the sides are {', '.join(names)}")
    if set(cycled) == set(names):
        raise ValueError("cycle names all sides, but one has to say how many pairs there are")
    return tuple(cycled)


def checked_pair(made: Any) -> tuple[Any, ...]:
    """What a ``joint_transform`` of two halves returned.

    Raises:
        TypeError, ValueError: that is no tuple of two.
    """
    if not isinstance(made, tuple):
        raise TypeError(f"joint_transform must return a tuple (input, target), got {kind_of(made)}")
    if len(made) != len(POSITIONAL):
        raise ValueError(f"joint_transform must return a tuple (input, target), got one of {len(made)} parts")
    return made


def checked_dict(made: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """What a ``joint_transform`` of a dict returned.

    Raises:
        TypeError, ValueError: that is no dict with these names.
    """
    wanted = f"joint_transform must return a dict with {', '.join(names)}"
    if not isinstance(made, dict):
        raise TypeError(f"{wanted}, got {kind_of(made)}")
    if made.keys() != set(names):
        raise ValueError(f"{wanted}, got one with {', '.join(map(str, made)) or 'nothing'}")
    return made


def kind_of(thing: Any) -> str:
    """The name of its type."""
    return type(thing).__name__
