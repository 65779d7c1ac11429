"""Waiting for workers in an event loop, which waits on descriptors and is never blocked."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Iterable


class Bell:
    """Those who await something from one iterator.

    Whoever is woken reads what the workers have said, which may be what another one waits for and is then no longer
    to be seen on any descriptor: so it rings, and all look again.
    """

    def __init__(self) -> None:
        #: One future for each that waits now.
        self.waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """Let everybody look again. Callable from any thread."""
        for future in tuple(self.waiters):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)

    async def wait(self, descriptors: Iterable[tuple[int, int]], timeout_s: float | None) -> bool:
        """Wait until one of the descriptors has one of its events, or somebody rings.

        Args:
            descriptors: each with a mask of ``select.POLLIN`` and ``select.POLLOUT``.
            timeout_s: None waits for good.

        Returns:
            False if the time has passed before that.
        """
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        # An event loop has one reader for a descriptor; a poller of its own for each wait leaves others' alone.
        with select.epoll() as poller:
            for descriptor, events in descriptors:
                poller.register(descriptor, events)
            loop.add_reader(poller.fileno(), _wake, future)
            self.waiters.add(future)
            try:
                done, _ = await asyncio.wait([future], timeout=timeout_s)
                return bool(done)
            finally:
                self.waiters.discard(future)
                loop.remove_reader(poller.fileno())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
