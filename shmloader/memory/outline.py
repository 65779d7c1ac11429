"""Plain nests: batches whose skeleton is told by types, keys, dtypes and shapes alone.

Lists, tuples and dicts (with str keys) of ordinary contiguous tensors: what ``default_collate`` makes of most data
sets. Their *outline* takes a third of the time of pickling them, and equal outlines have equal skeletons, so it serves
the codec as the key of a cache, in both directions. Whatever is not plain has no outline and is pickled; there is no
second format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shmloader.memory.dtypes import CODES, NUMPY, tensor_on
from shmloader.memory.layout import Span

#: Nests deeper than this, and those that contain themselves, are left to pickle.
MOST_LEVELS = 8

#: Builds a batch on a buffer, from an offset.
Builder = Callable[[Any, int], Any]


class Outline:
    """The outline of ``obj`` in ``key``, or None; and its tensors, in the order of the skeleton."""

    __slots__ = ("_boxes", "key", "tensors")

    def __init__(self, obj: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self._boxes: list[int] = []
        self.key = self._walk(obj, MOST_LEVELS)
        # The same list at two places must be one list again at the other side, which only pickle sees to.
        if len(set(self._boxes)) != len(self._boxes):
            self.key = None

    def _walk(self, obj: Any, levels: int) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            if not _is_plain(obj):
                return None
            self.tensors.append(obj)
            return CODES[obj.dtype], tuple(obj.shape)
        if levels == 0:
            return None
        if kind is list or kind is tuple:
            parts: list[Any] = [kind]
            values = obj
        elif kind is dict and all(type(key) is str for key in obj):
            parts = [kind, tuple(obj)]
            values = obj.values()
        else:
            return None
        self._boxes.append(id(obj))
        for value in values:
            part = self._walk(value, levels - 1)
            if part is None:
                return None
            parts.append(part)
        return tuple(parts)


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


def builder(obj: Any, spans: tuple[Span, ...]) -> Builder | None:
    """What builds batches like ``obj``, one of them, each on its own buffer; None if ``obj`` is not plain.

    Every call makes fresh containers: the consumer may change the ones it was given.
    """
    outline = Outline(obj)
    if outline.key is None or len(outline.tensors) != len(spans):
        return None  # not plain, or one tensor at two places
    return _build(outline.key, iter(spans))


def _build(key: Any, spans: Iterator[Span]) -> Builder:
    kind = key[0]
    if isinstance(kind, int):
        return _build_tensor(kind, key[1], next(spans).offset)
    names = key[1] if kind is dict else ()
    parts = [_build(part, spans) for part in key[2 if kind is dict else 1 :]]
    if kind is dict:
        return lambda buffer, start: dict(zip(names, [part(buffer, start) for part in parts], strict=True))
    if kind is tuple:
        return lambda buffer, start: tuple([part(buffer, start) for part in parts])
    return lambda buffer, start: [part(buffer, start) for part in parts]


def _build_tensor(code: int, shape: tuple[int, ...], offset: int) -> Builder:
    dtype, array, from_numpy = NUMPY[code], np.ndarray, torch.from_numpy
    if dtype is None:
        return lambda buffer, start: tensor_on(buffer, start + offset, code, shape)
    return lambda buffer, start: from_numpy(array(shape, dtype, buffer, start + offset))
