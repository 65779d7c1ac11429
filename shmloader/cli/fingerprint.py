"""Batches as lists of parts that can be compared after the batches themselves are gone.

A batch from torch's workers holds a file descriptor for every tensor and one from ours holds a slot: hundreds of them
kept for a comparison would be another use of a loader than a training makes.
"""

import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shmloader.cli.weigh import insides

DIGEST_BYTES = 16
SHOWN_ELEMENTS = 8  # of a tensor that is shown itself rather than as a digest
SHOWN_CHARACTERS = 60
LONG = 16  # elements from which a list of plain numbers or strings counts as one part
PLAIN = (int, float, bool, str)
NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)
CONSTANTS = (torch.dtype, torch.device, torch.Size, torch.layout, np.dtype, range, slice)

Seen: TypeAlias = tuple[int, ...]  # ids of what the present part lies in


class Part(NamedTuple):
    """One leaf of a batch, or one of its branches: there only the type and the number of twigs count."""

    where: str  # "[0]['image']"; "" is the batch itself
    kind: str  # type
    form: str  # dtype and shape, or how many parts there are
    value: str  # the value itself if it is short, else a digest of it
    opaque: bool = False  # there is no way to look inside


def fingerprint(batch: Any) -> list[Part]:
    """All parts of a batch in order."""
    parts: list[Part] = []
    _Walk(parts.append).visit(batch, "", ())
    return parts


class _Walk:
    """Goes through one batch."""

    def __init__(self, add: Callable[[Part], None]) -> None:
        self._add = add

    def visit(self, value: Any, where: str, above: Seen) -> None:
        """Adds a value and all that is in it."""
        kind = _name(type(value))
        if id(value) in above:
            self._add(Part(where, kind, "refers to what it lies in", ""))
        elif isinstance(value, Tensor):
            self._tensor(value, where, kind, above)
        elif isinstance(value, np.ndarray):
            self._array(value, where, kind, above)
        elif (text := _constant(value)) is not None:
            self._add(Part(where, kind, "", text))
        else:
            self._branch(value, where, kind, (*above, id(value)))

    def _branch(self, value: Any, where: str, kind: str, above: Seen) -> None:
        if isinstance(value, (list, tuple)):
            self._sequence(value, where, kind, above)
        elif isinstance(value, (set, frozenset)):
            self._add(Part(where, kind, f"{len(value)} elements", _digest_of_parts(map(fingerprint, value))))
        elif type(value) is dict:
            self._add(Part(where, kind, f"{len(value)} entries", ""))
            self._items(value.items(), where, above)
        else:
            self._object(value, where, kind, above)

    def _sequence(self, value: Any, where: str, kind: str, above: Seen) -> None:
        if len(value) >= LONG and type(value[0]) in PLAIN and all(type(each) is type(value[0]) for each in value):
            form = f"{len(value)} times {_name(type(value[0]))}"
            self._add(Part(where, kind, form, _digest(repr(list(value)).encode(errors="surrogatepass"))))
            return
        self._add(Part(where, kind, f"{len(value)} elements", ""))
        for index, each in enumerate(value):
            self.visit(each, f"{where}[{index}]", above)
        self._attributes(getattr(value, "__dict__", None), where, above)

    def _items(self, items: Iterable[tuple[Any, Any]], where: str, above: Seen) -> None:
        for key, each in items:
            shown = repr(key) if isinstance(key, (*PLAIN, bytes)) else _digest_of_parts([fingerprint(key)])
            self.visit(each, f"{where}[{shown}]", above)

    def _attributes(self, state: Any, where: str, above: Seen) -> None:
        """What makes up an object besides what it was built from: mostly its `__dict__`, or that and its slots."""
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            for half in state:
                self._attributes(half, where, above)
        elif isinstance(state, dict) and all(isinstance(name, str) for name in state):
            for name, each in state.items():
                self.visit(each, f"{where}.{name}", above)
        elif state is not None:
            self.visit(state, f"{where} (state)", above)

    def _object(self, value: Any, where: str, kind: str, above: Seen) -> None:
        """By what pickle would send."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            self._add(Part(where, kind, "", "", opaque=True))
            return
        if isinstance(reduced, str):
            self._add(Part(where, kind, "", reduced))
            return
        make, given, state, elements, items = (*reduced, None, None, None)[:5]
        self._add(Part(where, kind, _name(make), ""))
        for index, each in enumerate(given):
            self.visit(each, f"{where} (argument {index})", above)
        self._attributes(state, where, above)
        for index, each in enumerate(elements or ()):
            self.visit(each, f"{where}[{index}]", above)
        self._items(items or (), where, above)

    def _tensor(self, value: Tensor, where: str, kind: str, above: Seen) -> None:
        form = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" if not value.is_nested else "nested"
        form += f" on {value.device}" * (value.device.type != "cpu") + " requires_grad" * value.requires_grad
        plain = value.detach() if type(value) is Tensor else value.detach().as_subclass(Tensor)
        if inside := insides(plain):
            self._add(Part(where, kind, f"{form} {plain.layout}", ""))
            self.visit(inside, f"{where} (inside)", above)
        else:
            self._add(Part(where, kind, form, _tensor_value(plain)))
        if type(value) is not Tensor:
            self._attributes(dict(vars(value)), where, above)

    def _array(self, value: np.ndarray[Any, Any], where: str, kind: str, above: Seen) -> None:
        form = f"{value.dtype} {value.shape}"
        if value.dtype.hasobject:
            self._add(Part(where, kind, form, ""))
            self.visit(value.tolist(), where, (*above, id(value)))
        else:
            shown = str(value.tolist()) if value.size <= SHOWN_ELEMENTS else None
            self._add(Part(where, kind, form, _short(shown) or _digest(value.tobytes())))


def _constant(value: Any) -> str | None:
    """The value as text, or None for what has parts."""
    if type(value) is float:
        return repr(value) if value == value else struct.pack("<d", value).hex()  # nan is not always the same nan
    if value is None or type(value) in (int, bool, complex):
        return repr(value)
    if isinstance(value, CONSTANTS):
        return str(value)
    if type(value) in (str, bytes, bytearray):
        return _short(repr(value)) or _digest(value.encode(errors="surrogatepass") if isinstance(value, str) else value)
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return f"{value.dtype} {value!r} {value.tobytes().hex()[:SHOWN_CHARACTERS]}"
    return _name(value) if isinstance(value, NAMED) else None


def _tensor_value(tensor: Tensor) -> str:
    if tensor.device.type == "meta":
        return ""
    resolved = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    data = _digest(resolved.reshape(-1).view(torch.uint8).numpy().data)
    shown = _short(str(resolved.tolist())) if resolved.numel() <= SHOWN_ELEMENTS else None
    return f"{shown} (bytes {data[:8]})" if shown else data  # what is shown may hide a sign or a nan's bits


def _digest(data: Any) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _digest_of_parts(fingerprints: Iterable[list[Part]]) -> str:
    """Of sets and keys: the order in which a set names its elements says nothing."""
    return _digest("\n".join(sorted(map(repr, fingerprints))).encode(errors="surrogatepass"))


def _short(text: str | None) -> str | None:
    return text if text is not None and len(text) <= SHOWN_CHARACTERS else None


def _name(value: Any) -> str:
    """A type's or a function's name, with its module unless it is built in."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", type(value).__qualname__)
    return name if module in (None, "builtins") else f"{module}.{name}"
