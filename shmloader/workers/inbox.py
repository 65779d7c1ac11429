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
        idle_s, held_up_s = self._idle_s, self._held_up_s
        return time.perf_counter() - self._begun - idle_s - held_up_s, idle_s, held_up_s

    def take(self) -> Message:
        """The next message; waits for it."""
        aside = self._aside
        # Everything that is there, not the first at once: a Stop goes before all that is still to be done.
        self._read()
        while not aside:
            self._idle_s += self._wait()
            self._read()
        return aside.popleft()

    def take_grant(self) -> Message:
        """The answer to NEED_SPACE; whatever else arrives meanwhile is set aside in order."""
        while True:
            for message in self._aside:
                if message.tag == Tag.GRANT:
                    self._aside.remove(message)
                    return message
            self._held_up_s += self._wait()
            self._read()

    def _read(self) -> None:
        """Set aside what has come, and send what waits for room."""
        channel, aside = self.channel, self._aside
        try:
            if channel.backlog:
                channel.flush()
            receive = channel.receive
            while (message := receive()) is not None:
                if message[0] == Tag.STOP:
                    raise Stopped
                aside.append(message)
        except EOFError:
            raise Orphaned from None

    def _wait(self) -> float:
        """Wait until something has come, or may be sent; returns how many seconds that took."""
        channel, started = self.channel, time.perf_counter()
        if channel.backlog or self._clogged:
            self._clogged = channel.backlog
            self._poller.register(channel.fileno(), select.POLLIN | (select.POLLOUT if self._clogged else 0))
        for fd, _ in self._poller.poll():
            if fd == self._watch:
                raise Orphaned
        return time.perf_counter() - started
