"""The columns of plain samples: what ``default_collate`` would stack, looked at first and then written in place.

It goes the same way through the nest as torch's code, but decides by exact types, and makes no tensors of the batch at
all: the samples tell what the batch's outline is, so each column's bytes go right to where they are to lie.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from shmloader.memory.codec import MOST_SKELETONS, MOST_VALUE_BYTES, Encoded, Region, aligned, skeleton_of
from shmloader.memory.dtypes import CODES, NUMPY, NUMPY_CODES, SIZES, tensor_on
from shmloader.memory.layout import WHOLE, Layout, Span
from shmloader.memory.outline import MOST_LEVELS, VALUE, NotPlainError, Outline, is_namedtuple

_NUMBERS = {int: CODES[torch.int64], float: CODES[torch.float64]}


#: So many blocks' targets are remembered in one room; ragged batches have ever new ones.
MOST_BLOCKS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """How the tensors of one outline lie one behind the other, each with its dtype's code and its shape."""

    layout: Layout
    nbytes: int
    kinds: tuple[tuple[int, tuple[int, ...]], ...]


class Target(NamedTuple):
    """Where a column goes: a tensor, and the array on the same bytes where numpy has its dtype."""

    tensor: torch.Tensor
    array: Any


class Room:
    """Where a batch is to lie: ``offset`` bytes into ``buffer``, which is at ``address``."""

    __slots__ = ("_targets", "address", "buffer", "offset")

    def __init__(self, buffer: Any, offset: int, address: int) -> None:
        self.buffer, self.offset, self.address = buffer, offset, address
        self._targets: dict[Block, list[Target]] = {}

    def targets(self, block: Block) -> list[Target]:
        """What to write a batch of this block to; made once, since batches come to the same rooms again."""
        known = self._targets.get(block)
        if known is None:
            if len(self._targets) >= MOST_BLOCKS:
                self._targets.clear()
            places = zip(block.layout.spans, block.kinds)
            known = self._targets[block] = [self._target(span.offset, *kind) for span, kind in places]
        return known

    def _target(self, start: int, code: int, shape: tuple[int, ...]) -> Target:
        tensor = tensor_on(self.buffer, self.offset + start, code, shape)
        return Target(tensor, tensor.numpy() if NUMPY[code] is not None else None)


class Stacked(Encoded):
    """A batch whose tensors lie in one region already, as its block says."""

    __slots__ = ("_block",)

    def __init__(self, block: Block, room: Room, values: bytes) -> None:
        region = Region(1, WHOLE, room.address + room.offset, block.nbytes, room.buffer)
        super().__init__(block.layout.skeleton, [region], (), plain=True, values=values)
        self._block = block

    def key(self, offsets: list[int]) -> Hashable:
        """Equal for equal layouts: where the spans lie in their region follows from the skeleton."""
        return self.skeleton, offsets[0]

    def layout(self, offsets: list[int]) -> Layout:
        """The layout once the region lies at the first of ``offsets``."""
        layout = self._block.layout
        if not offsets[0]:
            return layout
        spans = [span._replace(offset=span.offset + offsets[0]) for span in layout.spans]
        return Layout(self.skeleton, tuple(spans), plain=True)


class Columns:
    """Samples, column by column: what their batch's outline will be, and what goes where in it.

    Raises:
        NotPlainError: the batch will have no outline, or is better pickled.
        Exception: what torch's own code raises for a column that is not plain.
    """

    def __init__(self, samples: Sequence[Any]) -> None:
        #: For each tensor of the batch: what writes it, what of, its dtype's code and its shape.
        self.leaves: list[tuple[Callable[[Any, Target], None], Any, int, tuple[int, ...]]] = []
        self._values: list[Any] = []
        self.key = self._walk(samples, MOST_LEVELS)
        self.values = pickle.dumps(self._values, 5) if self._values else b""
        if not self.leaves or len(self.values) > MOST_VALUE_BYTES:
            raise NotPlainError

    def stack(self, find_room: Callable[[int], Room]) -> Stacked:
        """Write every column to its place.

        Raises:
            RuntimeError, TypeError, OverflowError: a column's samples do not go together.
        """
        block = _blocks.get(self.key) or self._lay_out()
        room = find_room(block.nbytes)
        for (write, column, _, _), target in zip(self.leaves, room.targets(block)):
            write(column, target)
        return Stacked(block, room, self.values)

    def exact(self) -> bool:
        """Whether the samples go together without more ado: without workers, dtypes are promoted, gradients tracked."""
        columns = [column for write, column, _, _ in self.leaves if write is _write_tensors]
        return all(
            len({(sample.dtype, sample.shape) for sample in column}) == 1
            and True not in [sample.requires_grad for sample in column]
            for column in columns
        )

    def _lay_out(self) -> Block:
        spans, end = [], 0
        for _, _, code, shape in self.leaves:
            start = aligned(end)
            end = start + math.prod(shape) * SIZES[code]
            spans.append(Span(WHOLE, start, end - start, 0))
        if len(_blocks) >= MOST_SKELETONS:
            _blocks.clear()
        kinds = tuple([(code, shape) for _, _, code, shape in self.leaves])
        block = _blocks[self.key] = Block(Layout(skeleton_of(self.key), tuple(spans), plain=True), end, kinds)
        return block

    # -- looking ------------------------------------------------------------------------------------------------

    def _walk(self, column: Sequence[Any], levels: int) -> Any:
        first = column[0]
        kind = type(first)
        if kind is torch.Tensor:
            return self._note_tensors(column, first)
        if kind in _NUMBERS:
            return self._note_numbers(column, kind)
        if kind is np.ndarray:
            return self._note_arrays(column, first)
        if levels == 0:
            raise NotPlainError
        if kind is dict:
            if not all(type(name) is str for name in first):
                raise NotPlainError
            parts = [self._walk([sample[name] for sample in column], levels - 1) for name in first]
            return kind, tuple(first), *parts
        if kind is str or kind is bytes:
            return self._note_texts(column)
        return self._walk_sequences(column, kind, levels)

    def _walk_sequences(self, column: Sequence[Any], kind: type, levels: int) -> Any:
        named = kind is not tuple and kind is not list and is_namedtuple(kind)
        if not (kind is tuple or kind is list or named):
            return self._note_others(column)
        if not column[0] or len(set(map(len, column))) != 1:
            return self._note_others(column)  # raises torch's text
        # Of tuples, too, torch makes a list.
        return (kind if named else list), None, *[self._walk(part, levels - 1) for part in zip(*column)]

    def _note_tensors(self, column: Sequence[Any], first: torch.Tensor) -> Any:
        plain = first.layout is torch.strided and first.is_cpu and not first.is_nested and not first.is_quantized
        if not plain or first.is_neg() or first.is_conj() or set(map(type, column)) != {torch.Tensor}:
            raise NotPlainError
        # Into a tensor of the first sample's dtype, as torch does in a worker: that decides what mixed dtypes become.
        return self._note(_write_tensors, column, CODES[first.dtype], (len(column), *first.shape))

    def _note_numbers(self, column: Sequence[Any], kind: type) -> Any:
        # One look at the first is not enough: a column (1, 2.5) is of floats, (1, True) of what torch makes of it.
        if set(map(type, column)) != {kind}:
            return self._note_others(column)
        return self._note(_write_numbers, column, _NUMBERS[kind], (len(column),))

    def _note_arrays(self, column: Sequence[Any], first: np.ndarray[Any, Any]) -> Any:
        code, shape, dtype = NUMPY_CODES.get(first.dtype), first.shape, first.dtype
        if code is None:
            raise NotPlainError
        for array in column:
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                raise NotPlainError
            if not array.flags.c_contiguous and any(step < 0 or step % dtype.itemsize for step in array.strides):
                raise NotPlainError  # torch refuses these
        return self._note(_write_arrays, column, code, (len(column), *shape))

    def _note_texts(self, column: Sequence[Any]) -> Any:
        if not Outline.is_value(column):
            raise NotPlainError  # long bytes, which pickle takes out of band, or whatever else is among them
        self._values.append(column)
        return VALUE

    def _note_others(self, column: Sequence[Any]) -> Any:
        """A column for torch's own code: what comes out is looked at in the column's stead.

        Not where it may be large: torch's code has the whole batch then, and stacks it where it is to lie.
        """
        if any(isinstance(value, (torch.Tensor, np.ndarray)) for value in column):
            raise NotPlainError
        outline = Outline()
        key = outline.walk(collate(column, collate_fn_map=default_collate_fn_map), MOST_LEVELS)
        self._values += outline.values
        for tensor in outline.tensors:
            self._note(_write_tensor, tensor, CODES[tensor.dtype], tuple(tensor.shape))
        return key

    def _note(self, write: Callable[[Any, Target], None], column: Any, code: int, shape: tuple[int, ...]) -> Any:
        if 0 in shape:
            raise NotPlainError
        self.leaves.append((write, column, code, shape))
        return code, shape


_blocks: dict[Hashable, Block] = {}


# -- writing ----------------------------------------------------------------------------------------------------


def _write_tensors(column: Any, target: Target) -> None:
    torch.stack(column, 0, out=target.tensor)


def _write_numbers(column: Any, target: Target) -> None:
    target.array[:] = column  # a tenth of torch.tensor(column)


def _write_arrays(column: Any, target: Target) -> None:
    out = target.array
    for number, array in enumerate(column):
        out[number] = array


def _write_tensor(tensor: torch.Tensor, target: Target) -> None:
    target.tensor.copy_(tensor)
