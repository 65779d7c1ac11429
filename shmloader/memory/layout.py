"""Layouts: a batch's skeleton and where its bytes lie; and layouts as numbers.

Batches of the same shapes have the same layout, byte for byte, so a layout crosses to the main process once and is a
number afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

#: An interner knows at most this many layouts at a time; the numbers are used again, which is announced.
MOST_LAYOUTS = 64

#: Kinds of spans: alone on its region; one of several that see the region; a plain buffer.
WHOLE, SHARED, RAW = range(3)

_COUNTS = struct.Struct("<II?")
_SPAN_ENTRY = struct.Struct("<BQQQ")


class Span(NamedTuple):
    """One place in a skeleton that refers to bytes: how, and where they lie within the batch's memory."""

    kind: int  # WHOLE, SHARED or RAW
    offset: int  # of the region
    nbytes: int  # of the region
    inner: int  # of what is seen, within the region


class Layout:
    """A skeleton and its spans: all that is needed to rebuild a batch on its bytes."""

    __slots__ = ("build", "extent", "nbytes", "plain", "simple", "skeleton", "spans")

    def __init__(self, skeleton: bytes, spans: tuple[Span, ...], plain: bool = False) -> None:
        self.skeleton = skeleton
        self.spans = spans
        #: Whether the skeleton is the outline of a plain nest; else it is a pickle.
        self.plain = plain
        self.extent = max((span.offset + span.nbytes for span in spans), default=0)
        self.nbytes = sum({span.offset: span.nbytes for span in spans}.values())
        #: Builds the batches of a plain nest; made with the first of them.
        self.build: Callable[[Any, int, list[Any]], Any] | None = None
        self.simple = all(span.kind == WHOLE for span in spans)

    def to_bytes(self) -> bytes:
        """The layout's own bytes; equal for equal layouts."""
        spans = b"".join([_SPAN_ENTRY.pack(*span) for span in self.spans])
        return _COUNTS.pack(len(self.spans), len(self.skeleton), self.plain) + spans + self.skeleton

    @property
    def head_bytes(self) -> int:
        """Length of :meth:`to_bytes`."""
        return _COUNTS.size + len(self.spans) * _SPAN_ENTRY.size + len(self.skeleton)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Layout:
        """The inverse of :meth:`to_bytes`; bytes behind the layout are ignored."""
        count, length, plain = _COUNTS.unpack_from(data)
        start = _COUNTS.size + count * _SPAN_ENTRY.size
        spans = tuple(Span(*entry) for entry in _SPAN_ENTRY.iter_unpack(data[_COUNTS.size : start]))
        return cls(bytes(data[start : start + length]), spans, plain)


class Interner:
    """The worker's side of the layout numbers: which layouts the main process knows from this worker.

    A layout gets a number when it comes a second time: batches whose skeleton holds values (file names, texts) never
    repeat, and must not push out the ones that do. At most :data:`MOST_LAYOUTS` are known at a time, as long as the
    worker lives; a number that is given to another layout is announced with it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._seen: set[int] = set()
        self._next = 0

    def number(self, layout: Hashable) -> tuple[int | None, bool]:
        """The number of a layout, or None while it has none; and whether the number is new.

        ``layout`` is anything that is equal for equal layouts.
        """
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
