"""Batches for the device path: those of the codec's tests, and things that move themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from tests.nests import arrays, nests, plain, tagged, tensors, views_of


class Graph:
    """It knows how to get to a device, and takes ``non_blocking``, as PyG's graphs do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        """Itself, elsewhere."""
        return Graph(self.x.to(device, non_blocking=non_blocking))


class Encoding(dict[str, Any]):
    """A nest whose ``to`` takes a device only."""

    def to(self, device: Any) -> Encoding:
        """Itself, elsewhere."""
        return Encoding({key: value.to(device) for key, value in self.items()})


class Stuck:
    """Holds a tensor and has no ``to``: it stays on the CPU."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Broken:
    """Its ``to`` fails so many times."""

    def __init__(self, x: torch.Tensor, times: int) -> None:
        self.x, self.times = x, times

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        """Itself, elsewhere, some day."""
        if self.times:
            self.times -= 1
            raise ValueError("not now")
        return self.x.to(device, non_blocking=non_blocking)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """``x`` in eight bits."""
    return torch.quantize_per_tensor(x, 0.5, 3, torch.qint8)


#: What is a tensor and yet not just memory with a shape and strides, by name; each is made from six floats.
ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.view(2, 3).to_sparse_csr(),
    "quantized": quantized,
    "nested": lambda x: torch.nested.nested_tensor([x[:2], x[2:]]),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "a subclass": lambda x: tagged(x.clone()),
    "a parameter": lambda x: torch.nn.Parameter(x.clone()),
    "with a past": lambda x: x.clone().requires_grad_() * 1,
}


@st.composite
def plain_nests(draw: st.DrawFn) -> Any:
    """Nests of plain tensors in which storages occur again, and of what stays on the CPU."""
    bases = draw(st.lists(tensors, min_size=1, max_size=3))
    leaves = [view for base in bases for view in views_of(base)]
    wanting = [x.clone().requires_grad_() for x in bases if x.is_floating_point()]
    large = torch.arange(40_000, dtype=torch.int64)  # crosses by itself
    leaves += [*wanting, large, large[7:], large.view(200, 200).t()]
    return draw(nests(st.one_of(st.sampled_from(leaves), tensors, arrays, plain)))


def packed() -> Any:
    """A packed sequence, whose batch sizes stay on the CPU."""
    return pack_sequence([torch.arange(3.0), torch.arange(2.0)])
