"""What an iterator counts while it runs: live objects, which no user sees."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

#: Waiting times are counted in classes, this many per factor of two: a percentile is off by a tenth at most.
CLASSES_PER_OCTAVE = 4
PERCENTILES = (50, 90, 99)
#: An idle time of more seconds than this may have begun before the epoch.
LONG_IDLE_S = 0.05


class Waits:
    """How long single batches were waited for: a histogram over the logarithm of the time."""

    __slots__ = ("classes", "longest_s")

    def __init__(self) -> None:
        self.classes: dict[int, int] = {}
        self.longest_s = 0.0

    def note(self, seconds: float) -> None:
        """One batch was waited for."""
        ns = int(seconds * 1e9) | CLASSES_PER_OCTAVE
        octave = ns.bit_length() - 3
        place = octave * CLASSES_PER_OCTAVE + (ns >> octave) - CLASSES_PER_OCTAVE
        self.classes[place] = self.classes.get(place, 0) + 1
        if seconds > self.longest_s:
            self.longest_s = seconds

    def add(self, other: Waits) -> None:
        """Take in what another one has counted."""
        for place, number in tuple(other.classes.items()):
            self.classes[place] = self.classes.get(place, 0) + number
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentiles(self, batches: int) -> dict[str, float]:
        """Seconds by name (``"p50"``...), over ``batches`` of which most may not have been waited for at all."""
        classes = sorted(self.classes.copy().items())
        at_once = batches - sum(number for _, number in classes)
        found = {f"p{share}": self._at(batches * share / 100 - at_once, classes) for share in PERCENTILES}
        return {**found, "max": self.longest_s}

    def _at(self, rank: float, classes: list[tuple[int, int]]) -> float:
        for place, number in classes:
            if rank <= 0:
                break
            rank -= number
            if rank <= 0:
                octave, quarter = divmod(place, CLASSES_PER_OCTAVE)
                middle_ns = (quarter + CLASSES_PER_OCTAVE + 0.5) * 2.0**octave
                return min(middle_ns / 1e9, self.longest_s)
        return 0.0


class Alive:
    """How many bytes of private memory are still in use by somebody."""

    __slots__ = ("_buffers",)

    #: Dead entries are dropped whenever so many have gathered.
    _MOST_DEAD = 64

    def __init__(self) -> None:
        self._buffers: list[tuple[weakref.ref[Any], int]] = []

    def note(self, buffer: Any, nbytes: int) -> None:
        """From now on, ``buffer`` counts until nobody refers to it."""
        if len(self._buffers) % self._MOST_DEAD == self._MOST_DEAD - 1:
            self._buffers = [*self._living()]
        # Arrays that are built on a view refer to what the view is of.
        owner = getattr(buffer, "base", None)
        self._buffers.append((weakref.ref(buffer if owner is None else owner), nbytes))

    def _living(self) -> Iterator[tuple[weakref.ref[Any], int]]:
        return ((ref, nbytes) for ref, nbytes in tuple(self._buffers) if ref() is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        return sum(nbytes for _, nbytes in self._living())


@dataclass(slots=True)
class Counts:
    """What an iterator counts during one epoch."""

    batches: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    hand_over_s: float = 0.0
    start_s: float = 0.0
    worked_s: float = 0.0
    idle_s: float = 0.0
    held_up_s: float = 0.0
    oversize_batches: int = 0
    late_copies: int = 0
    copy_wait_s: float = 0.0
    restarts: int = 0
    copies: dict[str, int] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
    #: Seconds since the last batch that were no part of the step: for late targets, and for the next batch by itself.
    waited_amid_s: float = 0.0
    awaited_s: float = 0.0
    begun: float = field(default_factory=lambda: time.perf_counter())
    _entered: float = 0.0
    _left: float = 0.0
    _waited_before: float = 0.0

    def enter(self) -> None:
        """``next()`` was called."""
        self._entered = now = time.perf_counter()
        if self.batches:
            self.step_s += now - self._left - self.waited_amid_s - self.awaited_s
        self.waited_amid_s = 0.0
        self._waited_before = self.wait_s

    def leave(self) -> None:
        """``next()`` returns a batch."""
        self._left = now = time.perf_counter()
        waited, awaited_s = self.wait_s - self._waited_before, self.awaited_s
        self.awaited_s = 0.0
        if not self.start_s:
            # What the first batch took tells of starting, not of the job: it is kept out of everything else.
            self.start_s = now - self.begun
            self.wait_s = 0.0
            return
        self.hand_over_s += now - self._entered - waited
        if waited or awaited_s:
            self.waits.note(waited + awaited_s)

    def waited_amid(self, seconds: float) -> None:
        """So much of what was waited was waited within the step, for late targets."""
        self.waited_amid_s += seconds

    def awaited(self, seconds: float) -> None:
        """So long was waited for the next batch before ``next()`` was called."""
        self.wait_s += seconds
        self.awaited_s += seconds

    def copied(self, reason: str) -> None:
        """A private copy was made."""
        self.copies[reason] = self.copies.get(reason, 0) + 1

    def note_spent(self, before: tuple[float, ...], now: tuple[float, ...]) -> None:
        """A worker said what it has spent its time with so far: at work, without work, without space."""
        idle_s = now[1] - before[1]
        if idle_s > LONG_IDLE_S:
            # Between two epochs nobody had work for it.
            idle_s = min(idle_s, time.perf_counter() - self.begun)
        self.worked_s += now[0] - before[0]
        self.idle_s += idle_s
        self.held_up_s += now[2] - before[2]

    def add(self, other: Counts) -> None:
        """Take in another epoch's counts."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, number in tuple(other.copies.items()):
            self.copies[reason] = self.copies.get(reason, 0) + number
        self.waits.add(other.waits)


#: The fields of :class:`Counts` that add up.
_KEPT_APART = ("copies", "waits", "begun", "waited_amid_s", "awaited_s")
SUMS = [entry.name for entry in fields(Counts) if entry.name not in _KEPT_APART and entry.name[0] != "_"]
