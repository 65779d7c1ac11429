"""An accelerator that is not there: on the CPU, with copies that complete late and out of order.

A copy reads its source when it *completes*, and until then its destination holds a pattern. Within a stream work
completes in order; between streams in an order that is drawn from a seed, or in the worst one: :meth:`synchronize`
completes the current stream's work and, of other streams, only what it waits for. So a forgotten wait shows itself, and
so does a forgotten ``use``: memory that is let go is overwritten, in the order of the stream that it was taken in.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shmloader.device.accelerator import TorchAccelerator
from shmloader.memory.budget import size_class
from shmloader.memory.lease import lease

#: What the device's memory holds before a copy to it has completed, and after it was let go.
POISON = 0xA5


class FakeRuntime:
    """Page-locks ranges of addresses, or refuses to.

    Args:
        refuses: the counts, from 1 on, of the registrations that are refused; or True for all.
        error: how it refuses.
    """

    def __init__(self, refuses: set[int] | bool = False, error: type[Exception] = RuntimeError) -> None:
        self.refuses, self.error = refuses, error
        self.registrations = 0
        #: Address and size of what is registered.
        self.ranges: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range.

        Raises:
            Exception: it is refused.
        """
        self.registrations += 1
        if self.refuses is True or (self.refuses and self.registrations in self.refuses):
            raise self.error("the system refuses to page-lock so much")
        assert nbytes > 0, "a range of no bytes was registered"
        for other, size in self.ranges.items():
            assert address + nbytes <= other or other + size <= address, "a range was registered twice"
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        """Undo it."""
        assert self.ranges.pop(address, None) is not None, "a range was unregistered that was not registered"

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether one registration holds all of these bytes."""
        starts = sorted(self.ranges)
        place = bisect_right(starts, address) - 1
        return place >= 0 and address + nbytes <= starts[place] + self.ranges[starts[place]]


@dataclass(frozen=True)
class Copied:
    """One copy to the device, as it was enqueued."""

    address: int
    nbytes: int
    #: Whether its source was page-locked.
    locked: bool


class FakeStream:
    """Work in order."""

    def __init__(self) -> None:
        self.work: deque[_Work] = deque()


@dataclass(eq=False)
class FakeEvent:
    """A moment in a stream."""

    accelerator: FakeAccelerator
    stream: FakeStream
    done: bool = False
    #: When that was.
    at: int = 0

    def query(self) -> bool:
        """Whether everything before it has completed."""
        self.accelerator.asked()
        return self.done

    def synchronize(self) -> None:
        """Complete everything before it, and nothing else that need not be."""
        self.accelerator.asked()
        self.accelerator.complete(self)

    def milliseconds_to(self, end_event: FakeEvent) -> float:
        """Every piece of work takes a millisecond, and nothing else any time."""
        assert self.done, "the first event has not completed"
        assert end_event.done, "the second event has not completed"
        return float(end_event.at - self.at)


@dataclass(eq=False)
class _Work:
    run: Callable[[], None]
    #: Not before this.
    after: FakeEvent | None = None

    @property
    def ready(self) -> bool:
        return self.after is None or self.after.done


@dataclass(eq=False)
class _Block:
    """A piece of the device's memory, which the fake itself keeps for good."""

    memory: torch.Tensor
    stream: FakeStream
    users: list[FakeStream] = field(default_factory=list)


@dataclass(eq=False)
class Reading:
    """What a step reads, once it gets to it."""

    value: Any = None


class FakeAccelerator:
    """The device path's accelerator, all on the CPU.

    Args:
        seed: decides the order between streams.
        late: a thread completes the work, whenever it gets to run; otherwise only the test does, with :meth:`step`,
            :meth:`run_all`, :meth:`synchronize`, or by waiting for an event.
        runtime: knows which ranges are page-locked, beside what :meth:`locked_memory` gave.

    Leave its ``with`` block to end the thread.
    """

    def __init__(self, seed: int = 0, late: bool = False, runtime: FakeRuntime | None = None) -> None:
        self.device = torch.device("cpu")
        self.seed, self.runtime = seed, runtime or FakeRuntime()
        #: Whether page-locked memory is refused, and whether the current stream is being captured.
        self.refuses_memory = self.captures = False
        #: The counts, from 1 on, of the copies that fail.
        self.fails: set[int] = set()
        self.copies: list[Copied] = []
        #: Every piece of page-locked memory that it gave, kept so that no address occurs twice.
        self.locked_blocks: list[torch.Tensor] = []
        #: What went wrong on the device, where nobody hears an error.
        self.faults: list[str] = []
        #: Pieces of work that have completed.
        self.ticks = 0
        self._random = random.Random(seed)
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[_Block] = deque()
        self._streams = [FakeStream()]
        self.consumer = self._streams[0]
        self._here = threading.local()  # a thread's own current stream, as with torch
        self._changed = threading.Condition(threading.RLock())
        self._pid = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._complete_late, name="device") if late else None

    def __repr__(self) -> str:
        return f"FakeAccelerator(seed={self.seed}, late={self._thread is not None})"

    def __enter__(self) -> FakeAccelerator:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, error: object = None, *details: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        assert error or not self.faults, f"{self}: {self.faults}"

    # -- what is asked of it ---------------------------------------------------------------------------------------

    @property
    def _current(self) -> FakeStream:
        stream: FakeStream = getattr(self._here, "stream", self.consumer)
        return stream

    def new_stream(self) -> FakeStream:
        """A stream beside the others."""
        self.asked()
        stream = FakeStream()
        self._streams.append(stream)
        return stream

    def current_stream(self) -> FakeStream:
        """Where work is enqueued now."""
        self.asked()
        return self._current

    def capturing(self) -> bool:
        """Whether the test says so."""
        return self.captures

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Inside, ``stream`` is the current one."""
        before, self._here.stream = self._current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor that will hold what is in ``source`` when the copy completes."""
        self.asked()
        if len(self.copies) + 1 in self.fails:
            self.fails.discard(len(self.copies) + 1)
            raise RuntimeError("the device fails")
        assert source.layout is torch.strided, "only strided tensors are copied"
        extent = _extent(source)
        address = source.data_ptr()
        self.copies.append(Copied(address, extent, self.is_locked(address, extent)))
        there, block = self._allocate(extent)
        made = torch.empty(0, dtype=source.dtype).set_(there.untyped_storage(), 0, source.size(), source.stride())
        if source.numel():
            alive, start = (
                StorageWeakRef(source.untyped_storage()),
                int(source.storage_offset()) * source.element_size(),
            )
            self._enqueue(lambda: self._copy(alive, start, extent, block))
        return made

    def move(self, value: Any) -> Any:
        """``value.to(device)``, in which every ``Tensor.to`` is a late copy."""
        self.asked()
        with _LateCopies(self):
            return TorchAccelerator.move(self, value)  # type: ignore[arg-type]

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements."""
        self.asked()
        return torch.empty(0, dtype=dtype)

    def record(self, stream: FakeStream) -> FakeEvent:
        """An event behind everything that is in ``stream``."""
        self.asked()
        event = FakeEvent(self, stream)

        def come() -> None:
            event.at, event.done = self.ticks, True

        self._enqueue(come, stream)
        return event

    def seconds_between(self, earlier: FakeEvent, later: FakeEvent) -> float:
        """By :meth:`FakeEvent.milliseconds_to`."""
        self.asked()
        return earlier.milliseconds_to(later) / 1000

    def wait(self, stream: FakeStream, event: Any) -> None:
        """What is enqueued in ``stream`` from now on comes after ``event``."""
        self.asked()
        self._enqueue(lambda: None, stream, event)

    def use(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        """The memory is not given out before ``stream`` is through with what is in it when the memory is let go."""
        self.asked()
        self._block(tensor).users.append(stream)

    def locked_memory(self, nbytes: int) -> torch.Tensor:
        """Memory that counts as page-locked.

        Raises:
            RuntimeError: the test wants it refused.
        """
        self.asked()
        if self.refuses_memory:
            raise RuntimeError("no page-locked memory is left")
        block = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.locked_blocks.append(block)
        return block

    # -- what a test asks of it ------------------------------------------------------------------------------------

    def is_locked(self, address: int, nbytes: int) -> bool:
        """Whether the device reads these bytes as they lie."""
        ours = ((block.data_ptr(), block.nbytes) for block in self.locked_blocks)
        return self.runtime.covers(address, nbytes) or any(
            start <= address and address + nbytes <= start + size for start, size in ours
        )

    def asked(self) -> None:
        """Nothing may be asked of a device in a forked child, nor while a graph is captured."""
        assert self._pid == os.getpid(), "the device was used in a forked child"
        assert not self.captures, "the device was asked for something during a capture"
        self._reuse_freed()

    def step(self) -> bool:
        """Complete one piece of work of some stream; False if there is none that can be."""
        self._reuse_freed()
        with self._changed:
            ready = [stream for stream in self._streams if stream.work and stream.work[0].ready]
            if ready:
                self._complete_first(self._random.choice(ready))
            return bool(ready)

    def run_all(self) -> None:
        """Complete everything."""
        while self.step():
            pass

    def read(self, tensor: torch.Tensor) -> Reading:
        """Enqueue a step in the current stream that reads ``tensor``; it knows the memory and doesn't keep it."""
        block, reading, dtype = self._block(tensor), Reading(), tensor.dtype
        offset = (tensor.data_ptr() - block.memory.data_ptr()) // tensor.element_size()
        size, stride = tensor.size(), tensor.stride()

        def run() -> None:
            memory = torch.empty(0, dtype=dtype).set_(block.memory.untyped_storage(), offset, size, stride)
            reading.value = memory.clone()

        self._enqueue(run)
        return reading

    def synchronize(self) -> None:
        """Complete the current stream's work: what it waits for first, and nothing else of other streams."""
        self.complete(self.record(self._current))

    def fetch(self, tensor: torch.Tensor) -> Any:
        """What a step reads in the current stream that is enqueued now."""
        reading = self.read(tensor)
        self.synchronize()
        return reading.value

    def complete(self, event: FakeEvent) -> None:
        """Complete what ``event`` needs, or wait until the thread has."""
        with self._changed:
            while not event.done:
                if self._thread is not None:
                    self._changed.wait()
                    continue
                stream = event.stream
                while (after := stream.work[0].after) is not None and not after.done:
                    stream = after.stream
                self._complete_first(stream)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _enqueue(
        self, run: Callable[[], None], stream: FakeStream | None = None, after: FakeEvent | None = None
    ) -> None:
        with self._changed:
            (stream or self._current).work.append(_Work(run, after))
            self._changed.notify_all()

    def _complete_first(self, stream: FakeStream) -> None:
        stream.work.popleft().run()
        self.ticks += 1

    def _complete_late(self) -> None:
        while True:
            with self._changed:
                while not self.step():
                    if self._closed:
                        return
                    self._changed.wait()
                self._changed.notify_all()

    def _copy(self, source: StorageWeakRef, start: int, nbytes: int, block: _Block) -> None:
        # Whoever called copy() must have kept the source: the fake does not, as no device does.
        if source.expired():
            self.faults.append("the device read memory that had been let go")
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(source.cdata)
        if storage is not None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, start, (nbytes,), (1,))
            block.memory[:nbytes].copy_(whole)

    def copy_odd(self, source: weakref.ref[torch.Tensor], made: torch.Tensor) -> None:
        """Enqueue the copy of a tensor that is more than memory with a shape and strides."""

        def run() -> None:
            if (found := source()) is None:
                self.faults.append("the device read a tensor that had been let go")
            else:
                made.copy_(found.detach())

        self._enqueue(run)

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, _Block]:
        memory = torch.full((size_class(max(nbytes, 1)),), POISON, dtype=torch.uint8)
        block = _Block(memory, self._current)
        self._blocks[memory.data_ptr()] = block
        held = lease(memory.numpy(), 0, memory.nbytes, block, self._freed)  # type: ignore[arg-type]
        return torch.frombuffer(held, dtype=torch.uint8), block

    def _block(self, tensor: torch.Tensor) -> _Block:
        return self._blocks[tensor.untyped_storage().data_ptr()]

    def _reuse_freed(self) -> None:
        """Memory that nothing refers to is given out again, and written, as soon as its users are through."""
        while self._freed:
            try:
                block = self._freed.popleft()
            except IndexError:  # the other thread was faster
                return
            stream = block.stream
            if block.users:
                stream = FakeStream()
                self._streams.append(stream)
            for user in block.users:
                event = FakeEvent(self, user)
                self._enqueue(lambda event=event: setattr(event, "done", True), user)  # type: ignore[misc]
                self._enqueue(lambda: None, stream, event)
            self._enqueue(lambda block=block: block.memory.fill_(POISON), stream)  # type: ignore[misc]


class _LateCopies(TorchFunctionMode):
    """Inside, ``Tensor.to`` copies to the device, late."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to:
            return func(*args, **(kwargs or {}))
        source = args[0]
        if type(source) is torch.Tensor and _is_strided(source):
            return self._accelerator.copy(source)
        # Whatever it is, it knows how to be cloned and copied; the device's memory is not looked after here.
        made = _blank(source.detach())
        self._accelerator.copy_odd(weakref.ref(source), made)
        return made


def _is_strided(tensor: torch.Tensor) -> bool:
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad
    return tensor.layout is torch.strided and not odd


def _blank(source: torch.Tensor) -> torch.Tensor:
    """Like ``source``, with other values."""
    if source.is_quantized:
        return torch.empty_like(source)
    made = source.clone()
    (made.values() if made.layout is torch.sparse_csr else made).zero_()
    return made


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return (reach + 1) * tensor.element_size()
