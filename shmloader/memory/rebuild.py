"""Bytes to a batch: what the codec took apart, built on the memory where it lies.

Each tensor gets a storage of its own, offset 0, exact size, and no ``_base``: ``torch.save`` writes only its bytes, and
autograd's version counters are not shared. What is built keeps the memory alive, and through it the slot's lease.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.memory.dtypes import DTYPES, SIZES, tensor_on
from shmloader.memory.layout import RAW, SHARED, Layout, Span
from shmloader.memory.outline import builder, contiguous_strides

_NO_VALUES: list[Any] = []

#: What a rebuilding function gets for a span: buffer, offset and size of the region in it, the offset of what is seen
#: within the region, and the region's storage where several spans see it.
_Place = tuple[Any, int, int, int, "torch.UntypedStorage | None"]


def decode(layout: Layout, buffer: Any, start: int = 0, values: bytes = b"") -> Any:
    """Rebuild a batch on ``buffer`` (any writable buffer), whose part for this batch begins at ``start``.

    ``values`` are those of a plain nest, pickled. Everything that is built keeps ``buffer`` alive, and nothing else of
    it.
    """
    # Inside inference_mode torch would build inference tensors, which a later training step could not save.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _decode(layout, buffer, start, values)
    return _decode(layout, buffer, start, values)


def _decode(layout: Layout, buffer: Any, start: int, values: bytes) -> Any:
    if not layout.plain:
        return pickle.loads(layout.skeleton, buffers=_places(layout, buffer, start))
    if layout.build is None:
        layout.build = builder(layout.skeleton, layout.spans)
    return layout.build(buffer, start, pickle.loads(values) if values else _NO_VALUES)


def _places(layout: Layout, buffer: Any, start: int) -> Iterable[Any]:
    if layout.simple:
        return [(buffer, start + span[1], span[2], 0, None) for span in layout.spans]
    return _shared_places(layout.spans, buffer, start)


def _shared_places(spans: tuple[Span, ...], buffer: Any, start: int) -> Iterator[Any]:
    storages: dict[int, torch.UntypedStorage] = {}
    for kind, offset, nbytes, inner in spans:
        if kind == RAW:
            # A copy, as an array's (see _a). An empty one needs no memory, and a batch of nothing else has none.
            yield bytearray(memoryview(buffer).cast("B")[start + offset : start + offset + nbytes] if nbytes else b"")
            continue
        if kind == SHARED and offset not in storages:
            storages[offset] = _storage_on(buffer, start + offset, nbytes)
        yield buffer, start + offset, nbytes, inner, storages.get(offset) if kind == SHARED else None


def _storage_on(buffer: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


# The names below stand in every skeleton, so they are short. Each builds one thing that the encoder took apart.


def _t(place: _Place, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor."""
    buffer, offset, _, _, storage = place
    if storage is not None:
        return _s(place, code, shape, contiguous_strides(shape))
    return tensor_on(buffer, offset, code, shape)


def _s(place: _Place, code: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with strides of its own, or one that shares its storage."""
    buffer, offset, nbytes, inner, storage = place
    storage = storage if storage is not None else _storage_on(buffer, offset, nbytes)
    empty = torch.empty(0, dtype=DTYPES[code], device="cpu")
    return empty.set_(storage, inner // SIZES[code], shape, strides)


def _e(code: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor without elements."""
    return torch.empty_strided(shape, strides, dtype=DTYPES[code], device="cpu")


def _g(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that requires grad."""
    return tensor.requires_grad_()


def _q(rebuild: Any, args: Any) -> torch.Tensor:
    """A quantized tensor. torch's own function warns of a storage class that nobody but itself has used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rebuild(*args)  # type: ignore[no-any-return]


def _u(place: _Place) -> torch.UntypedStorage:
    """A storage."""
    buffer, offset, nbytes, _, storage = place
    return storage if storage is not None else _storage_on(buffer, offset, nbytes)


def _a(place: _Place, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """A numpy array, in memory of its own.

    torch's loader ships arrays by value. On the pool they would be shared with every process that is forked later, and
    a worker that augments in place what it finds in a cache of batches would write into its parent's.
    """
    buffer, offset, _, inner, _ = place
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer, offset + inner, order=order)
    own: np.ndarray[Any, Any] = array.copy(order="K")
    return own


def _n(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """A numpy array without elements."""
    return np.empty(shape, dtype)


def same(obj: Any) -> Any:
    """``obj``: lets a reduction put another object in the place of the one that it was asked for."""
    return obj
