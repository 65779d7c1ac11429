"""torch's ``default_collate`` over plain samples, stacked straight into the range.

The same result as torch's, type for type, at a third of its time: it goes the same way through the nest, but decides by
exact types, and its tensors begin where they end up instead of passing through three storage objects. Whatever is not
plain goes through torch's own code, column by column; so does everything once the user has registered a type, or
replaced an entry, in ``default_collate_fn_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate, default_collate, default_collate_fn_map

#: Makes an uninitialised tensor of a dtype and shape, in the range if it fits.
Allocate = Callable[[torch.dtype, tuple[int, ...]], torch.Tensor]

#: What torch raises where it is to stack into memory that is not of the result's type, or that autograd would track.
_ONLY_IN_WORKERS = (RuntimeError, TypeError)

#: torch's own entries. A map that differs from them is the user's.
_ORIGINAL = {
    kind: function for kind, function in default_collate_fn_map.items() if function.__module__ == torch_collate.__name__
}


def stack(samples: Any, allocate: Allocate) -> Any:
    """``default_collate(samples)`` as in a worker.

    What only a worker refuses, since it stacks into memory that is there already (columns of mixed dtypes, leaves that
    require grad, negated views), is collated as without workers.

    Raises:
        Exception: what ``default_collate`` raises without workers.
    """
    if type(samples) is not list or not samples or default_collate_fn_map != _ORIGINAL:
        return default_collate(samples)
    try:
        return _stack(samples, allocate)
    except _ONLY_IN_WORKERS:
        return _stack_as_in_main(samples)


def _stack_as_in_main(samples: Any) -> Any:
    with _no_worker():
        return default_collate(samples)


@contextmanager
def _no_worker() -> Iterator[None]:
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _stack(samples: Sequence[Any], allocate: Allocate) -> Any:
    kind = type(samples[0])
    if kind is torch.Tensor:
        return _stack_tensors(samples, allocate)
    if kind is int or kind is float:
        return _stack_numbers(samples, kind, allocate)
    if kind is str or kind is bytes:
        return samples
    if kind is tuple or kind is list:
        return _stack_sequences(samples, allocate)
    if kind is dict:
        return {key: _stack([sample[key] for sample in samples], allocate) for key in samples[0]}
    if kind is np.ndarray and samples[0].dtype.kind in "biufc":
        return _stack([torch.as_tensor(sample) for sample in samples], allocate)
    return collate(samples, collate_fn_map=default_collate_fn_map)


def _stack_sequences(samples: Sequence[Any], allocate: Allocate) -> Any:
    if len(set(map(len, samples))) != 1:
        return collate(samples, collate_fn_map=default_collate_fn_map)  # raises torch's text
    return [_stack(column, allocate) for column in zip(*samples, strict=False)]


def _stack_numbers(samples: Sequence[Any], kind: type, allocate: Allocate) -> torch.Tensor:
    # One look at the first sample is not enough: a column (1, 2.5) is of floats, (1, True) of what torch makes of it.
    if set(map(type, samples)) != {kind}:
        return collate(samples, collate_fn_map=default_collate_fn_map)  # type: ignore[no-any-return]
    out = allocate(torch.float64 if kind is float else torch.int64, (len(samples),))
    try:
        out.numpy()[:] = samples  # a tenth of torch.tensor(samples)
    except OverflowError:
        return collate(samples, collate_fn_map=default_collate_fn_map)  # type: ignore[no-any-return]
    return out


def _stack_tensors(samples: Sequence[Any], allocate: Allocate) -> torch.Tensor:
    first = samples[0]
    plain = first.layout is torch.strided and first.is_cpu and not first.is_nested and not first.is_quantized
    if not plain or set(map(type, samples)) != {torch.Tensor}:
        return collate(samples, collate_fn_map=default_collate_fn_map)  # type: ignore[no-any-return]
    # Into a tensor of the first sample's dtype, as torch does in a worker: that decides what mixed dtypes become.
    return torch.stack(samples, 0, out=allocate(first.dtype, (len(samples), *first.shape)))  # type: ignore[arg-type]
