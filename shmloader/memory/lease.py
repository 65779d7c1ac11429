"""A slot stays leased while anything can read its bytes.

A lease is a *buffer exporter*: a ctypes array over a part of the mapping. Tensors and arrays are built on it, and
their storages keep it alive; so do views, numpy views, storage handles and autograd graphs. When the last of them is
gone the exporter is finalized, and only then: a finalizer on a *tensor* would fire while ``x.numpy()`` still reads.

What ends a lease early, and is therefore for the owner of the batch to avoid: ``x.share_memory_()`` and sending ``x``
through a torch queue (both move the storage elsewhere, and an older numpy view stays behind), a raw ``x.data_ptr()``,
and a DLPack capsule whose consumer outlives ``x``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from functools import partial
from typing import Any

#: One ctypes type per capacity, for good: a new type costs 20 µs and ctypes never forgets one. Capacities come in
#: eight sizes per power of two (``budget.size_class``), so there are never more than a few hundred.
_types: dict[int, type[Any]] = {}


def lease(mapping: mmap.mmap, offset: int, capacity: int, token: object, returned: deque[Any]) -> Any:
    """An exporter over ``capacity`` bytes of ``mapping`` at ``offset``.

    When nothing refers to it any more, ``token`` is appended to ``returned``, whoever and wherever that happens:
    finalizers run in any thread and in the middle of anything, so they do nothing else. In a forked child it is the
    child's copy of the deque that gets the token, which nobody reads.
    """
    exporter = _exporter_type(capacity).from_buffer(mapping, offset)
    # No step of Python may come of it. In one, a Ctrl-C would be raised where nobody hears it, and the slot would be
    # lost; and where the interpreter ends, a daemon thread in one would be unwound through torch's destructors.
    exporter.__del__ = partial(returned.append, token)
    return exporter


def _exporter_type(capacity: int) -> type[Any]:
    kind = _types.get(capacity)
    if kind is None:
        # The finalizer of each lease is an attribute of its own: of a class, it could only be a function.
        kind = _types[capacity] = type("Lease", (ctypes.c_char * capacity,), {"__slots__": ("__del__",)})
    return kind
