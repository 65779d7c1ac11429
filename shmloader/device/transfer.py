"""Batches to the accelerator: enqueued ahead of need on one side stream, and nothing let go before it has been read.

A batch under way is a :class:`Flight`. It holds what the device still reads (the batch on the CPU, and with it the
slot's lease; staging memory) until the event behind its copies has completed. So a slot comes back as any slot does,
when nothing refers to it any more, and a flight is one more thing that does.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shmloader.device.accelerator import Accelerator, Event
from shmloader.device.nest import is_plain, leaves, rebuilt
from shmloader.device.staging import Staging

#: What is smaller crosses together with the batch's other small parts: a copy of its own costs the training thread
#: about ten microseconds, as long as packing so many bytes.
SMALL_BYTES = 64 << 10
#: Parts begin at multiples of this in what crosses together, so that every dtype can be built on them.
ALIGN_BYTES = 64

#: Flights of this process that are not through. Held here, not by whoever made them: an iterator that is dropped in
#: the middle of an epoch must not free what the device still reads.
_under_way: set[Flight] = set()


@dataclass(slots=True, eq=False)
class Flight:
    """One batch on its way to the device, or there."""

    load: _Load
    #: What the device may still read.
    source: Any
    #: The batch with its tensors on the device, unless parts of it are still to be moved.
    data: Any = None
    #: The batch on the CPU, where parts of it move themselves: when it arrives, into the consumer's own memory.
    pending: Any = None
    #: Behind its copies; None while there may be copies that it is not behind.
    event: Event | None = None
    #: Where the consumer's stream came to when its copies were not through, and what it waits for there.
    awaited: tuple[Event, Event] | None = None

    def over(self, staging: Staging) -> None:
        """The device has read all of it."""
        self.source = self.awaited = None
        staging.give(self.load.blocks)
        self.load.forget()
        _under_way.discard(self)


class Transfer:
    """The way of one iterator's batches to one device.

    Args:
        accelerator: the device.
        locked: whether a range of addresses is page-locked; what is not crosses by way of page-locked staging memory,
            or a copy would not be asynchronous.
        notices: gets the warnings that are to be given between two batches.
    """

    def __init__(self, accelerator: Accelerator, locked: Callable[[int, int], bool], notices: list[Warning]) -> None:
        self.accelerator = accelerator
        self.staging = Staging(accelerator, notices)
        self._locked = locked
        self._stream = accelerator.new_stream()
        #: With an event behind all their copies, which will be no more; in the order of those events, or nearly so.
        self._flights: deque[Flight] = deque()
        #: With parts that are still to be moved.
        self._waiting: set[Flight] = set()
        self._exposed_s = 0.0
        self._pid = os.getpid()

    # -- one batch ---------------------------------------------------------------------------------------------

    def send(self, data: Any) -> Flight:
        """Enqueue the copies of a batch. It is the caller's to pass what comes back to :meth:`arrive` or :meth:`drop`.

        Raises:
            RuntimeError: the current stream is being captured into a graph, or what the device raises.
        """
        accelerator = self.accelerator
        self._check_no_capture()
        self.reclaim()
        load = _Load(self)
        flight = Flight(load, data)
        # Before anything is enqueued: should the device fail in between, what it may read is kept for good.
        _under_way.add(flight)
        try:
            with _training(), accelerator.on(self._stream):
                if load.take(data):
                    flight.pending = data
                else:
                    flight.data = load.build(data)
        except BaseException:
            flight.pending = None
            raise
        finally:
            # Also behind what was enqueued before an error: it is read all the same.
            self._seal(flight, self._stream)
        return flight

    def arrive(self, flight: Flight) -> Any:
        """The batch on the device, for the stream that is current now: its work waits for the copies.

        When parts of the batch fail to move, it can be tried again.

        Raises:
            RuntimeError: the current stream is being captured into a graph, or what the device raises.
        """
        accelerator = self.accelerator
        self._check_no_capture()
        stream = accelerator.current_stream()
        event = flight.event
        assert event is not None
        if not event.query():
            flight.awaited = accelerator.record(stream), event
        accelerator.wait(stream, event)
        for tensor in flight.load.landed:
            # The memory was the side stream's: freed without this, it would be given out while the step still reads.
            accelerator.use(tensor, stream)
        if flight.pending is not None:
            self._move(flight, stream)
        data, flight.data, flight.load.landed = flight.data, None, []
        return data

    def _move(self, flight: Flight, stream: Any) -> None:
        """Let the parts that move themselves do so, in the consumer's stream."""
        self._waiting.discard(flight)  # first: cut short from here on, it is kept for good
        pending, flight.pending, flight.event = flight.pending, None, None
        try:
            with _training():
                flight.data = flight.load.build(pending)
        except BaseException:
            flight.pending = pending
            raise
        finally:
            self._seal(flight, stream)  # the moves came after the copies

    def _seal(self, flight: Flight, stream: Any) -> None:
        """Put an event behind what was enqueued for it so far."""
        flight.event = self.accelerator.record(stream)
        if flight.pending is None:
            self._flights.append(flight)
        else:
            self._waiting.add(flight)

    def drop(self, flight: Flight) -> None:
        """Nobody wants this batch any more. Safe to call for one that has arrived."""
        flight.data = flight.pending = None
        if flight in self._waiting:
            self._waiting.discard(flight)
            self._flights.append(flight)

    def _check_no_capture(self) -> None:
        # A wait for work outside the capture would spoil it, and a copy in it would read the slot at every replay.
        if self.accelerator.capturing():
            raise RuntimeError(
                "a batch cannot be copied to the device while a graph is captured; take it before the capture begins"
            )

    # -- what the device may still read ------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Let go of what the device has read."""
        while (event := self._oldest()) is not None and event.query():
            self._land()

    def settle(self) -> bool:
        """Wait for the oldest flight to be through; False if there is none that can be waited for."""
        event = self._oldest()
        if event is None:
            return False
        event.synchronize()
        self._land()
        return True

    def _land(self) -> None:
        """The oldest flight is through."""
        awaited = self._flights[0].awaited
        # Where the consumer's stream has not come to it yet, the copies were ahead after all.
        if awaited is not None and awaited[0].query():
            self._exposed_s += max(0.0, self.accelerator.seconds_between(*awaited))
        self._flights.popleft().over(self.staging)

    def take_exposed_s(self) -> float:
        """Seconds that consumers' streams have waited for copies, as far as is known, since this was last asked."""
        seconds, self._exposed_s = self._exposed_s, 0.0
        return seconds

    def _oldest(self) -> Event | None:
        """The event behind the oldest flight, if that can be asked now: not in a child, nor during a capture."""
        if not self._flights or self._pid != os.getpid() or self.accelerator.capturing():
            return None
        return self._flights[0].event

    def finish(self) -> None:
        """Wait until the device has read everything.

        In a forked child, where there is no device, and while the interpreter ends, do nothing. During a capture,
        nothing can be waited for: what the device may still read then stays as it is for good.
        """
        if self._pid != os.getpid() or sys.is_finalizing():
            return
        for flight in (*self._flights, *self._waiting):
            self.drop(flight)
        try:
            while self.settle():
                pass
        except RuntimeError:
            # The device is out of order, which its user hears from it: what it may still read stays as it is for good.
            self._flights.clear()

    # -- memory to copy from -----------------------------------------------------------------------------------

    def lease_block(self, nbytes: int) -> torch.Tensor | None:
        """Staging memory; waits while the ring is used up. None where the system refuses page-locked memory."""
        while self.staging.used_up(nbytes) and self.settle():
            pass
        return self.staging.take(nbytes)

    def is_locked(self, source: torch.Tensor) -> bool:
        """Whether the memory of a contiguous tensor can be read by the device as it lies."""
        return self._locked(source.data_ptr(), source.nbytes)


@dataclass(slots=True)
class _Region:
    """The visible part of one storage, from the first byte that a tensor of the batch sees to the last."""

    storage: torch.UntypedStorage
    start: int
    stop: int
    #: Device memory that holds it, from ``at`` on.
    there: torch.Tensor | None = None
    at: int = 0

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def bytes(self) -> torch.Tensor:
        """The region as a tensor of bytes."""
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        return whole.set_(self.storage, self.start, (self.nbytes,), (1,))


class _Load:
    """One batch: first all its tensors are found and their memory is sent, then the batch is built anew on that."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer, self._accelerator = transfer, transfer.accelerator
        self._regions: dict[int, _Region] = {}
        self.landed: list[torch.Tensor] = []
        self.blocks: list[torch.Tensor] = []

    # -- finding and sending -----------------------------------------------------------------------------------

    def take(self, data: Any) -> bool:
        """Enqueue the copies of what a batch's plain tensors see; whether there is more in it to be moved."""
        more = False
        for leaf in leaves(data):
            if not is_plain(leaf):
                more = True
            elif leaf.numel():
                self._find(leaf)
        small = [region for region in self._regions.values() if region.nbytes < SMALL_BYTES]
        if len(small) > 1:
            self._send_together(small)
        for region in self._regions.values():
            if region.there is None:
                self._send(region)
        return more

    def _find(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
        stop = start + (int(reach) + 1) * size
        start -= start % ALIGN_BYTES  # so that tensors of any dtype can be set on it
        # By the storage itself: two of different sizes may begin at the same address.
        region = self._regions.get(storage._cdata)
        if region is None:
            self._regions[storage._cdata] = _Region(storage, start, stop)
        else:
            region.start, region.stop = min(region.start, start), max(region.stop, stop)

    def _send(self, region: _Region) -> None:
        source = region.bytes()
        if not self._transfer.is_locked(source):
            block = self._block(region.nbytes)
            if block is not None:
                source = block[: region.nbytes].copy_(source)
        region.there = self._land(source)

    def _send_together(self, regions: list[_Region]) -> None:
        offsets, nbytes = [], 0
        for region in regions:
            offsets.append(nbytes)
            nbytes += -(-region.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        block = self._block(nbytes)
        if block is None:
            return
        for region, region.at in zip(regions, offsets):
            block[region.at : region.at + region.nbytes].copy_(region.bytes())
        there = self._land(block[:nbytes])
        for region in regions:
            region.there = there

    def _block(self, nbytes: int) -> torch.Tensor | None:
        block = self._transfer.lease_block(nbytes)
        if block is not None:
            self.blocks.append(block)
        return block

    def forget(self) -> None:
        """The device has read all of it: of the CPU's memory, nothing is kept."""
        self._regions, self.blocks = {}, []

    def _land(self, source: torch.Tensor) -> torch.Tensor:
        there = self._accelerator.copy(source)
        self.landed.append(there)
        return there

    # -- building ----------------------------------------------------------------------------------------------

    def build(self, data: Any) -> Any:
        """The batch anew, its plain tensors on the memory that has been sent, the rest by its own means."""
        return rebuilt(data, self._on_device, self._accelerator.move)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        # Set, not viewed: each tensor has a version counter of its own, and no _base.
        made = self._accelerator.empty(tensor.dtype)
        storage, offset = made.untyped_storage(), 0
        if tensor.numel():
            region = self._regions[tensor.untyped_storage()._cdata]
            assert region.there is not None
            storage = region.there.untyped_storage()
            offset = region.at + int(tensor.storage_offset()) * tensor.element_size() - region.start
        made.set_(storage, offset // tensor.element_size(), tensor.shape, tensor.stride())
        return made.requires_grad_() if tensor.requires_grad else made


def _training() -> AbstractContextManager[Any]:
    # Inside inference_mode torch would build inference tensors, which a later training step could not save.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
