"""The nests that batches are: walked, and built anew with other leaves.

What counts as a nest is what torch's ``pin_memory`` takes for one: mappings, named tuples, tuples, other sequences.
Anything else that has a method ``to`` knows itself how to get to a device (packed sequences, tensor subclasses,
tensordicts, graphs, tokenizers' encodings), and goes before that where it is a nest, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch

_PLAIN_NESTS = (dict, list, tuple)
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def leaves(data: Any) -> Iterator[Any]:
    """The plain tensors in a batch, and what moves itself."""
    if isinstance(data, torch.Tensor) or _moves_itself(data):
        yield data
    elif isinstance(data, Mapping):
        for part in data.values():
            yield from leaves(part)
    elif _is_sequence(data):
        for part in data:
            yield from leaves(part)


def rebuilt(data: Any, plain: Callable[[torch.Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """The batch anew, of the same types.

    Args:
        data: the batch.
        plain: gives what takes a plain tensor's place.
        other: gives what takes the place of whatever else has a method ``to``.
    """
    if is_plain(data):
        return plain(data)
    if isinstance(data, torch.Tensor) or _moves_itself(data):
        return other(data)
    if isinstance(data, Mapping):
        return _mapping(data, {key: rebuilt(value, plain, other) for key, value in data.items()})
    if _is_sequence(data):
        return _sequence(data, [rebuilt(part, plain, other) for part in data])
    return data


def stays(data: Any) -> bool:
    """Whether anything of a batch may still refer to the CPU's memory once its plain tensors are on a device."""
    if is_plain(data) or type(data) in _ATOMS:
        return False
    if type(data) is dict:
        return any(stays(part) for part in data.values())
    if type(data) in (list, tuple) or (
        isinstance(data, tuple) and hasattr(data, "_fields") and not _moves_itself(data)
    ):
        return any(stays(part) for part in data)
    return True  # numpy's arrays do; what moves itself may keep anything


def is_plain(data: Any) -> bool:
    """Whether this is a tensor that is nothing but CPU memory with a shape and strides."""
    return (
        type(data) is torch.Tensor
        and data.layout is torch.strided
        and data.device.type == "cpu"
        and not data.is_quantized
        and not data.is_nested
        and not data.is_conj()
        and not data.is_neg()
        and not (data.requires_grad and not data.is_leaf)
    )


def _moves_itself(data: Any) -> bool:
    return type(data) not in _PLAIN_NESTS and callable(getattr(type(data), "to", None))


def _is_sequence(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, (str, bytes, bytearray))


def _mapping(data: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return parts
    try:
        if isinstance(data, MutableMapping):
            # It may have more than its items, so it is not made from them alone.
            clone = copy.copy(data)
            clone.update(parts)
            return clone
        return type(data)(parts)  # type: ignore[call-arg]
    except TypeError:  # it can neither be copied nor made from a dict
        return parts


def _sequence(data: Sequence[Any], parts: list[Any]) -> Any:
    if type(data) is list:
        return parts
    if isinstance(data, tuple):
        return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
    try:
        if isinstance(data, MutableSequence):
            clone = copy.copy(data)
            for index, part in enumerate(parts):
                clone[index] = part
            return clone
        return type(data)(parts)  # type: ignore[call-arg]
    except TypeError:  # a range, for one
        return parts
