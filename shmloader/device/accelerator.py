"""What the device path asks of an accelerator: a small interface, and torch's accelerators behind it.

Everything that touches a device goes through here, so that tests can put a fake in its place whose copies complete
late and out of order (``tests/fakes.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A moment in a stream."""

    def query(self) -> bool:
        """Whether everything before it has completed."""
        ...

    def synchronize(self) -> None:
        """Wait until everything before it has completed."""
        ...


class Accelerator(Protocol):
    """One device.

    A *copy* is only enqueued: it reads its source when the device gets to it. Copies of one stream complete in order,
    those of different streams in any order. Streams and events are the device's own objects.
    """

    #: Where the batches go, with its index.
    device: torch.device

    def new_stream(self) -> Any:
        """A stream beside the consumer's."""
        ...

    def current_stream(self) -> Any:
        """The stream that the calling thread works in."""
        ...

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then nothing may be asked of the device."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, ``stream`` is the current one."""
        ...

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy of a plain strided CPU tensor in the current stream; it keeps dtype, shape and strides."""
        ...

    def move(self, value: Any) -> Any:
        """Enqueue ``value.to(device, non_blocking=True)`` of anything else that has such a method."""
        ...

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements on the device, to be set on a storage."""
        ...

    def record(self, stream: Any) -> Event:
        """An event behind everything that has been enqueued in ``stream``."""
        ...

    def seconds_between(self, earlier: Event, later: Event) -> float:
        """Seconds from one event to another, both of which have completed; 0 where the device does not tell."""
        ...

    def wait(self, stream: Any, event: Event) -> None:
        """What is enqueued in ``stream`` from now on begins after ``event``."""
        ...

    def use(self, tensor: torch.Tensor, stream: Any) -> None:
        """``stream`` uses a tensor of another stream's: its memory is not given out before that is through."""
        ...

    def locked_memory(self, nbytes: int) -> torch.Tensor:
        """Page-locked CPU memory: ``nbytes`` of uint8.

        Raises:
            RuntimeError: the system refuses.
        """
        ...


class TorchAccelerator:
    """A device of ``torch.accelerator``'s."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._events_tell_time = True

    def new_stream(self) -> Any:
        return torch.Stream(self.device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def capturing(self) -> bool:
        asks = getattr(self._module, "is_current_stream_capturing", None)
        return bool(asks()) if asks is not None else False

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = self._module.stream(stream)
        return made

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        return source.to(self.device, non_blocking=True)

    def move(self, value: Any) -> Any:
        try:
            return value.to(self.device, non_blocking=True)
        except TypeError:  # its `to` takes a device only
            return value.to(self.device)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self.device)

    def record(self, stream: Any) -> Event:
        if self._events_tell_time:
            try:
                timed: Event = torch.Event(self.device, enable_timing=True)
                stream.record_event(timed)
                return timed
            except (RuntimeError, NotImplementedError):  # not every device's do; and a fault comes again below
                self._events_tell_time = False
        event: Event = stream.record_event()
        return event

    def seconds_between(self, earlier: Event, later: Event) -> float:
        if not self._events_tell_time:
            return 0.0
        start: Any = earlier
        try:
            return float(start.elapsed_time(later)) / 1000
        except (RuntimeError, ValueError):  # one is from before that was known
            return 0.0

    def wait(self, stream: Any, event: Event) -> None:
        stream.wait_event(event)

    def use(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def locked_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def find(device: Any) -> Accelerator | None:
    """The user's ``device`` as this process sees it now; None for none, or for the CPU.

    An int is an index of the current accelerator's type; a type without an index means the current device of this
    process, which launchers set for each rank.

    Raises:
        RuntimeError: this process sees no such device.
    """
    check(device)
    named = None if device is None or isinstance(device, int) else torch.device(device)
    if device is None or (named is not None and named.type == "cpu"):
        return None
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or (named is not None and named.type != there.type):
        seen = "none" if there is None else f"only {there.type!r}"
        raise RuntimeError(f"device={device!r}: torch sees no such accelerator in this process ({seen})")
    index = named.index if named is not None else device
    if index is None:
        index = _current_index()
    if index >= torch.accelerator.device_count():
        raise RuntimeError(f"device={device!r}: this process sees only {torch.accelerator.device_count()}")
    return TorchAccelerator(torch.device(there.type, index))


def _current_index() -> int:
    asks: Any = getattr(torch.accelerator, "current_device_index", None)
    if asks is None:  # torch 2.6
        asks = torch.accelerator.current_device_idx
    return int(asks())


def check(device: Any) -> None:
    """Whether the user's ``device`` makes sense on some machine.

    Raises:
        TypeError: it is neither None, a ``torch.device``, text nor an int.
        ValueError: it names no device, or one that holds no data (``"meta"``).
    """
    if device is None:
        return
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device must be a torch.device, text such as 'cuda', an index or None, got {device!r}")
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"device={device} is no index of a device")
        return
    try:
        made = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device: {error}") from None
    if made.type == "meta":
        raise ValueError("device='meta' holds no data; batches cannot be copied to it")
