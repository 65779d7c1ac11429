"""Until when a device may read slots that were handed out page-locked, and that came back.

The user's own ``x.to(device, non_blocking=True)`` is only enqueued when the last reference to ``x`` goes, on whichever
stream of whichever device. So a slot that came back waits for a *fence* behind everything that has been enqueued.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from shmloader.device import captures
from shmloader.device.accelerator import Event
from shmloader.memory.slots import Slot


class Driver(Protocol):
    """What makes fences."""

    def record(self) -> list[Event]:
        """Events which together are behind everything that any device was given so far. It doesn't wait.

        Raises:
            RuntimeError: there can be no such events now.
        """
        ...


@dataclass(slots=True)
class _Group:
    """Slots that came back before one fence."""

    slots: list[Slot]
    fence: list[Event]


class Quarantine:
    """Slots that came back, until no device can read them any more. In a forked child, and while the interpreter
    ends, it lets none go.

    No error leaves it: a device that is out of order is heard of by its user, and what it may still read stays here.

    Args:
        driver: what makes fences.
        held_off: inside, no graph capture begins; says whether none is under way. A capture breaks when a device is
            asked anything, so then it is not.
    """

    def __init__(
        self, driver: Driver, held_off: Callable[[], AbstractContextManager[bool]] = captures.held_off
    ) -> None:
        self._driver, self._held_off = driver, held_off
        self._groups: deque[_Group] = deque()
        #: Slots behind which there is no fence yet.
        self._unfenced: list[Slot] = []
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._unfenced) + sum(len(group.slots) for group in self._groups)

    def enter(self, slots: list[Slot]) -> None:
        """These slots came back."""
        self._unfenced += slots
        with self._asking() as may_ask:
            if may_ask:
                self._fence()

    def leave(self) -> list[Slot]:
        """The slots that no device reads any more. It never waits."""
        if not (self._groups or self._unfenced):
            return []
        with self._asking() as may_ask:
            return self._passed() if may_ask else []

    def wait(self) -> list[Slot]:
        """Wait for the oldest fence; the slots that no device reads any more, none if there is nothing to wait for."""
        if not (self._groups or self._unfenced):
            return []
        with self._asking() as may_ask:
            if not may_ask:
                return []
            self._fence()
            try:
                for event in self._groups[0].fence if self._groups else ():
                    event.synchronize()
            except RuntimeError:
                return []
            return self._passed()

    @contextmanager
    def _asking(self) -> Iterator[bool]:
        with self._held_off() as quiet:
            yield quiet and self._pid == os.getpid() and not sys.is_finalizing()

    def _fence(self) -> None:
        """Put a fence behind what has none; where that fails it is tried again later, and is a later one then."""
        if not self._unfenced:
            return
        try:
            fence = self._driver.record()
        except RuntimeError:
            return
        slots, self._unfenced = self._unfenced, []
        self._groups.append(_Group(slots, fence))

    def _passed(self) -> list[Slot]:
        self._fence()
        passed: list[Slot] = []
        try:
            while self._groups and all(event.query() for event in self._groups[0].fence):
                passed += self._groups.popleft().slots
        except RuntimeError:
            pass
        return passed
