"""Where in a batch the part is that cannot be pickled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shmloader.memory.codec import encode


def locate(obj: Any, *, depth: int = 8) -> str:
    """Where in ``obj`` the part is that cannot be pickled, as a Python expression such as ``batch[1]["meta"].lock``."""
    path = "batch"
    while depth > 0:
        depth -= 1
        for suffix, child in _children(obj):
            if not _picklable(child):
                path, obj = path + suffix, child
                break
        else:
            return path
    return path


def _picklable(obj: Any) -> bool:
    try:
        encode(obj)
    except Exception:
        return False
    return True


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if type(obj) is torch.Tensor:
        return
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        yield from ((f".{name}", value) for name, value in zip(obj._fields, obj, strict=False))
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    state = getattr(obj, "__dict__", None)
    if isinstance(state, dict) and not isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in state.items())
    slots = getattr(type(obj), "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if hasattr(obj, name):
            yield f".{name}", getattr(obj, name)
