"""Strict comparison of two batches: value bit by bit, type, dtype, shape, strides, requires_grad, aliasing."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch

#: Compared with ``==`` once the types are known to be equal.
PLAIN = (int, str, bytes, bytearray, type(None), set, frozenset, np.dtype, torch.dtype, torch.Size, slice, range, type)


def assert_same(ours: Any, theirs: Any, moved: bool = False) -> None:
    """Fails, naming the place, unless both are the same through and through.

    Where a batch was ``moved`` to a device, only its nests and tensors are new: one object here may be two there, and
    what else there is must be the very same object.

    Where ``theirs`` has its conjugate or negative bit set, ``ours`` may have it resolved. Of arrays that are contiguous
    in neither order, a C-contiguous copy is the same, and of those in foreign byte order a native one: so does pickle
    hand them on.
    """
    walk = _Walk(moved)
    walk.compare(ours, theirs, "batch")
    walk.compare_memory()


class _Seen(NamedTuple):
    where: str
    ours: tuple[int, int]
    theirs: tuple[int, int]


class _Walk:
    """Walks through both at once, and remembers which of ours stands for which of theirs."""

    def __init__(self, moved: bool) -> None:
        self._moved = moved
        self._partner: dict[tuple[str, int], int] = {}
        self._alive: list[Any] = []
        self._memory: list[_Seen] = []

    def compare(self, ours: Any, theirs: Any, where: str) -> None:
        """One node and all below it."""
        assert type(ours) is type(theirs), f"{where}: {type(ours)} for {type(theirs)}"
        if isinstance(ours, PLAIN):
            assert ours == theirs, f"{where}: {ours!r} for {theirs!r}"
        elif isinstance(ours, (float, np.generic)):
            assert bits_of(ours) == bits_of(theirs), f"{where}: {ours!r} for {theirs!r}"
        elif isinstance(ours, complex):
            assert struct.pack("dd", ours.real, ours.imag) == struct.pack("dd", theirs.real, theirs.imag), where
        elif self._moved and not isinstance(ours, (torch.Tensor, Mapping, list, tuple)):
            assert ours is theirs, f"{where}: another object"
        elif self._is_new_pair(ours, theirs, where):
            self._compare_parts(ours, theirs, where)

    def _is_new_pair(self, ours: Any, theirs: Any, where: str) -> bool:
        """Whether the two meet for the first time; fails if one of them is already somebody else's partner."""
        if type(ours) is tuple and not ours:
            return False
        if self._moved:
            return True
        known = self._partner.get(("ours", id(ours))), self._partner.get(("theirs", id(theirs)))
        if known == (None, None):
            self._partner["ours", id(ours)], self._partner["theirs", id(theirs)] = id(theirs), id(ours)
            self._alive += [ours, theirs]
            return True
        assert known == (id(theirs), id(ours)), f"{where}: one object here is two objects there"
        return False

    def _compare_parts(self, ours: Any, theirs: Any, where: str) -> None:
        if isinstance(ours, torch.Tensor):
            self._compare_tensors(ours, theirs, where)
        elif isinstance(ours, torch.UntypedStorage):
            assert ours.tolist() == theirs.tolist(), where
        elif isinstance(ours, np.ndarray):
            self._compare_arrays(ours, theirs, where)
        elif isinstance(ours, Mapping):
            self.compare(list(ours), list(theirs), f"{where}.keys()")
            for key in ours:
                self.compare(ours[key], theirs[key], f"{where}[{key!r}]")
            self._compare_state(ours, theirs, where)
        elif isinstance(ours, (list, tuple)):
            assert len(ours) == len(theirs), f"{where}: {len(ours)} elements for {len(theirs)}"
            for index, pair in enumerate(zip(ours, theirs)):
                self.compare(*pair, f"{where}[{index}]")
            self._compare_state(ours, theirs, where)
        else:
            assert hasattr(ours, "__dict__") or dataclasses.is_dataclass(ours), f"{where}: cannot compare {type(ours)}"
            self._compare_state(ours, theirs, where)

    def _compare_state(self, ours: Any, theirs: Any, where: str) -> None:
        for name in [field.name for field in dataclasses.fields(ours)] if dataclasses.is_dataclass(ours) else ():
            self.compare(getattr(ours, name), getattr(theirs, name), f"{where}.{name}")
        mine, its = getattr(ours, "__dict__", {}), getattr(theirs, "__dict__", {})
        assert list(mine) == list(its), f"{where}: attributes {list(mine)} for {list(its)}"
        for name in mine:
            self.compare(mine[name], its[name], f"{where}.{name}")

    def _compare_tensors(self, ours: torch.Tensor, theirs: torch.Tensor, where: str) -> None:
        theirs_state = theirs
        if theirs.layout is torch.strided and (theirs.is_conj() or theirs.is_neg()):
            theirs = theirs.resolve_conj().resolve_neg()
        for name in ("dtype", "layout", "device", "requires_grad", "is_leaf", "is_quantized", "is_nested"):
            assert getattr(ours, name) == getattr(theirs, name), f"{where}: {name} {getattr(ours, name)}"
        assert not ours.is_inference(), f"{where}: an inference tensor"
        if ours.is_nested:  # a jagged one also carries a symbolic size, which is another in each process
            self.compare(list(ours.unbind()), list(theirs.unbind()), f"{where}.unbind()")
            return
        if type(ours) is not torch.Tensor:
            self._compare_state(ours, theirs_state, where)
        assert ours.shape == theirs.shape, f"{where}: shape {ours.shape} for {theirs.shape}"
        parts = _parts(ours)
        if parts:
            self.compare(parts, _parts(theirs), f"{where} (its parts)")
            return
        assert _strides(ours) == _strides(theirs), f"{where}: strides {ours.stride()} for {theirs.stride()}"
        if ours.device.type == "meta" or not ours.numel():
            return
        assert bits_of(ours) == bits_of(theirs), f"{where}: {ours} for {theirs}"
        self._memory.append(_Seen(where, _extent(ours), _extent(theirs)))

    def _compare_arrays(self, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], where: str) -> None:
        if not theirs.dtype.isnative and theirs.dtype.names is None:
            theirs = theirs.astype(theirs.dtype.newbyteorder("="))
        assert ours.dtype == theirs.dtype, f"{where}: {ours.dtype} for {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{where}: shape {ours.shape} for {theirs.shape}"
        assert ours.flags.writeable, f"{where}: read-only"
        if theirs.flags.contiguous or theirs.flags.f_contiguous:
            for flag in ("c_contiguous", "f_contiguous"):
                assert getattr(ours.flags, flag) == getattr(theirs.flags, flag), f"{where}: {flag}"
        else:
            assert ours.flags.c_contiguous, f"{where}: not contiguous"
        if ours.dtype == object:
            self.compare(ours.ravel().tolist(), theirs.ravel().tolist(), where)
        elif ours.dtype.hasobject:
            assert ours.tolist() == theirs.tolist(), where
        elif ours.dtype.names:  # field by field: between them there may be bytes that mean nothing
            for name in ours.dtype.names:
                assert ours[name].tobytes() == theirs[name].tobytes(), f"{where}: {ours} for {theirs}"
        else:
            assert ours.tobytes() == theirs.tobytes(), f"{where}: {ours} for {theirs}"

    def compare_memory(self) -> None:
        """Two of ours overlap in memory exactly where two of theirs do, and by as much."""
        for one, two in combinations(self._memory, 2):
            mine, its = _overlap(one.ours, two.ours), _overlap(one.theirs, two.theirs)
            assert mine == its, f"{one.where} and {two.where}: they overlap by {mine}, not by {its}"


def bits_of(value: Any) -> bytes:
    """The bytes of a float, a numpy scalar or a strided tensor's elements in order."""
    if isinstance(value, np.generic):
        return np.asarray(value).tobytes()
    if isinstance(value, float):
        return struct.pack("d", value)
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _parts(tensor: torch.Tensor) -> list[Any]:
    """What a tensor that is not plain consists of; nothing for a plain one."""
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


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that say where an element lies; those of dimensions with one element say nothing."""
    if not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _overlap(one: tuple[int, int], two: tuple[int, int]) -> int | None:
    """How far apart the beginnings of two pieces of memory are, if they overlap at all."""
    return two[0] - one[0] if one[0] < two[1] and two[0] < one[1] else None
