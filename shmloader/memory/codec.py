"""A batch to bytes and back: one codec for everything that can be pickled.

Encoding pickles the batch's *skeleton* (protocol 5) and takes the bytes of tensors, arrays and buffers out of it. What
was taken out becomes *regions*: each storage once, so that aliasing survives, and of a large storage only the bytes
that the batch can see. Where the regions lie is the *layout*: skeleton plus one *span* per place that refers to a
region. Batches of the same shapes have the same layout, byte for byte, so a layout crosses to the main process once
and is a number afterwards (:class:`Interner`).

Decoding unpickles the skeleton and builds each tensor on the memory itself: own storage, offset 0, exact size, no
``_base``. What pickle alone would get wrong is dealt with while encoding: conjugate and negative bits are resolved, and a
tensor that autograd still tracks is refused, as torch refuses it.
"""

from __future__ import annotations

import copyreg
import ctypes
import io
import pickle
import struct
from array import array
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

#: Every storage starts at a multiple of this: what vector units and DMA engines like, and more than any dtype needs.
ALIGN_BYTES = 64
#: Disjoint views of one storage travel as one region, and so keep sharing it, unless that ships over twice their bytes.
HULL_FACTOR = 2
#: An interner knows at most this many layouts at a time; the numbers are used again, which is announced.
MOST_LAYOUTS = 64

_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_SIZES = [dtype.itemsize for dtype in _DTYPES]

#: Stands for "the next span" in a skeleton. Writable, or pickle would wrap what stands in for it in a read-only view.
_SPAN = pickle.PickleBuffer(bytearray())

_WHOLE, _SHARED, _RAW = range(3)
_COUNTS = struct.Struct("<II")
_SPAN_ENTRY = struct.Struct("<BQQQ")


class Span(NamedTuple):
    """One place in a skeleton that refers to bytes: how, and where they lie within the batch's memory."""

    kind: int  # _WHOLE: alone on its region; _SHARED: others see the region too; _RAW: a plain buffer
    offset: int  # of the region
    nbytes: int  # of the region
    inner: int  # of what is seen, within the region


class Layout:
    """A skeleton and its spans: all that is needed to rebuild a batch on its bytes."""

    __slots__ = ("extent", "nbytes", "simple", "skeleton", "spans")

    def __init__(self, skeleton: bytes, spans: tuple[Span, ...]) -> None:
        self.skeleton = skeleton
        self.spans = spans
        self.extent = max((span.offset + span.nbytes for span in spans), default=0)
        self.nbytes = sum({span.offset: span.nbytes for span in spans}.values())
        self.simple = all(span.kind == _WHOLE for span in spans)

    def to_bytes(self) -> bytes:
        """The layout's own bytes; equal for equal layouts."""
        spans = b"".join([_SPAN_ENTRY.pack(*span) for span in self.spans])
        return _COUNTS.pack(len(self.spans), len(self.skeleton)) + spans + self.skeleton

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Layout:
        """The inverse of :meth:`to_bytes`; bytes behind the layout are ignored."""
        count, length = _COUNTS.unpack_from(data)
        start = _COUNTS.size + count * _SPAN_ENTRY.size
        spans = tuple(Span(*entry) for entry in _SPAN_ENTRY.iter_unpack(data[_COUNTS.size : start]))
        return cls(bytes(data[start : start + length]), spans)


# -- decoding ---------------------------------------------------------------------------------------------------

#: What a rebuilding function gets for a span: buffer, offset and size of the region in it, the offset of what is seen
#: within the region, and the region's storage where several spans see it.
_Place = tuple[Any, int, int, int, "torch.UntypedStorage | None"]


def decode(layout: Layout, buffer: Any, start: int = 0) -> Any:
    """Rebuild a batch on ``buffer`` (any writable buffer), whose part for this batch begins at ``start``.

    Everything that is built keeps ``buffer`` alive, and nothing else of it.
    """
    # Inside inference_mode torch would build inference tensors, which a later training step could not save.
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _decode(layout, buffer, start)
    return _decode(layout, buffer, start)


def _decode(layout: Layout, buffer: Any, start: int) -> Any:
    places: list[Any]
    if layout.simple:
        places = [(buffer, start + span[1], span[2], 0, None) for span in layout.spans]
    else:
        places = list(_places(layout.spans, buffer, start))
    return pickle.loads(layout.skeleton, buffers=places)


def _places(spans: tuple[Span, ...], buffer: Any, start: int) -> Iterator[Any]:
    storages: dict[int, torch.UntypedStorage] = {}
    for kind, offset, nbytes, inner in spans:
        if kind == _RAW:
            yield memoryview(buffer).cast("B")[start + offset : start + offset + nbytes]
            continue
        if kind == _SHARED and offset not in storages:
            storages[offset] = _storage_on(buffer, start + offset, nbytes)
        yield buffer, start + offset, nbytes, inner, storages.get(offset) if kind == _SHARED else None


def _storage_on(buffer: Any, offset: int, nbytes: int) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()


# The names below stand in every skeleton, so they are short. Each builds one thing that the encoder took apart.


def _t(place: _Place, code: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor."""
    buffer, offset, nbytes, _, storage = place
    if storage is not None:
        return _s(place, code, shape, _contiguous_strides(shape))
    # resize_ on a fresh tensor, not view(): a view has a _base, and detach_() on it raises.
    return torch.frombuffer(buffer, dtype=_DTYPES[code], count=nbytes // _SIZES[code], offset=offset).resize_(shape)


def _s(place: _Place, code: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with strides of its own, or one that shares its storage."""
    buffer, offset, nbytes, inner, storage = place
    storage = storage if storage is not None else _storage_on(buffer, offset, nbytes)
    empty = torch.empty(0, dtype=_DTYPES[code], device="cpu")
    return empty.set_(storage, inner // _SIZES[code], shape, strides)  # type: ignore[call-overload, no-any-return]


def _e(code: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor without elements."""
    return torch.empty_strided(shape, strides, dtype=_DTYPES[code], device="cpu")


def _g(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that requires grad."""
    return tensor.requires_grad_()


def _u(place: _Place) -> torch.UntypedStorage:
    """A storage."""
    buffer, offset, nbytes, _, storage = place
    return storage if storage is not None else _storage_on(buffer, offset, nbytes)


def _a(place: _Place, dtype: Any, shape: tuple[int, ...], order: Any) -> np.ndarray[Any, Any]:
    """A numpy array."""
    buffer, offset, _, inner, _ = place
    return np.ndarray(shape, dtype, buffer, offset + inner, order=order)


# -- encoding ---------------------------------------------------------------------------------------------------


class Region:
    """Bytes to be shipped: ``nbytes`` at ``address``, kept alive by ``owner``."""

    __slots__ = ("address", "nbytes", "owner")

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.address, self.nbytes, self.owner = address, nbytes, owner


class _Sight(NamedTuple):
    """One look at a storage while pickling: which storage, its own extent, and what is seen of it."""

    key: int
    storage_address: int
    storage_nbytes: int
    address: int
    nbytes: int
    kind: int
    owner: Any


@dataclass(slots=True)
class Encoded:
    """A batch taken apart: the skeleton, the regions, and for each span (kind, region number, inner offset)."""

    skeleton: bytes
    regions: list[Region]
    sights: list[tuple[int, int, int]]

    def ship_skeleton(self) -> None:
        """Let the skeleton travel as the last region, for one too long for a message."""
        view = np.frombuffer(self.skeleton, np.uint8)
        self.regions.append(Region(view.ctypes.data, view.nbytes, view))
        self.skeleton = b""

    def drop(self) -> None:
        """Let go of the batch: once its bytes are where they belong, it must not be kept alive from here."""
        self.regions = []

    def layout(self, offsets: list[int]) -> Layout:
        """The layout once region *n* lies at ``offsets[n]``."""
        regions = self.regions
        spans = [Span(kind, offsets[n], regions[n].nbytes, inner) for kind, n, inner in self.sights]
        return Layout(self.skeleton, tuple(spans))


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up so that the next region may follow."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def encode(obj: Any, *, keep_shared: bool = False) -> Encoded:
    """Take ``obj`` apart without copying any of its large parts.

    Args:
        keep_shared: leave tensors in shared memory to torch's own reduction, which passes their descriptor, so that
            both sides go on seeing each other's writes. For data sets; a batch is always copied.

    Raises:
        Exception: whatever pickling raises for something that cannot be pickled; :func:`locate` says where it is.
    """
    file, seen = io.BytesIO(), _Seen()
    _Pickler(file, seen, keep_shared).dump(obj)
    regions, sights = _merge(seen.sights)
    return Encoded(file.getvalue(), regions, sights)


class _Seen:
    """What a pickler took out of band, in the order of the skeleton's spans.

    Apart from the pickler, whose memo would otherwise keep the batch alive in a cycle through its own callback.
    """

    __slots__ = ("pending", "sights")

    def __init__(self) -> None:
        self.sights: list[_Sight] = []
        self.pending: _Sight | None = None

    def on_buffer(self, buffer: pickle.PickleBuffer) -> None:
        """A span was written: ours, for what is pending, or a buffer that some other type's reduction offers."""
        if buffer is _SPAN and self.pending is not None:
            self.sights.append(self.pending)
            self.pending = None
        else:
            view = np.frombuffer(buffer.raw(), np.uint8)
            self.sights.append(_alone(len(self.sights), view.ctypes.data, view.nbytes, _RAW, view))


def _alone(number: int, address: int, nbytes: int, kind: int, owner: Any) -> _Sight:
    """A sight of memory that is no torch storage, and so is looked at once."""
    return _Sight(-number - 1, address, nbytes, address, nbytes, kind, owner)


class _Pickler(pickle.Pickler):
    """multiprocessing's pickler, reductions included, with storages and buffers taken out of band."""

    # ForkingPickler's own, built once: it makes a new one per object, which takes longer than pickling a small batch.
    # Both maps in it are live, so reductions that are registered later count.
    dispatch_table = ChainMap(ForkingPickler._extra_reducers, copyreg.dispatch_table)  # type: ignore[attr-defined]

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
        if isinstance(obj, torch.Tensor) and (obj.is_conj() or obj.is_neg()):
            return (_same, (obj.resolve_conj().resolve_neg(),))
        return NotImplemented

    def _see(self, storage: torch.UntypedStorage, address: int, nbytes: int, owner: Any) -> pickle.PickleBuffer:
        kind = _WHOLE if owner is not storage else _SHARED
        self._seen.pending = _Sight(storage._cdata, storage.data_ptr(), storage.nbytes(), address, nbytes, kind, owner)
        return _SPAN

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_quantized or tensor.is_nested:
            # Quantized tensors: torch's reduction for processes forgets the quantizer, its ordinary one does not.
            return tensor.__reduce_ex__(2) if tensor.is_quantized else reduce_tensor(tensor)
        if tensor.requires_grad:
            if not tensor.is_leaf:
                return reduce_tensor(tensor)  # raises torch's own text, which says to detach()
            return (_g, (tensor.detach(),))
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if self._keep_shared and tensor.is_shared():
            return reduce_tensor(tensor)
        return self._reduce_strided(tensor)

    def _reduce_strided(self, tensor: torch.Tensor) -> Any:
        code, shape, strides = _CODES[tensor.dtype], tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0:
            return (_e, (code, shape, strides))
        storage = tensor.untyped_storage()
        if strides == _contiguous_strides(shape):
            span = self._see(storage, tensor.data_ptr(), tensor.numel() * _SIZES[code], tensor)
            return (_t, (span, code, shape))
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        return (_s, (self._see(storage, tensor.data_ptr(), reach * _SIZES[code], tensor), code, shape, strides))

    def _reduce_array(self, value: np.ndarray[Any, Any]) -> Any:
        dtype = value.dtype
        if dtype.hasobject or value.nbytes == 0:
            return NotImplemented
        flags = value.flags
        if not (flags.c_contiguous or flags.f_contiguous):
            value = np.ascontiguousarray(value)
        number = len(self._seen.sights)
        self._seen.pending = _alone(number, value.ctypes.data, value.nbytes, _WHOLE, value)
        order = "C" if value.flags.c_contiguous else "F"
        return (_a, (_SPAN, dtype.str if dtype.isbuiltin == 1 else dtype, value.shape, order))

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or (self._keep_shared and storage.is_shared()):
            return NotImplemented
        if storage.nbytes() == 0:
            return (torch.UntypedStorage, (0,))
        return (_u, (self._see(storage, storage.data_ptr(), storage.nbytes(), storage),))


def _same(obj: Any) -> Any:
    return obj


@lru_cache(maxsize=4096)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _merge(sights: list[_Sight]) -> tuple[list[Region], list[tuple[int, int, int]]]:
    """Turn what was seen of each storage into regions, so that what overlapped still does."""
    if len({sight.key for sight in sights}) == len(sights):
        regions = [Region(sight.address, sight.nbytes, sight.owner) for sight in sights]
        return regions, [(sight.kind, number, 0) for number, sight in enumerate(sights)]
    by_key: dict[int, list[_Sight]] = {}
    for sight in sights:
        by_key.setdefault(sight.key, []).append(sight)
    regions = []
    extents = {key: _extents(group) for key, group in by_key.items()}
    first: dict[tuple[int, int], int] = {}
    for key, pieces in extents.items():
        for begin, end in pieces:
            first[key, begin] = len(regions)
            regions.append(Region(begin, end - begin, by_key[key]))
    return regions, [_placed(sight, by_key[sight.key], extents[sight.key], first) for sight in sights]


def _placed(
    sight: _Sight, group: list[_Sight], pieces: list[tuple[int, int]], first: dict[tuple[int, int], int]
) -> tuple[int, int, int]:
    begin = next(begin for begin, end in pieces if begin <= sight.address < end or sight.nbytes == 0)
    kind = sight.kind if len(group) == 1 else _SHARED
    return kind, first[sight.key, begin], sight.address - begin


def _extents(group: list[_Sight]) -> list[tuple[int, int]]:
    """The parts of one storage that travel: [begin, end) addresses, disjoint, in order."""
    seen: list[tuple[int, int]] = []
    for begin, end in sorted((sight.address, sight.address + sight.nbytes) for sight in group):
        # Views of other dtypes need their offset to be a multiple of their size.
        begin = max(group[0].storage_address, begin - (begin - group[0].storage_address) % 16)
        if seen and begin <= seen[-1][1]:
            seen[-1] = (seen[-1][0], max(seen[-1][1], end))
        else:
            seen.append((begin, end))
    hull = (seen[0][0], seen[-1][1])
    visible = sum(end - begin for begin, end in seen)
    return [hull] if hull[1] - hull[0] <= HULL_FACTOR * visible else seen


# -- placing ----------------------------------------------------------------------------------------------------


def place(encoded: Encoded, address: int, capacity: int, used: int = 0) -> list[int] | None:
    """Bring every region into the range of ``capacity`` bytes at ``address``; None if they do not fit.

    Regions that lie there already, aligned, stay where they are; the others are copied behind the first ``used``
    bytes, one after the other. Returns the regions' offsets in the range.
    """
    offsets = []
    for region in encoded.regions:
        offset = region.address - address
        if 0 <= offset < used and offset % ALIGN_BYTES == 0:
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
    inside = (0 <= region.address - address < used for region in encoded.regions)
    return used + sum(
        aligned(region.nbytes) for region, is_in in zip(encoded.regions, inside, strict=True) if not is_in
    )


# -- self-contained bytes: indices, errors ----------------------------------------------------------------------

_INTS, _ANY = b"i", b"p"


def pack(obj: Any) -> bytes:
    """``obj`` as one run of bytes. A list of ints is eight bytes an element; types come back exactly."""
    if type(obj) is list and set(map(type, obj)) == {int}:
        try:
            return _INTS + array("q", obj).tobytes()
        except OverflowError:
            pass
    return _ANY + b"".join(pieces(encode(obj)))


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
        ints = array("q")
        ints.frombytes(data[1:])
        return ints.tolist()
    return join(bytearray(memoryview(data)[1:]))


def join(buffer: Any) -> Any:
    """Rebuild what :func:`pieces` took apart, on ``buffer`` itself (writable, any length beyond the run's)."""
    layout = Layout.from_bytes(memoryview(buffer))
    head = _COUNTS.size + len(layout.spans) * _SPAN_ENTRY.size + len(layout.skeleton)
    return decode(layout, buffer, aligned(head))


# -- layouts as numbers -----------------------------------------------------------------------------------------


class Interner:
    """The worker's side of the layout numbers: which layouts the main process knows from this worker.

    A layout gets a number when it comes a second time: batches whose skeleton holds values (file names, texts) never
    repeat, and must not push out the ones that do. At most :data:`MOST_LAYOUTS` are known at a time, as long as the
    worker lives; a number that is given to another layout is announced with it.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._seen: set[int] = set()
        self._next = 0

    def number(self, layout: bytes) -> tuple[int | None, bool]:
        """The layout's number, or None while it has none; and whether the number is new."""
        number = self._numbers.get(layout)
        if number is not None:
            return number, False
        mark = hash(layout)
        if mark not in self._seen:
            if len(self._seen) >= 4 * MOST_LAYOUTS:
                self._seen.clear()
            self._seen.add(mark)
            return None, False
        number, self._next = self._next, (self._next + 1) % MOST_LAYOUTS
        for known, its in self._numbers.items():
            if its == number:
                del self._numbers[known]
                break
        self._numbers[layout] = number
        return number, True


# -- saying where ------------------------------------------------------------------------------------------------


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
    if isinstance(obj, torch.Tensor):
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
