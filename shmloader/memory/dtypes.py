"""torch's dtypes as numbers, the same in every process of one torch, with their sizes and their numpy counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
SIZES = [dtype.itemsize for dtype in DTYPES]


_SAME_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NUMPY_DTYPES = {getattr(torch, name): np.dtype(name) for name in _SAME_NAMES}

#: By number; None where numpy has no such type (bfloat16, the float8s, quantized types).
NUMPY: list[np.dtype[Any] | None] = [_NUMPY_DTYPES.get(dtype) for dtype in DTYPES]

#: torch's numbers of numpy's dtypes, native byte order only.
NUMPY_CODES = {dtype: code for code, dtype in enumerate(NUMPY) if dtype is not None}


def tensor_on(buffer: Any, offset: int, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor, not empty, on ``buffer``: own storage, offset 0, exact size, no ``_base``."""
    dtype = NUMPY[code]
    if dtype is not None:
        # By way of numpy it takes half the time of torch.frombuffer.
        return torch.from_numpy(np.ndarray(shape, dtype, buffer, offset))
    count = 1
    for size in shape:
        count *= size
    # resize_ on a fresh tensor, not view(): a view has a _base, and detach_() on it raises.
    return torch.frombuffer(buffer, dtype=DTYPES[code], count=count, offset=offset).resize_(shape)
