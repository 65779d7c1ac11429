"""A worker's side of its channel: what the main process sends, and that it is still there."""

from __future__ import annotations

import select
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
        self._poller = select.poll()
        if watch >= 0:
            self._poller.register(watch, select.POLLIN)

    def take(self) -> Message:
        """The next message; waits for it."""
        while True:
            self._read()
            if self._aside:
                return self._aside.popleft()
            self._wait()

    def take_grant(self) -> Message:
        """The answer to NEED_SPACE; whatever else arrives meanwhile is set aside in order."""
        while True:
            self._read()
            for message in self._aside:
                if message.tag == Tag.GRANT:
                    self._aside.remove(message)
                    return message
            self._wait()

    def _read(self) -> None:
        try:
            self.channel.flush()
            while (message := self.channel.receive()) is not None:
                if message.tag == Tag.STOP:
                    raise Stopped
                self._aside.append(message)
        except EOFError:
            raise Orphaned from None

    def _wait(self) -> None:
        self._poller.register(self.channel.fileno(), select.POLLIN | (select.POLLOUT if self.channel.backlog else 0))
        if any(fd == self._watch for fd, _ in self._poller.poll()):
            raise Orphaned
