"""Batches whose inputs are there before their targets: what the loop gets, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from shmloader.device.nest import rebuilt


class Source(Protocol):
    """Where targets come from."""

    def bring(self, pending: Pending) -> None:
        """Settle it, waiting if need be."""

    def has(self, pending: Pending) -> bool:
        """Whether :meth:`bring` would not wait."""

    async def until(self, pending: Pending) -> None:
        """Wait until :meth:`bring` would not wait, without blocking the event loop."""


class Promise(Protocol):
    """Targets that may not be there yet."""

    def get(self) -> Any: ...

    def ready(self) -> bool: ...

    async def wait(self) -> None: ...


class Pending:
    """The targets of one batch.

    Args:
        source: who brings them.
        batch: which batch of the source's epoch it is.
    """

    __slots__ = ("__weakref__", "_data", "_error", "_source", "batch")

    def __init__(self, source: Source, batch: int) -> None:
        self._source: Source | None = source
        self.batch = batch
        self._data: Any = None
        self._error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """Whether the targets, or their error, are here."""
        return self._source is None

    @property
    def known(self) -> bool:
        """Whether the targets are here."""
        return self._source is None and self._error is None

    def put(self, data: Any) -> None:
        """Here they are."""
        self._data = data
        self._source = None  # last: with it they are settled; and an iterator may now end that waited for this

    def fail(self, error: BaseException) -> None:
        """There are none, because of this error."""
        self._error = error
        self._source = None

    def get(self) -> Any:
        """The targets; waits for them.

        Raises:
            Exception: what loading them raised, once; after that a RuntimeError that names it.
        """
        if self._source is not None:
            self._source.bring(self)
        if self._error is not None:
            self._raise()
        return self._data

    def _raise(self) -> NoReturn:
        error = self._error
        assert error is not None
        # Not the same error again: its traceback refers to the frames that it came through, and they to the batch.
        self._error = RuntimeError(
            f"the targets of batch {self.batch} could not be loaded, which has been raised before: "
            f"{type(error).__name__}: {error}"
        )
        try:
            raise error
        finally:
            del error

    def ready(self) -> bool:
        """Whether :meth:`get` would not wait."""
        return self._source is None or self._source.has(self)

    async def wait(self) -> None:
        """Wait until :meth:`get` would not, without blocking the event loop."""
        if self._source is not None:
            await self._source.until(self)


class _Changed:
    """Targets to which something is done when they are first asked for."""

    def __init__(self, promise: Promise, change: Callable[[Any], Any]) -> None:
        self._promise, self._change = promise, change
        self._changed = False
        self._data: Any = None

    def get(self) -> Any:
        if not self._changed:
            self._data = self._change(self._promise.get())
            self._changed = True
        return self._data

    def ready(self) -> bool:
        return self._changed or self._promise.ready()

    async def wait(self) -> None:
        if not self._changed:
            await self._promise.wait()


class _There:
    """Targets that are there."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def get(self) -> Any:
        return self._data

    def ready(self) -> bool:
        return True

    async def wait(self) -> None:
        return


class LateBatch(tuple[Any, Any]):
    """A pair ``(inputs, targets)`` of which the inputs are there, and the targets may be still on their way.

    Whatever reads the targets waits for them if it must: :attr:`targets`, ``batch[1]``, ``inputs, targets = batch``,
    iteration, comparison, pickling. What loading them raised is raised there. Use a batch in the thread that iterates.

    Attributes:
        inputs: the collated inputs.
        targets: the collated targets.
    """

    _promise: Promise

    def __new__(cls, inputs: Any, promise: Promise) -> LateBatch:
        # C code that reads a tuple's entries as they lie finds the promise, which is no tensor: an error, not a wrong
        # value.
        batch = super().__new__(cls, (inputs, promise))
        batch._promise = promise
        return batch

    @property
    def inputs(self) -> Any:
        """The inputs; never waits."""
        return tuple.__getitem__(self, 0)

    @property
    def targets(self) -> Any:
        """The targets; waits for them if it must."""
        return self._promise.get()

    def targets_ready(self) -> bool:
        """Whether :attr:`targets` would not wait."""
        return self._promise.ready()

    async def wait_targets(self) -> Any:
        """The targets, without blocking the event loop while they are on their way."""
        await self._promise.wait()
        return self._promise.get()

    def to(self, *args: Any, **kwargs: Any) -> LateBatch:
        """The batch with its inputs moved, as ``Tensor.to`` moves them, and its targets when they are there."""

        def moved(data: Any) -> Any:
            return rebuilt(data, lambda tensor: tensor.to(*args, **kwargs), lambda other: other.to(*args, **kwargs))

        return LateBatch(moved(self.inputs), _Changed(self._promise, moved))

    def pin_memory(self, device: str | torch.device | None = None) -> LateBatch:
        """The batch with its inputs page-locked, and its targets when they are there."""

        def pinned(data: Any) -> Any:
            return pin_memory(data, device)

        return LateBatch(pinned(self.inputs), _Changed(self._promise, pinned))

    def _whole(self) -> tuple[Any, Any]:
        return self.inputs, self.targets

    # -- a tuple, to whoever reads it as one -------------------------------------------------------------------

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        if not isinstance(key, slice) and range(2)[key] == 0:
            return self.inputs
        return self._whole()[key]

    def __iter__(self) -> Iterator[Any]:
        yield self.inputs
        yield self.targets

    def __reversed__(self) -> Iterator[Any]:
        yield from reversed(self._whole())

    def __contains__(self, value: object) -> bool:
        return value in self._whole()

    def count(self, value: Any) -> int:
        """As a tuple's."""
        return self._whole().count(value)

    def index(self, value: Any, *bounds: Any) -> int:
        """As a tuple's."""
        return self._whole().index(value, *bounds)

    def __add__(self, other: Any) -> Any:
        return self._whole() + tuple(other) if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return tuple(other) + self._whole() if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Any:
        return self._whole() * times

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return self._whole() == (tuple(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return self._whole() != (tuple(other) if isinstance(other, tuple) else other)

    def __lt__(self, other: Any) -> bool:
        return self._whole() < tuple(other)

    def __le__(self, other: Any) -> bool:
        return self._whole() <= tuple(other)

    def __gt__(self, other: Any) -> bool:
        return self._whole() > tuple(other)

    def __ge__(self, other: Any) -> bool:
        return self._whole() >= tuple(other)

    def __hash__(self) -> int:
        return hash(self._whole())

    def __reduce__(self) -> Any:
        return _with_targets, self._whole()

    def __repr__(self) -> str:
        return f"LateBatch(inputs={self.inputs!r}, targets={self.targets!r})" if self._known() else self._outline()

    def _known(self) -> bool:
        return isinstance(self._promise, _There) or (isinstance(self._promise, Pending) and self._promise.known)

    def _outline(self) -> str:
        return f"LateBatch(inputs={self.inputs!r}, targets=<not read yet>)"


def _with_targets(inputs: Any, targets: Any) -> LateBatch:
    return LateBatch(inputs, _There(targets))
