"""A collate function per side of a pair, as one function for a loader, and how a loader finds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, Dataset, Subset, default_collate, default_convert

Collate = Callable[[list[Any]], Any]

#: Data sets keep what they wrap in short lists; the first few entries say what is in a long one.
_LOOKED_AT = 16


@dataclass(frozen=True)
class SideCollate:
    """Collates each side of a list of samples by its own function. Picklable if the functions are.

    Two are equal if they collate the same sides by the same functions.

    Attributes:
        names: the sides' names, in order.
        functions: one function for each side, from the list of that side's halves to its part of the batch.
        by_name: samples are dicts, and so is the batch. Otherwise samples are tuples, and the batch is a list, as
            ``default_collate`` makes of tuples.

    Raises:
        TypeError, ValueError: (when called) there is no list of samples, or a sample does not have these sides.
    """

    names: tuple[str, ...]
    functions: tuple[Collate, ...]
    by_name: bool

    def __call__(self, samples: list[Any]) -> list[Any] | dict[str, Any]:
        if type(samples) is not list:
            got = type(samples).__name__
            raise TypeError(f"collate= takes lists of samples, as a loader with batching gives them, got {got}")
        for sample in samples:
            self._check(sample)
        keys: Sequence[Any] = self.names if self.by_name else range(len(self.names))
        parts = [function([sample[key] for sample in samples]) for key, function in zip(keys, self.functions)]
        return dict(zip(self.names, parts)) if self.by_name else parts

    def _check(self, sample: Any) -> None:
        sides, kind = ", ".join(self.names), dict if self.by_name else tuple
        if not isinstance(sample, kind):
            raise TypeError(f"collate= takes a {kind.__name__} of {sides} as a sample, got {type(sample).__name__}")
        if len(sample) != len(self.names):
            raise ValueError(f"collate= takes a {kind.__name__} of {sides} as a sample, got one of {len(sample)} parts")
        if isinstance(sample, dict) and sample.keys() != set(self.names):
            raise ValueError(f"collate= takes a dict of {sides} as a sample, got one of {', '.join(map(str, sample))}")


def checked_collate(collate: Any, sides: Mapping[str, Any], by_name: bool) -> SideCollate | None:
    """The collate function of pairs; None where every side is left to the loader's own.

    Args:
        collate: a function or None for each side: a tuple in order, or a dict by name. A side without one of its own is
            collated as the data set there asks for, if it is one of pairs, and else by torch's ``default_collate``.
        sides: the data sets by name.
        by_name: samples are dicts.

    Raises:
        TypeError, ValueError: not one function or None for each side.
    """
    functions = _by_side(collate, tuple(sides))
    offers = {name: functions.get(name) or collate_of(side) for name, side in sides.items()}
    if collate is None and not any(offers.values()):
        return None
    return SideCollate(tuple(sides), tuple(offer or default_collate for offer in offers.values()), by_name)


def _by_side(collate: Any, names: tuple[str, ...]) -> dict[str, Collate | None]:
    if collate is None:
        return {}
    if isinstance(collate, Mapping):
        if unknown := [name for name in collate if name not in names]:
            raise ValueError(f"collate names {unknown[0]!r}, but the sides are {', '.join(names)}")
        functions = dict(collate)
    elif isinstance(collate, (tuple, list)):
        if len(collate) != len(names):
            raise ValueError(f"collate has {len(collate)} functions for {len(names)} sides ({', '.join(names)})")
        functions = dict(zip(names, collate))
    else:
        raise TypeError(
            f"collate must be a tuple or a dict with a function (or None) for each of {', '.join(names)}, got "
            f"{type(collate).__name__}; a function of whole samples is the loader's: DataLoader(..., collate_fn=...)"
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"collate has no function for {name}, but {type(function).__name__}")
    return functions


def collate_of(dataset: Any, *, batching: bool = True) -> SideCollate | None:
    """The collate function that a data set asks for; None leaves it to the loader.

    That is its own ``collate_fn``, if that is one of pairs, or that of the pairs in torch's ``Subset``,
    ``ConcatDataset`` and ``ChainDataset``.

    Args:
        batching: the loader makes batches out of samples.

    Raises:
        ValueError: the data set wraps pairs with ``collate=`` in another way, or several that differ; or there is
            nothing to collate, since the loader does no batching.
    """
    found = _collate_of(dataset, {})
    if found is not None and not batching:
        raise ValueError(
            "the pairs have a collate= for batches, but batch_size=None makes none; pass collate_fn= to the loader, "
            "or leave collate= out"
        )
    return found


def half_collates(collate_fn: Any) -> tuple[Collate, ...]:
    """A collate function for each half of pairs, out of the loader's one for whole pairs.

    Raises:
        TypeError: it has no parts.
    """
    if type(collate_fn) is SideCollate and not collate_fn.by_name:
        return collate_fn.functions
    if collate_fn is default_collate or collate_fn is default_convert:
        return collate_fn, collate_fn
    name = getattr(collate_fn, "__qualname__", type(collate_fn).__name__)
    raise TypeError(
        f"late_targets needs a collate function for each half, but {name} sees whole pairs; give the PairedDataset "
        "collate=(of_inputs, of_targets) instead, or leave late_targets out"
    )


def _collate_of(dataset: Any, known: dict[int, SideCollate | None]) -> SideCollate | None:
    # Only what lies in instances' dicts, and types rather than isinstance(): attributes of other people's data sets may
    # be lazy, or warn.
    if id(dataset) in known:
        return known[id(dataset)]
    known[id(dataset)] = None  # for data sets that refer to each other
    held = getattr(dataset, "__dict__", {})
    own = held.get("collate_fn")
    if type(own) is not SideCollate:
        transparent = issubclass(type(dataset), (Subset, ConcatDataset, ChainDataset))
        values = [held.get("dataset"), held.get("datasets")] if transparent else list(held.values())
        offers = [_collate_of(part, known) for part in _wrapped(values, None if transparent else _LOOKED_AT)]
        own = _agreed(type(dataset).__name__, offers, transparent)
    known[id(dataset)] = own
    return own


def _agreed(kind: str, offers: list[SideCollate | None], transparent: bool) -> SideCollate | None:
    if not any(offers):
        return None
    if not transparent:
        raise ValueError(
            f"{kind} wraps pairs with a collate= that the loader would not use; give it an attribute collate_fn, that "
            "of the pairs, or pass a collate_fn= to the loader"
        )
    if any(offer != offers[0] for offer in offers):
        raise ValueError(f"the parts of this {kind} differ in their collate=; pass a collate_fn= to the loader")
    return offers[0]


def _wrapped(values: Iterable[Any], most: int | None) -> list[Any]:
    """The data sets among these values, and among the first entries of lists, tuples and dicts there."""
    parts: list[Any] = []
    for value in values:
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        parts += islice(entries, most)
    return [part for part in parts if issubclass(type(part), Dataset)]
