"""``async for batch in loader``: the ordinary iterator, asked only when it does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from shmloader.device.carried import for_thread
from shmloader.iterator import ShmIter

T = TypeVar("T")

#: Iterators that are being ended: an event loop holds its tasks weakly.
_ending: set[asyncio.Task[None]] = set()
_END = object()


class AsyncIter(AsyncIterator[T]):
    """An asynchronous iterator over one epoch of a loader.

    A cancelled wait loses nothing: the next one gets the batch.

    Args:
        iterator: the loader's ordinary iterator.
    """

    def __init__(self, iterator: Any) -> None:
        # What makes its batches itself has nothing that could be waited for: it works in a thread meanwhile.
        self._iterator: Any = iterator if isinstance(iterator, ShmIter) else _Threaded(iterator)

    def __aiter__(self) -> AsyncIter[T]:
        return self

    async def __anext__(self) -> T:
        await self._iterator.until_ready()
        # No await between the two: a batch that is taken is also returned.
        try:
            batch: T = next(self._iterator)
        except StopIteration:
            raise StopAsyncIteration from None
        return batch

    def ready(self) -> bool:
        """Whether the next batch is there."""
        return bool(self._iterator.ready())

    def __del__(self) -> None:
        iterator = getattr(self, "_iterator", None)
        if not isinstance(iterator, ShmIter) or not iterator.abandoned():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the iterator's own finalizer ends it
        task = loop.create_task(iterator.retire())
        _ending.add(task)
        task.add_done_callback(_ending.discard)


class _Threaded:
    """An iterator whose next item is made in a thread."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._making: asyncio.Task[Any] | None = None

    def ready(self) -> bool:
        return self._making is not None and self._making.done()

    async def until_ready(self) -> None:
        while not self.ready():
            if self._making is None:
                step = for_thread(getattr(self._iterator, "_carrier", None), next)
                self._making = asyncio.create_task(asyncio.to_thread(step, self._iterator, _END))
            # Not the task itself: should this wait be cancelled, the item is there for the next one.
            await asyncio.wait([self._making])

    def __next__(self) -> Any:
        making, self._making = self._making, None
        assert making is not None
        item = making.result()
        if item is _END:
            raise StopIteration
        return item
