"""The data in a batch: how many bytes there are, and a look at all of them."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

DEEPEST = 20  # levels; a batch that refers to itself ends here
PAGE_BYTES = 4096

Data: TypeAlias = "Tensor | np.ndarray[Any, Any] | bytes | bytearray"


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors, arrays and byte strings in a batch, wherever they are."""
    return sum(each.nbytes if isinstance(each, (Tensor, np.ndarray)) else len(each) for each in _data(batch))


def look_at(batch: Any) -> None:
    """Reads from every page, as a training step does: shared pages that nobody has read appear in no process."""
    for each in _data(batch):
        if isinstance(each, Tensor) and each.device.type == "cpu":
            each.detach().reshape(-1)[:: max(1, PAGE_BYTES // each.element_size())].clone()
        elif isinstance(each, np.ndarray):
            each.reshape(-1)[:: max(1, PAGE_BYTES // max(1, each.itemsize))].copy()


def insides(tensor: Tensor) -> list[Any]:
    """What a tensor consists of whose elements do not simply lie in memory; nothing for others."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
        channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
        return [tensor.int_repr(), *channels]
    if tensor.layout is torch.sparse_coo:
        return [tensor.is_coalesced(), tensor._indices(), tensor._values().detach()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values().detach()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values().detach()]
    return []


def _data(batch: Any, depth: int = 0) -> Iterator[Data]:
    if isinstance(batch, Tensor) and (inside := insides(batch)):
        yield from _data(inside, depth + 1)
    elif isinstance(batch, (Tensor, np.ndarray, bytes, bytearray)):
        yield batch
    elif depth < DEEPEST:
        for part in _parts(batch):
            yield from _data(part, depth + 1)


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple, set, frozenset)):
        return list(batch)
    if isinstance(batch, type):
        return []
    slots = (getattr(batch, name, None) for name in getattr(type(batch), "__slots__", ()))
    return [*getattr(batch, "__dict__", {}).values(), *slots]
