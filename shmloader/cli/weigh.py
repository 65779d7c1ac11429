"""How many bytes of data a batch holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

DEEPEST = 20  # levels; a batch that refers to itself ends here


def batch_bytes(batch: Any, depth: int = 0) -> int:
    """Bytes of the tensors, arrays and byte strings in it, wherever they are."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, (np.ndarray, np.generic)):
        return batch.nbytes
    if isinstance(batch, (bytes, bytearray, memoryview)):
        return len(batch)
    if depth < DEEPEST:
        return sum(batch_bytes(part, depth + 1) for part in _parts(batch))
    return 0


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple, set, frozenset)):
        return list(batch)
    if isinstance(batch, type):
        return []
    slots = (getattr(batch, name, None) for name in getattr(type(batch), "__slots__", ()))
    return [*getattr(batch, "__dict__", {}).values(), *slots]
