"""Plain nests: batches that are told by their outline, the bytes of their tensors, and a few values.

Lists, tuples, namedtuples and dicts (with str keys) of ordinary contiguous tensors, numbers and strings: what
``default_collate`` makes of most data sets, and what most collate functions return. Their *outline* (types, keys,
dtypes, shapes) repeats from batch to batch even where their values do not, so it crosses to the main process once, as
a layout's skeleton, and the values travel beside it. Taking one takes a third of the time of pickling the batch.
Whatever is not plain has no outline and is pickled whole.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shmloader.memory.dtypes import CODES, NUMPY, tensor_on
from shmloader.memory.layout import Span

#: Nests deeper than this, and those that contain themselves, are left to pickle.
MOST_LEVELS = 8

#: Types of values: immutable, and cheap to pickle. Not bytes, which may be long, and which pickle takes out of band.
VALUES = frozenset({str, int, float, bool, complex, type(None)})
#: Stands in a key for a value, or for a list or tuple of nothing but values.
VALUE = "value"

#: Builds a batch on a buffer, from an offset, with its values.
Builder = Callable[[Any, int, "list[Any]"], Any]


class NotPlainError(Exception):
    """What was looked at has no outline."""


class Outline:
    """The outline of a nest, as a hashable ``key``; its tensors and values, in the key's order."""

    __slots__ = ("_boxes", "key", "tensors", "values")

    def __init__(self) -> None:
        self.key: Any = None
        self.tensors: list[torch.Tensor] = []
        self.values: list[Any] = []
        self._boxes: list[int] = []

    @classmethod
    def of(cls, obj: Any) -> Outline | None:
        """The outline of ``obj``, or None if it is not plain."""
        outline = cls()
        try:
            outline.key = outline.walk(obj, MOST_LEVELS)
        except NotPlainError:
            return None
        # The same list at two places must be one list again at the other side, which only pickle sees to.
        return outline if len(set(outline._boxes)) == len(outline._boxes) else None

    @staticmethod
    def is_value(obj: Any) -> bool:
        """Whether a list or tuple, in whole, is a value."""
        return VALUES.issuperset(map(type, obj))

    def walk(self, obj: Any, levels: int) -> Any:
        """The key of a part; notes the tensors and values in it.

        Raises:
            NotPlainError: it has none.
        """
        kind = type(obj)
        if kind is torch.Tensor:
            if not _is_plain(obj):
                raise NotPlainError
            self.tensors.append(obj)
            return CODES[obj.dtype], tuple(obj.shape)
        if kind in VALUES:
            self.values.append(obj)
            return VALUE
        if levels == 0:
            raise NotPlainError
        return self._walk_box(obj, kind, levels - 1)

    def _walk_box(self, obj: Any, kind: type, levels: int) -> Any:
        if kind is dict:
            if not all(type(name) is str for name in obj):
                raise NotPlainError
            names, parts = tuple(obj), obj.values()
        elif kind is list or kind is tuple:
            if self.is_value(obj):
                self.values.append(obj)
                return VALUE
            names, parts = None, obj
        elif is_namedtuple(kind):
            names, parts = None, obj
        else:
            raise NotPlainError
        self._boxes.append(id(obj))
        return kind, names, *[self.walk(part, levels) for part in parts]


@lru_cache(maxsize=256)
def is_namedtuple(kind: type) -> bool:
    """Whether instances are told by their class and their fields, and nothing else."""
    names = kind.__dict__
    return (
        kind.__base__ is tuple
        and "_fields" in names
        and kind.__dictoffset__ == 0
        and not any(name in names for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and tensor.stride() == contiguous_strides(tuple(tensor.shape))
    )


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of ``shape``, as torch computes them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# -- skeletons and builders -------------------------------------------------------------------------------------


def skeleton(key: Any) -> bytes:
    """The key as bytes, for a layout.

    Raises:
        Exception: whatever pickling raises for the class of a namedtuple that cannot be found by its name.
    """
    return pickle.dumps(key, 5)


def builder(skeleton: bytes, spans: tuple[Span, ...]) -> Builder:
    """What builds the batches of one outline, each on its own buffer.

    Every call makes fresh containers: the consumer may change the ones it was given.
    """
    return _build(pickle.loads(skeleton), iter(spans), itertools.count())


def _build(key: Any, spans: Iterator[Span], numbers: Iterator[int]) -> Builder:
    if key == VALUE:
        number = next(numbers)
        return lambda buffer, start, values: values[number]
    kind, names, *rest = key
    if isinstance(kind, int):
        return _build_tensor(kind, names, next(spans).offset)
    parts = [_build(part, spans, numbers) for part in rest]
    if kind is dict:
        return lambda buffer, start, values: dict(zip(names, [part(buffer, start, values) for part in parts]))
    if kind is list:
        return lambda buffer, start, values: [part(buffer, start, values) for part in parts]
    if kind is tuple:
        return lambda buffer, start, values: tuple([part(buffer, start, values) for part in parts])
    return lambda buffer, start, values: kind.__new__(kind, *[part(buffer, start, values) for part in parts])


def _build_tensor(code: int, shape: tuple[int, ...], offset: int) -> Builder:
    dtype, array, from_numpy = NUMPY[code], np.ndarray, torch.from_numpy
    if dtype is None:
        return lambda buffer, start, values: tensor_on(buffer, start + offset, code, shape)
    return lambda buffer, start, values: from_numpy(array(shape, dtype, buffer, start + offset))
