"""Batches of an iterator that knows nothing of devices, each copied when it is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shmloader.device.accelerator import Accelerator
from shmloader.device.transfer import Transfer

T = TypeVar("T")


class Carrier:
    """Copies batches out of ordinary memory, one at a time, by way of page-locked staging memory."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._notices: list[Warning] = []
        self._transfer = Transfer(accelerator, lambda _address, _nbytes: False, self._notices)

    def carry(self, batch: Any) -> Any:
        """The batch on the device.

        Raises:
            RuntimeError: a graph is being captured, or what the device raises.
        """
        flight = self._transfer.send(batch)
        try:
            return self._transfer.arrive(flight)
        finally:
            self._transfer.drop(flight)

    def for_thread(self, step: Callable[..., T]) -> Callable[..., T]:
        """``step``, to be called in another thread: there, too, batches arrive in the stream that is current here."""
        accelerator = self._transfer.accelerator
        stream = accelerator.current_stream()

        def there(*args: Any) -> T:
            with accelerator.on(stream):
                return step(*args)

        return there

    def warn(self) -> None:
        """Give the warnings that have come up, as if from the caller's caller: before a batch is made, none is lost."""
        while self._notices:
            warnings.warn(self._notices.pop(0), stacklevel=3)

    def finish(self) -> None:
        """Wait until the device has read everything."""
        self._transfer.finish()

    def take_exposed_s(self) -> float:
        """See :meth:`~shmloader.device.transfer.Transfer.take_exposed_s`."""
        return self._transfer.take_exposed_s()

    @property
    def nbytes(self) -> int:
        """Bytes of staging memory."""
        return self._transfer.staging.nbytes


def for_thread(carrier: Carrier | None, step: Callable[..., T]) -> Callable[..., T]:
    """``step``, to be called in another thread, where streams are others: see :meth:`Carrier.for_thread`."""
    return step if carrier is None else carrier.for_thread(step)


class Carried:
    """An iterator of torch's own, whose batches are delivered on a device: all else is the iterator's."""

    def __init__(self, iterator: Any, accelerator: Accelerator) -> None:
        self._carrier, self._iterator = Carrier(accelerator), iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._carrier.warn()
        try:
            return self._carrier.carry(next(self._iterator))
        except StopIteration:
            self._carrier.finish()
            raise

    def __len__(self) -> int:
        return len(self._iterator)

    def __del__(self) -> None:
        if "_carrier" in vars(self):
            self._carrier.finish()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_iterator", "_carrier"):
            raise AttributeError(name)  # before __init__ has come so far, and for what copy and pickle ask
        return getattr(self._iterator, name)
