"""Hypothesis strategies for batches: nests of tensors, arrays and plain values of every kind, with aliasing."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]  # the last came with 2.7
SHAPES = [(), (0,), (1,), (7,), (2, 0, 3), (3, 1, 4), (2, 3, 4), (5, 6), (1, 1)]

ARRAY_DTYPES: list[Any] = [
    "?", "u1", "i2", "<u4", "i8", ">i4", "f2", "f4", ">f8", "g", "c8", "c16", "U5", "S3", "V5", "M8[ns]", "m8[s]",
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
]  # fmt: skip


class Point(NamedTuple):
    """A namedtuple, which collates and pickles by name."""

    x: Any
    y: Any


@dataclass
class Sample:
    """A dataclass, which torch knows nothing of."""

    image: Any
    label: Any = None


@dataclass(frozen=True)
class Slotted:
    """A frozen dataclass with slots."""

    __slots__ = ("value",)
    value: Any


class Record:
    """An object with attributes."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


class Tagged(torch.Tensor):
    """A tensor subclass whose instances carry attributes."""


def tagged(tensor: torch.Tensor, **state: Any) -> Tagged:
    """``tensor`` as a subclass with attributes."""
    made = tensor.as_subclass(Tagged)
    made.__dict__.update(state)
    return made


def random_bytes(seed: int, nbytes: int) -> np.ndarray[Any, Any]:
    """``nbytes`` of anything, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of any bits at all (NaNs with payloads, infinities, negative zeros)."""
    numel = int(np.prod(shape, dtype=int))
    raw = random_bytes(seed, numel * dtype.itemsize)
    if dtype is torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype).reshape(shape).clone() if numel else torch.empty(shape, dtype=dtype)


def random_array(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """A C-contiguous array of any bits at all that its dtype allows."""
    dtype = np.dtype(dtype)
    raw = random_bytes(seed, int(np.prod(shape, dtype=int)) * dtype.itemsize)
    if dtype.kind == "b":
        raw &= 1
    if dtype.kind == "U":
        raw = (raw.view(np.uint32) % 0xD800).view(np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape).copy()


def views_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Ways to look at a tensor's storage, the tensor itself first."""
    views = [tensor, tensor.t() if tensor.dim() == 2 else tensor.movedim(0, -1) if tensor.dim() else tensor.view(1)]
    views += [tensor.detach(), tensor.expand(3, *tensor.shape), tensor.unsqueeze(0)]
    if tensor.numel() > 1:
        flat = tensor.view(-1)
        views += [flat[1:], flat[::2], flat[:-1], tensor.select(-1, -1), flat.as_strided((2, 2), (1, 0))]
        if tensor.dtype not in (torch.bool, torch.uint8):
            views.append(flat.view(torch.uint8))
    return views


tensors = st.builds(random_tensor, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 9))


def looks_of(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Ways to look at an array, the array itself first."""
    looks = [array, np.asfortranarray(array), array.T, np.broadcast_to(array, (2, *array.shape))]
    if array.ndim:
        looks += [array[::-1], array[::2], array[..., :1]]
    return looks


arrays = st.builds(random_array, st.sampled_from(ARRAY_DTYPES), st.sampled_from(SHAPES), st.integers(0, 9)).flatmap(
    lambda array: st.sampled_from(looks_of(array))
)

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**63, 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
)


def nests(leaves: st.SearchStrategy[Any], max_leaves: int = 8) -> st.SearchStrategy[Any]:
    """Nests of every kind of container over ``leaves``."""

    def deeper(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.text("abc", max_size=2)
        return st.one_of(
            st.lists(inside, max_size=4),
            st.lists(inside, max_size=3).map(tuple),
            st.dictionaries(keys, inside, max_size=3),
            st.dictionaries(st.integers(0, 3), inside, max_size=3).map(OrderedDict),
            st.dictionaries(keys, inside, max_size=2).map(UserDict),
            st.builds(Point, inside, inside),
            st.builds(Sample, inside, inside),
            st.builds(Record, field=inside),
        )

    return st.recursive(leaves, deeper, max_leaves=max_leaves)


@st.composite
def batches(draw: st.DrawFn) -> Any:
    """Nests in which storages, tensors and arrays occur again, as views of each other and as the very same object."""
    bases = draw(st.lists(tensors, min_size=1, max_size=3))
    leaves: list[Any] = [view for base in bases for view in views_of(base)]
    leaves += draw(st.lists(arrays, max_size=2))
    return draw(nests(st.one_of(st.sampled_from(leaves), tensors, arrays, plain)))


@st.composite
def plain_batches(draw: st.DrawFn) -> list[Any]:
    """Several batches of lists, tuples, dicts and plain tensors, alike in outline more often than not.

    Some of their tensors share a storage, or are the same one.
    """
    shapes = draw(st.lists(st.sampled_from([(), (2,), (3,), (0,), (2, 2)]), min_size=1, max_size=3))
    large = torch.arange(1000.0)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        numel = int(np.prod(shape, dtype=int))
        start = draw(st.sampled_from([None, None, None, 0, 1, 2, 500, 990]))
        if start is None:
            return random_tensor(torch.float32, shape, draw(st.integers(0, 9)))
        return large[start : start + numel].view(shape)

    def batch() -> Any:
        tensors = [tensor(shape) for shape in shapes]
        tensors += draw(st.lists(st.sampled_from(tensors), max_size=1))
        kind = draw(st.sampled_from(["list", "tuple", "dict", "deep", "one list twice", "two equal lists"]))
        return {
            "list": tensors,
            "tuple": tuple(tensors),
            "dict": {str(n): tensor for n, tensor in enumerate(tensors)},
            "deep": {"a": tensors, "b": (tensors[0], [])},
            "one list twice": {"a": tensors[:1], "b": (rest := tensors[1:]), "c": rest},
            "two equal lists": {"a": tensors[:1], "b": tensors[1:], "c": list(tensors[1:])},
        }[kind]

    return [batch() for _ in range(draw(st.integers(1, 8)))]
