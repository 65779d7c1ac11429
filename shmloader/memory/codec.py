"""A batch to bytes: one codec for everything that can be pickled.

Encoding pickles the batch's *skeleton* (protocol 5) and takes the bytes of tensors, arrays and buffers out of it. What
was taken out becomes *regions*: each storage once, so that aliasing survives, and of a large storage only the bytes
that the batch can see. Where the regions lie is the *layout* (:mod:`~shmloader.memory.layout`), and
:func:`~shmloader.memory.rebuild.decode` builds the batch on the bytes.

What pickle alone would get wrong is dealt with while encoding: conjugate and negative bits are resolved, and a tensor
that autograd still tracks is refused, as torch refuses it.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import marshal
import pickle
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from shmloader.memory import rebuild
from shmloader.memory.dtypes import CODES, SIZES
from shmloader.memory.layout import RAW, SHARED, WHOLE, Layout, Span
from shmloader.memory.outline import Outline, contiguous_strides, skeleton
from shmloader.memory.rebuild import decode

#: Every storage starts at a multiple of this: what vector units and DMA engines like, and more than any dtype needs.
ALIGN_BYTES = 64
#: Disjoint views of one storage travel as one region, and so keep sharing it, unless that ships over twice their bytes.
HULL_FACTOR = 2
#: Values of more bytes than this travel with the pickle of the batch, which takes them through the slot if need be.
MOST_VALUE_BYTES = 8 * 1024
#: So many skeletons of plain nests are remembered; ragged batches have ever new ones.
MOST_SKELETONS = 256

#: Stands for "the next span" in a skeleton. Writable, or pickle would wrap what stands in for it in a read-only view.
_SPAN = pickle.PickleBuffer(bytearray())


# -- encoding ---------------------------------------------------------------------------------------------------


class Region:
    """Bytes to be shipped: ``nbytes`` at ``address``, kept alive by ``owner``.

    While pickling, one stands for each look at a storage; ``key`` tells storages apart, and ``kind`` says how the look
    is to be rebuilt.
    """

    __slots__ = ("address", "key", "kind", "nbytes", "owner")

    def __init__(self, key: int, kind: int, address: int, nbytes: int, owner: Any) -> None:
        self.key, self.kind, self.address, self.nbytes, self.owner = key, kind, address, nbytes, owner


@dataclass(slots=True)
class Encoded:
    """A batch taken apart: the skeleton, the regions, and for each span (kind, region number, inner offset)."""

    skeleton: bytes
    regions: list[Region]
    sights: tuple[tuple[int, int, int], ...]
    #: Whether the batch is a plain nest: then the skeleton is its outline, and its values are pickled apart.
    plain: bool = False
    values: bytes = b""

    def ship_skeleton(self) -> None:
        """Let the skeleton travel as the last region, for one too long for a message."""
        view = np.frombuffer(self.skeleton, np.uint8)
        self.regions.append(Region(0, RAW, view.ctypes.data, view.nbytes, view))
        self.skeleton = b""

    def drop(self) -> None:
        """Let go of the batch: once its bytes are where they belong, it must not be kept alive from here."""
        self.regions = []

    def key(self, offsets: list[int]) -> Hashable:
        """Equal for equal layouts, and cheaper than the layout."""
        return self.skeleton, self.sights, tuple([region.nbytes for region in self.regions]), tuple(offsets)

    def layout(self, offsets: list[int]) -> Layout:
        """The layout once region *n* lies at ``offsets[n]``."""
        regions = self.regions
        spans = [Span(kind, offsets[n], regions[n].nbytes, inner) for kind, n, inner in self.sights]
        return Layout(self.skeleton, tuple(spans), self.plain)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up so that the next region may follow."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def encode(obj: Any) -> Encoded:
    """Take ``obj`` apart without copying any of its large parts.

    Raises:
        Exception: whatever pickling raises for something that cannot be pickled; :func:`locate` says where it is.
    """
    outline = Outline.of(obj)
    if outline is None:
        return dismantle(obj)
    regions = [_region(tensor) for tensor in outline.tensors]
    if len({region.key for region in regions}) != len(regions):
        return dismantle(obj)  # storages are shared in ways that the outline does not tell
    values = pickle.dumps(outline.values, 5) if outline.values else b""
    if len(values) > MOST_VALUE_BYTES:
        return dismantle(obj)
    return Encoded(skeleton_of(outline.key), regions, _each_whole(len(regions)), plain=True, values=values)


@lru_cache(maxsize=256)
def _each_whole(count: int) -> tuple[tuple[int, int, int], ...]:
    """The sights of ``count`` regions, each of which one tensor sees in whole."""
    return tuple([(WHOLE, number, 0) for number in range(count)])


def skeleton_of(key: Hashable) -> bytes:
    """The skeleton of a plain nest, by the key of its outline; most batches look like the one before."""
    known = _skeletons.get(key)
    if known is None:
        if len(_skeletons) >= MOST_SKELETONS:
            _skeletons.clear()
        known = _skeletons[key] = skeleton(key)
    return known


_skeletons: dict[Hashable, bytes] = {}


def dismantle(obj: Any, *, keep_shared: bool = False) -> Encoded:
    """Take apart anything that can be pickled.

    Args:
        keep_shared: leave tensors in shared memory to torch's own reduction, which passes their descriptor, so that
            both sides go on seeing each other's writes. For data sets; a batch is always copied.

    Raises:
        Exception: as :func:`encode`.
    """
    file, seen = io.BytesIO(), _Seen()
    _Pickler(file, seen, keep_shared).dump(obj)
    regions = seen.regions
    if len({region.key for region in regions}) == len(regions):
        sights = tuple([(region.kind, number, 0) for number, region in enumerate(regions)])
    else:
        regions, sights = _merge(regions)
    return Encoded(file.getvalue(), regions, sights)


def _region(tensor: torch.Tensor) -> Region:
    """A look at a contiguous tensor."""
    key = tensor.untyped_storage()._cdata
    return Region(key, WHOLE, tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)


class _Seen:
    """What a pickler took out of band, in the order of the skeleton's spans.

    Apart from the pickler, whose memo would otherwise keep the batch alive in a cycle through its own callback.
    """

    __slots__ = ("pending", "regions")

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.pending: Region | None = None

    def on_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """A span was written: ours, for what is pending, or a buffer that some other type's reduction offers."""
        if buffer is _SPAN and self.pending is not None:
            self.regions.append(self.pending)
            self.pending = None
        else:
            view = np.frombuffer(buffer.raw(), np.uint8)
            self.regions.append(Region(self.fresh_key(), RAW, view.ctypes.data, view.nbytes, view))

    def fresh_key(self) -> int:
        """A key for memory that is no torch storage, and so is looked at once."""
        return -len(self.regions) - 1


class _Pickler(pickle.Pickler):
    """multiprocessing's pickler, reductions included, with storages and buffers taken out of band."""

    # ForkingPickler's own, built once: it makes a new one per object, which takes longer than pickling a small batch.
    # Both maps in it are live, so reductions that are registered later count.
    dispatch_table: Any = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]

    def __init__(self, file: io.BytesIO, seen: _Seen, keep_shared: bool) -> None:
        super().__init__(file, 5, buffer_callback=seen.on_buffer)
        self._seen = seen
        self._keep_shared = keep_shared

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            return self._reduce_tensor(obj)
        if kind is np.ndarray:
            return self._reduce_array(obj)
        if kind is torch.UntypedStorage:
            return self._reduce_storage(obj)
        if isinstance(obj, np.ndarray) and not obj.flags.writeable:
            return obj.__reduce__()  # in band: what is read-only would arrive so, but from torch's loader it does not
        if isinstance(obj, torch.Tensor) and (obj.is_conj() or obj.is_neg()):
            resolved = obj.resolve_conj().resolve_neg()
            resolved.__dict__.update(obj.__dict__)
            return (rebuild.same, (resolved,))
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized or tensor.is_nested:
            # Quantized tensors: torch's reduction for processes forgets the quantizer, its ordinary one does not.
            return (rebuild._q, tensor._reduce_ex_internal(2)) if tensor.is_quantized else reduce_tensor(tensor)
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return reduce_tensor(tensor)  # raises torch's own text, which says to detach()
            return (rebuild._g, (tensor.detach(),))
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self._keep_shared and tensor.is_shared():
            return reduce_tensor(tensor)
        return self._reduce_strided(tensor)

    def _reduce_strided(self, tensor: torch.Tensor) -> Any:
        code, shape, strides = CODES[tensor.dtype], tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return (rebuild._e, (code, shape, strides))
        self._seen.pending = region = _region(tensor)
        if strides == contiguous_strides(shape):
            return (rebuild._t, (_SPAN, code, shape))
        region.nbytes = (sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1) * SIZES[code]
        return (rebuild._s, (_SPAN, code, shape, strides))

    def _reduce_array(self, value: np.ndarray[Any, Any]) -> Any:
        dtype = value.dtype
        if dtype.hasobject or dtype.itemsize == 0:
            return NotImplemented
        if not dtype.isnative and dtype.names is None:
            # As torch's loader hands it on: numpy's in-band pickles arrive in native byte order, which torch demands.
            dtype = dtype.newbyteorder("=")
            value = value.astype(dtype)
        if value.size == 0:
            return (rebuild._n, (value.shape, dtype))
        flags = value.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            value = np.ascontiguousarray(value)
        self._seen.pending = Region(self._seen.fresh_key(), WHOLE, value.ctypes.data, value.nbytes, value)
        order = "C" if value.flags.c_contiguous else "F"
        return (rebuild._a, (_SPAN, dtype.str if dtype.isbuiltin == 1 else dtype, value.shape, order))

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or (self._keep_shared and storage.is_shared()):
            return NotImplemented
        if storage.nbytes() == 0:
            return (torch.UntypedStorage, (0,))
        self._seen.pending = Region(storage._cdata, SHARED, storage.data_ptr(), storage.nbytes(), storage)
        return (rebuild._u, (_SPAN,))


def _merge(looks: list[Region]) -> tuple[list[Region], tuple[tuple[int, int, int], ...]]:
    """Turn what was seen of each storage into regions, so that what overlapped still does."""
    by_key: dict[int, list[Region]] = {}
    for look in looks:
        by_key.setdefault(look.key, []).append(look)
    regions: list[Region] = []
    placed: dict[int, tuple[int, list[int]]] = {}
    for key, group in by_key.items():
        extents = _extents(group)
        placed[key] = len(regions), [begin for begin, _ in extents]
        regions += [Region(key, SHARED, begin, end - begin, group) for begin, end in extents]
    return regions, tuple([_sight(look, len(by_key[look.key]) == 1, *placed[look.key]) for look in looks])


def _sight(look: Region, alone: bool, number: int, begins: list[int]) -> tuple[int, int, int]:
    if alone:
        return look.kind, number, 0
    piece = bisect_right(begins, look.address) - 1
    return SHARED, number + piece, look.address - begins[piece]


def _extents(group: list[Region]) -> list[tuple[int, int]]:
    """The parts of one storage that travel: [begin, end) addresses, disjoint, in order."""
    if len(group) == 1:
        return [(group[0].address, group[0].address + group[0].nbytes)]
    base = _base_address(group[0].owner)
    seen: list[tuple[int, int]] = []
    for begin, end in sorted((look.address, look.address + look.nbytes) for look in group):
        # Views of other dtypes need their offset to be a multiple of their size.
        begin -= (begin - base) % 16
        if seen and begin <= seen[-1][1]:
            seen[-1] = (seen[-1][0], max(seen[-1][1], end))
        else:
            seen.append((begin, end))
    hull = (seen[0][0], seen[-1][1])
    visible = sum(end - begin for begin, end in seen)
    return [hull] if hull[1] - hull[0] <= HULL_FACTOR * visible else seen


def _base_address(owner: torch.Tensor | torch.UntypedStorage) -> int:
    return (owner if isinstance(owner, torch.UntypedStorage) else owner.untyped_storage()).data_ptr()


# -- placing ----------------------------------------------------------------------------------------------------


def place(encoded: Encoded, address: int, capacity: int, used: int = 0) -> list[int] | None:
    """Bring every region into the range of ``capacity`` bytes at ``address``; None if they do not fit.

    Regions that lie there already, aligned, stay where they are; the others are copied behind the first ``used``
    bytes, one after the other. Returns the regions' offsets in the range.
    """
    offsets = []
    for region in encoded.regions:
        offset = region.address - address
        # Only storages may stay. An array there is a view of a tensor of the range: it travels by value, as in torch,
        # and where the batch found no range it would not alias the tensor either.
        if 0 <= offset < used and offset % ALIGN_BYTES == 0 and region.key > 0:
            offsets.append(offset)
            continue
        if used + region.nbytes > capacity:
            return None
        if region.nbytes:
            ctypes.memmove(address + used, region.address, region.nbytes)
        offsets.append(used)
        used = aligned(used + region.nbytes)
    return offsets


def need(encoded: Encoded, address: int = 0, used: int = 0) -> int:
    """How large a range must be for :func:`place` to succeed, were it called with the same ``used`` bytes."""
    copied = 0
    for region in encoded.regions:
        offset = region.address - address
        if not (0 <= offset < used and offset % ALIGN_BYTES == 0):
            copied += aligned(region.nbytes)
    return used + copied


# -- self-contained bytes: indices, errors ----------------------------------------------------------------------

_INTS, _ANY = b"i", b"p"


def pack(obj: Any) -> bytes:
    """``obj`` as one run of bytes; types come back exactly."""
    if type(obj) is int or (type(obj) is list and set(map(type, obj)) == {int}):
        # Only for these: of what has a buffer, such as numpy's integers, marshal makes bytes.
        return _INTS + marshal.dumps(obj)
    encoded = dismantle(obj)  # kept to the end: join() looks at the pieces when the generator is through with them
    return _ANY + b"".join(pieces(encoded))


def pieces(encoded: Encoded) -> Iterator[bytes | memoryview]:
    """The bytes of ``encoded`` as one run, piece by piece: the layout, then the regions, each aligned."""
    offsets, used = [], 0
    for region in encoded.regions:
        offsets.append(used)
        used = aligned(used + region.nbytes)
    head = encoded.layout(offsets).to_bytes()
    yield head
    yield bytes(aligned(len(head)) - len(head))
    for region in encoded.regions:
        if region.nbytes:
            yield memoryview((ctypes.c_char * region.nbytes).from_address(region.address)).cast("B")
            yield bytes(aligned(region.nbytes) - region.nbytes)


def unpack(data: bytes) -> Any:
    """The inverse of :func:`pack`. What is built may be written to, and shares nothing with ``data``."""
    if data[:1] == _INTS:
        return marshal.loads(memoryview(data)[1:])
    return join(bytearray(memoryview(data)[1:]))


def join(buffer: Any) -> Any:
    """Rebuild what :func:`pieces` took apart, on ``buffer`` itself (writable, any length beyond the run's)."""
    layout = Layout.from_bytes(memoryview(buffer))
    return decode(layout, buffer, aligned(layout.head_bytes))
