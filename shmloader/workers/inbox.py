"""A worker's side of its channel: what the main process sends, and that it is still there."""

from __future__ import annotations

import select
import time
from collections import deque

from shmloader.workers.channel import Channel
from shmloader.workers.protocol import Message, Tag


class Stopped(Exception):
    """The main process told the worker to end."""


class Orphaned(Exception):
    """The main process is gone."""


class Inbox:
    """What the main process sends, in order; waiting for it also notices that process's end.

    Args:
        channel: this side's end.
        watch: descriptor that becomes readable when the main process ends, or -1.
    """

    def __init__(self, channel: Channel, watch: int = -1) -> None:
        self.channel = channel
        self._watch = watch
        self._aside: deque[Message] = deque()
        self._clogged = False
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        if watch >= 0:
            self._poller.register(watch, select.POLLIN)
        self._begun = time.perf_counter()
        self._idle_s = self._held_up_s = 0.0

    @property
    def spent(self) -> tuple[float, float, float]:
        """Seconds since the beginning: at work, waiting in :meth:`take`, waiting in :meth:`take_grant`."""
        waited = self._idle_s + self._held_up_s
        return time.perf_counter() - self._begun - waited, self._idle_s, self._held_up_s

    def take(self) -> Message:
        """The next message; waits for it."""
        while True:
            if not self._aside:
                self._idle_s += self._wait()
            # Not the first at once: a Stop goes before everything that is still to be done.
            while self._listen(0):
                pass
            if self._aside:
                return self._aside.popleft()

    def take_grant(self) -> Message:
        """The answer to NEED_SPACE; whatever else arrives meanwhile is set aside in order."""
        while True:
            for message in self._aside:
                if message.tag == Tag.GRANT:
                    self._aside.remove(message)
                    return message
            self._held_up_s += self._wait()

    def _wait(self) -> float:
        """Wait until something has come and read it; returns how many seconds that took."""
        started = time.perf_counter()
        self._listen(None)
        return time.perf_counter() - started

    def _listen(self, timeout_ms: int | None) -> bool:
        """Read a message, if one has come; returns whether there was anything to do."""
        channel = self.channel
        if channel.backlog or self._clogged:
            self._clogged = channel.backlog
            self._poller.register(channel.fileno(), select.POLLIN | (select.POLLOUT if self._clogged else 0))
        ready = self._poller.poll(timeout_ms)
        if not ready:
            return False
        if any(fd == self._watch for fd, _ in ready):
            raise Orphaned
        try:
            channel.flush()
            message = channel.receive()
        except EOFError:
            raise Orphaned from None
        if message is not None:
            if message.tag == Tag.STOP:
                raise Stopped
            self._aside.append(message)
        return True
