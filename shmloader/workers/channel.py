"""One duplex channel between the main process and one worker: messages in packets, in order, never blocking.

A packet is what one system call sends and one receives (``SOCK_SEQPACKET``). Neither side ever waits in a send: what
does not fit into the socket stays in the outbox, and whoever waits for the channel waits for room in it, too.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import weakref
from collections import deque

from shmloader.workers.protocol import HEAD, INLINE_BYTES, NO_TIME, Flag, Message, Tag

_LENGTH = struct.Struct("<Q")
_FRAGMENT = bytes([Tag.FRAGMENT])
_PACKET_BYTES = HEAD.size + INLINE_BYTES

#: Every open channel of this process. A forked worker closes the ends that it inherited: as long as it held one, the
#: other side would not see the end of its peer.
_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def pair() -> tuple[Channel, socket.socket]:
    """A channel for this process and the socket for the other side's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(here), there


def close_inherited(mine: socket.socket) -> None:
    """In a forked worker: close every channel end that belongs to the parent, and forget its outbox."""
    for channel in tuple(_open):
        if channel.fileno() != mine.fileno():
            channel.close()


class Channel:
    """This side's end. Not thread-safe: one thread reads and writes.

    Raises, from :meth:`send` and :meth:`receive`:
        EOFError: the other side has closed its end or has died.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_outbox",
        "_partial",
        "_receive_into",
        "_send",
        "_socket",
        "_view",
        "expects_fd",
    )

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._send = end.send
        self._receive_into = end.recv_into
        self._buffer = bytearray(_PACKET_BYTES)
        self._view = memoryview(self._buffer)
        self._outbox: deque[tuple[bytes, int]] = deque()
        self._partial: tuple[Message, bytearray, int] | None = None
        #: Set while a packet with a descriptor may come: an ordinary receive would drop the descriptor.
        self.expects_fd = False
        _open.add(self)

    def fileno(self) -> int:
        """The descriptor to wait for, or -1 once closed."""
        return self._socket.fileno()

    @property
    def backlog(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._outbox)

    def send(
        self,
        tag: int,
        flags: int,
        layout: int,
        epoch: int,
        batch: int,
        offset: int,
        size: int,
        body: bytes = b"",
        fd: int = -1,
        spent: tuple[float, float, float] = NO_TIME,
    ) -> None:
        """Send a message, or queue what does not fit. Takes over ``fd``."""
        if len(body) <= INLINE_BYTES:
            self._put(HEAD.pack(tag, flags, layout, epoch, batch, offset, size, *spent) + body, fd)
            return
        head = HEAD.pack(tag, flags | Flag.LONG, layout, epoch, batch, offset, size, *spent)
        self._put(head + _LENGTH.pack(len(body)), fd)
        for start in range(0, len(body), INLINE_BYTES):
            self._put(_FRAGMENT + body[start : start + INLINE_BYTES], -1)

    def _put(self, packet: bytes, fd: int) -> None:
        if self._outbox or not self._push(packet, fd):
            self._outbox.append((packet, fd))

    def flush(self) -> None:
        """Send as much of the outbox as fits now."""
        while self._outbox and self._push(*self._outbox[0]):
            self._outbox.popleft()

    def _push(self, packet: bytes, fd: int) -> bool:
        try:
            if fd < 0:
                self._send(packet)
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                self._socket.sendmsg([packet], rights)
                os.close(fd)
        except BlockingIOError:
            return False
        except OSError as error:
            # This end was closed when the other side's end was read; news of its process's end may be yet to come.
            closed = self._socket.fileno() < 0
            if closed or isinstance(error, (BrokenPipeError, ConnectionResetError)):
                raise EOFError("the other side is gone") from error
            raise
        return True

    def receive(self) -> Message | None:
        """The next message, or None if none has arrived whole."""
        while True:
            fd = -1
            try:
                if self.expects_fd:
                    length, fd = self._receive_with_fd()
                else:
                    length = self._receive_into(self._buffer)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # Comes once, when the peer died with messages unread; its own last answers are queued behind it.
                continue
            if length == 0:
                raise EOFError("the other side is gone")
            if self._partial is None:
                # Not by its constructor, which takes three times as long.
                body = bytes(self._view[HEAD.size : length]) if length > HEAD.size else b""
                message: Message = tuple.__new__(Message, (*HEAD.unpack_from(self._buffer), body, fd))
                if not message[1] & Flag.LONG:
                    return message
                self._partial = (message, bytearray(), _LENGTH.unpack(body)[0])
            elif (whole := self._continue(length)) is not None:
                return whole

    def _receive_with_fd(self) -> tuple[int, int]:
        length, ancillary, _, _ = self._socket.recvmsg_into(
            [self._buffer], socket.CMSG_SPACE(array.array("i").itemsize)
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                return length, array.array("i", data[:4])[0]
        return length, -1

    def _continue(self, length: int) -> Message | None:
        assert self._partial is not None
        message, body, total = self._partial
        body += self._view[1:length]
        if len(body) < total:
            return None
        self._partial = None
        return message._replace(flags=message.flags & ~Flag.LONG, body=bytes(body))

    def close(self) -> None:
        """Close this end and whatever waited to be sent. Safe to call twice."""
        for _, fd in self._outbox:
            if fd >= 0:
                os.close(fd)
        self._outbox.clear()
        self._socket.close()
