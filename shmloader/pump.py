"""One batch's way through the main process: assigned, answered, granted space if need be, delivered.

The pump joins what the rooms below keep apart: the crew, which knows no slots, and the pool, which knows no processes.
It has no opinion on order: the iterator says which batch goes to whom and which is due.

Where targets may come late, a batch is two tasks, one for each half: each has its own Fill, slot and lease. The targets
of a batch that was handed over are for its reader, and nobody's when there is none any more.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from shmloader.counts import Counts
from shmloader.device.nest import stays
from shmloader.device.transfer import Transfer
from shmloader.errors import BatchTooLargeError, PoolMemoryError, PoolWarning, ProtocolError
from shmloader.memory import codec
from shmloader.memory.budget import size_class
from shmloader.memory.layout import Layout
from shmloader.memory.pool import Pool, private_buffer
from shmloader.memory.rebuild import decode
from shmloader.memory.segment import MARGIN_BYTES
from shmloader.memory.slots import Slot
from shmloader.stats import Record
from shmloader.task import INPUTS, TARGETS, Task
from shmloader.workers.crew import Crew, Worker
from shmloader.workers.failure import unpack_failure
from shmloader.workers.protocol import NO_LAYOUT, Flag, Message, SlotEvent, Tag, number_of

#: A batch that came in a file of its own is copied out of it below this size: mappings are a limited resource, and a
#: consumer may hold any number of batches.
LEAST_MAPPED_BYTES = 1 << 20
HELD = (
    "the consumer holds so many batches that the slot pool is used up; batches travel in, or are copied to, private "
    "memory, which is slower; raise memory_limit or slots, or hold fewer batches"
)
OVERSIZE = (
    "{} ({} bytes) found no room in the slot pool (at most {} bytes) and travelled in memory of its own, which "
    "is slower; raise memory_limit or slots, or hold fewer batches"
)
T = TypeVar("T")


class Pump:
    """The tasks of one iterator, over its crew and its pool.

    Args:
        limit_bytes: what the user allows for the pool, or None where the budget is the loader's own choice; then a
            batch may be larger than all of it.
        available: returns how many bytes the machine has left.
        copy: deliver private copies only.
        record: where to count.
        transfer: how batches get to the device, if that is where they are delivered.
        late_targets: whether inputs and targets are made one after the other.
    """

    def __init__(
        self,
        crew: Crew,
        pool: Pool,
        limit_bytes: int | None,
        available: Callable[[], int],
        copy: bool,
        record: Record,
        transfer: Transfer | None = None,
        late_targets: bool = False,
    ) -> None:
        self.crew, self.pool = crew, pool
        self._late_targets = late_targets
        self._transfer = transfer
        self._limit_bytes, self._available, self._copy = limit_bytes, available, copy
        self.epoch = 0
        #: Tasks of this epoch that are not delivered yet, by batch: whole batches or inputs.
        self.tasks: dict[int, Task] = {}
        #: And the targets beside them, until their reader has them.
        self.targets: dict[int, Task] = {}
        #: Readers of targets that are gone. They post themselves.
        self._unread: deque[weakref.ref[Any]] = deque()
        #: Tasks that a worker still has to answer, of this epoch and of ended ones.
        self._owed: dict[tuple[int, int], Task] = {}
        #: Tasks whose worker waits for space, by number.
        self.needy: dict[int, Task] = {}
        #: Tasks that were assigned without a slot, until they get one or do without.
        self._slotless: set[Task] = set()
        self._noticed: set[str] = set()
        self.notices = pool.notices
        self.counts = Counts()
        self._record = record

    # -- out ---------------------------------------------------------------------------------------------------

    def assign(self, batch: int, worker: Worker, indices: Any) -> None:
        """Send a Fill, or one for each half, with a slot if one can be had: else the worker makes it and asks."""
        body = codec.pack(indices)
        if not self._late_targets:
            self.tasks[batch] = self._send_fill(Task(batch, self.epoch, worker, indices, None, batch), body)
            return
        for half, (part, tasks) in enumerate(((INPUTS, self.tasks), (TARGETS, self.targets))):
            number = number_of(batch, half)
            tasks[batch] = self._send_fill(Task(batch, self.epoch, worker, indices, None, number, part, half), body)

    def _send_fill(self, task: Task, body: bytes) -> Task:
        # Where slots are short, those that come free are for the workers that are going to ask for one: taken by later
        # batches, they would leave the batch that everybody waits for without.
        slotless, lane = self._slotless, task.lane
        waiting = sum(other.lane == lane for other in slotless) if slotless else 0
        slot = self._acquire(0, lane) if not waiting or self.pool.ledger.spares(waiting, lane) else None
        task.slot = slot
        if slot is None:
            slotless.add(task)
        self._owed[task.epoch, task.number] = task
        worker = task.worker
        worker.owes += 1
        offset, size = (slot.offset, slot.capacity) if slot else (0, 0)
        worker.send(Tag.FILL, epoch=task.epoch, batch=task.number, offset=offset, size=size, body=body)
        return task

    def _acquire(self, nbytes: int, lane: int) -> Slot | None:
        try:
            return self.pool.acquire(nbytes, lane)
        except PoolMemoryError:
            return None

    def serve_needs(self, awaited: list[Task], in_order: bool) -> list[Task]:
        """Grant space to workers that wait for it, in order; what is ``awaited`` always gets through.

        Returns which of those there is no memory for: they are then settled, by an error.
        """
        refused = []
        short = set()  # lanes that have nothing left
        for number in sorted(self.needy):
            task = self.needy[number]
            awaits = task in awaited
            if task.lane in short and not awaits:
                continue
            # What comes before it and has not asked yet is going to, and is delivered first.
            ahead = self._ahead_of(task) if in_order else 0
            spared = awaits or self.pool.ledger.spares(ahead, task.lane)
            slot = self._acquire(task.needs, task.lane) if spared else None
            if slot is None and awaits:
                slot = self._make_room(task)
                if slot is None:
                    self._send_without_slot(task)
                    if task.error is not None:
                        refused.append(task)
                    continue
            if slot is None:
                short.add(task.lane)
            else:
                self._grant(task, slot)
        return refused

    def _ahead_of(self, task: Task) -> int:
        lane, number = task.lane, task.number
        return sum(other.lane == lane and other.number < number and not other.needs for other in self._slotless)

    def _grant(self, task: Task, slot: Slot) -> None:
        del self.needy[task.number]
        self._slotless.discard(task)
        task.needs = 0
        if task.slot is not None:
            self.pool.ledger.apply(task.slot, SlotEvent.GRANT)
        task.moved_from, task.slot = task.slot, slot
        task.worker.send(Tag.GRANT, epoch=task.epoch, batch=task.number, offset=slot.offset, size=slot.capacity)

    def _make_room(self, task: Task) -> Slot | None:
        """Copy answered batches out of the pool until the one that everybody waits for fits."""
        if not self.pool.ledger.fits(task.needs):
            return None
        while self._wait_for_device():
            slot = self._acquire(task.needs, task.lane)
            if slot is not None:
                return slot
        for other in sorted(self._undelivered(), key=lambda other: (other.lane != task.lane, -other.batch)):
            if other.lane != task.lane and self.pool.ledger.full(task.lane):
                break
            if other.slot is not None and other.layout is not None:
                self._copy_out(other, other.layout, "room")
                slot = self._acquire(task.needs, task.lane)
                if slot is not None:
                    return slot
        return None

    def _undelivered(self) -> Iterator[Task]:
        return chain(self.tasks.values(), self.targets.values())

    def _send_without_slot(self, task: Task) -> None:
        """Nothing can be freed without the consumer: the batch travels in a file of its own, or is refused."""
        del self.needy[task.number]
        needs, task.needs = task.needs, 0
        left = self._available() - MARGIN_BYTES
        if needs > left:
            task.error = PoolMemoryError(
                f"{task.title()} needs {needs} bytes, but only {max(left, 0)} are left on this machine or in its "
                "container; make batches smaller, or lower prefetch_factor or num_workers"
            )
            self._drop(task)
            return
        self.counts.oversize_batches += 1
        if needs <= self.pool.ledger.typical_bytes(task.lane):
            self._notice("held", HELD)
        else:
            self._notice("oversize", OVERSIZE.format(task.title(), needs, self.pool.segment.nbytes))
        task.worker.channel.expects_fd = True
        task.worker.send(Tag.GRANT, Flag.NOTHING, epoch=task.epoch, batch=task.number)

    # -- in ----------------------------------------------------------------------------------------------------

    def note(self, message: Message) -> Task | None:
        """Note one message; returns the task that it has settled, if somebody still waits for it."""
        tag = message.tag
        if tag == Tag.LET_GO:
            self.pool.let_go(message.offset)
            return None
        key = message.epoch, message.batch
        task = self._owed.get(key)
        if task is None:
            raise ProtocolError(f"message {tag} for batch {message.batch} of epoch {message.epoch}: not owed")
        wanted = self.holds(task)
        if tag == Tag.NEED_SPACE:
            return self._note_need(task, message.size, wanted)
        del self._owed[key]
        self._slotless.discard(task)
        task.worker.owes -= 1
        self.counts.note_spent(task.worker.spent, message[7:10])
        task.worker.spent = message[7:10]
        if tag == Tag.FILLED:
            self._note_filled(task, message)
        else:
            self._note_failed(task, message)
        if wanted:
            return task if message.body or tag == Tag.FILLED else None
        self._discard(task)
        return None

    def _note_need(self, task: Task, nbytes: int, wanted: bool) -> Task | None:
        if task.slot is not None:
            self.pool.ledger.apply(task.slot, SlotEvent.NEED)
        if not wanted:
            self._drop(task)
            return None
        if self._limit_bytes is not None and size_class(nbytes) > self._limit_bytes:
            task.error = BatchTooLargeError(
                f"{task.title()} needs {nbytes} bytes, more than memory_limit allows ({self._limit_bytes} bytes); "
                f"raise memory_limit to at least {size_class(nbytes)}, or make batches smaller"
            )
            self._drop(task)
            return task
        task.needs = nbytes
        self.pool.ledger.learn(nbytes, task.lane)
        self.needy[task.number] = task
        return None

    def _drop(self, task: Task) -> None:
        """Nobody wants the batch of a worker that waits for space; the answer that it owes only frees slots."""
        task.worker.send(Tag.GRANT, Flag.DROP, epoch=task.epoch, batch=task.number)

    def _note_filled(self, task: Task, message: Message) -> None:
        ledger, kept = self.pool.ledger, message.flags & Flag.KEPT
        if message.flags & Flag.IN_FILE:
            task.worker.channel.expects_fd = False
            task.buffer = _contents(message.fd)
            self._record.oversize.note(task.buffer, len(task.buffer))
            task.moved_from, task.slot = task.slot, None
        if task.moved_from is not None:
            self._leave(task.moved_from, SlotEvent.FILLED_KEPT if kept else SlotEvent.REPLACED)
            task.moved_from, kept = None, 0
        layout = task.layout = self._layout(task, message)
        ledger.note_filled(layout.extent, task.lane)
        if task.slot is None:
            return
        if kept:
            self._copy_out(task, layout, "kept", SlotEvent.FILLED_KEPT)
            return
        ledger.apply(task.slot, SlotEvent.FILLED)
        if layout.extent == 0:
            self._leave(task.slot, SlotEvent.DISCARD)
            task.slot = None

    def _layout(self, task: Task, message: Message) -> Layout:
        known = task.worker.layouts
        if message.layout != NO_LAYOUT and not message.flags & Flag.DEFINE:
            task.values = message.body
            return known[message.layout]
        layout = Layout.from_bytes(message.body)
        task.values = message.body[layout.head_bytes :]
        if message.flags & Flag.DEFINE:
            known[message.layout] = layout
        if message.flags & Flag.IN_RANGE:
            start, end = message.offset, message.offset + message.size
            if task.slot is not None:
                skeleton = self.pool.read(task.slot, start, message.size)
            else:
                skeleton = bytes(memoryview(task.buffer)[start:end])
            layout = Layout(skeleton, layout.spans, layout.plain)
        return layout

    def _note_failed(self, task: Task, message: Message) -> None:
        for slot, event in ((task.moved_from, SlotEvent.REPLACED), (task.slot, SlotEvent.FAILED)):
            if slot is not None:
                self._leave(slot, SlotEvent.FILLED_KEPT if message.flags & Flag.KEPT else event)
        task.slot = task.moved_from = None
        if message.body:
            task.error = unpack_failure(message.body)

    def void(self, worker: Worker, message: Message) -> None:
        """The worker's iterable data set has ended: it will not answer what it still holds of this epoch."""
        for key, task in tuple(self._owed.items()):
            if task.worker is worker and task.epoch == message.epoch:
                del self._owed[key]
                self._slotless.discard(task)
                worker.owes -= 1
                if self.holds(task):
                    del self._holder(task)[task.batch]
                if task.slot is not None:
                    kept = task.number == message.batch and message.flags & Flag.KEPT
                    self._leave(task.slot, SlotEvent.FILLED_KEPT if kept else SlotEvent.EXHAUSTED)

    # -- delivering --------------------------------------------------------------------------------------------

    def _holder(self, task: Task) -> dict[int, Task]:
        return self.targets if task.lane else self.tasks

    def holds(self, task: Task) -> bool:
        """Whether somebody still waits for it."""
        return self._holder(task).get(task.batch) is task

    def deliver(self, task: Task) -> Any:
        """The batch of an answered task without an error, built where it lies, or on its way to the device."""
        layout = task.layout
        assert layout is not None
        if self._transfer is not None:
            data = self._arrive(task, layout, self._transfer)
        else:
            self._spare_slot(task, layout)
            buffer = self.pool.lend(task.slot) if task.slot else task.buffer
            data = self._try_twice(task, lambda: decode(layout, buffer, 0, task.values))
        held, nbytes, counts = self._holder(task), layout.nbytes, self.counts
        # From here to the return nothing is called: an exception from a signal handler would be taken for the batch's
        # own, and the batch would be lost.
        del held[task.batch]
        if not task.lane:
            counts.batches += 1
        counts.bytes += nbytes
        return data

    def _spare_slot(self, task: Task, layout: Layout) -> None:
        """Copy the batch out of its slot if that must not be handed out."""
        if task.slot is None:
            return
        circulates = self.pool.ledger.circulates_without
        while not circulates(task.slot) and self._wait_for_device():
            pass
        if self._copy or not circulates(task.slot):
            if not self._copy:
                self._notice("held", HELD)
            self._copy_out(task, layout, "asked" if self._copy else "held")

    def _try_twice(self, task: Task, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception:
            # A class of the batch's that refuses to be rebuilt does so again, and later batches come all the same;
            # an exception out of nowhere, from a signal handler, does not.
            try:
                step()
            except Exception:
                del self._holder(task)[task.batch]
            raise

    # -- to the device -----------------------------------------------------------------------------------------

    def send_ahead(self, task: Task) -> None:
        """Enqueue the copies of an answered batch before its turn, unless its slot is needed until then.

        What fails here is tried again at the batch's turn, and is its error then.
        """
        transfer, layout = self._transfer, task.layout
        if transfer is None or layout is None or task.flight is not None:
            return
        if task.slot is not None and not self._copy and not self.pool.ledger.circulates_without(task.slot):
            return
        try:
            self._take_off(task, layout, transfer)
        except Exception:
            try:
                self._take_off(task, layout, transfer)
            except Exception:
                return
            raise  # it came out of nowhere

    def _arrive(self, task: Task, layout: Layout, transfer: Transfer) -> Any:
        if task.flight is None:
            self.counts.late_copies += 1
            self._spare_slot(task, layout)
            self._try_twice(task, lambda: self._take_off(task, layout, transfer))
        flight = task.flight
        assert flight is not None
        try:
            return self._try_twice(task, lambda: transfer.arrive(flight))
        finally:
            if not self.holds(task):  # given up
                transfer.drop(flight)

    def _take_off(self, task: Task, layout: Layout, transfer: Transfer) -> None:
        if self._copy and task.slot is not None:
            self._copy_out(task, layout, "asked")
        slot = task.slot
        if slot is not None:
            # From here on it is the lease that holds the slot: the flight's, or until there is one, the task's.
            task.buffer = self.pool.lend(slot)
            task.slot = None
        data = decode(layout, task.buffer, 0, task.values)
        task.flight = transfer.send(data)
        task.buffer = None
        if slot is not None:
            slot.moved = not stays(data)

    def _wait_for_device(self) -> bool:
        """Wait until the device has read one more of what it still has to; False if there is nothing to wait for."""
        if self._transfer is not None and self._transfer.settle():
            self.pool.reclaim()
            return True
        return self.pool.wait_for_device()

    def fail(self, task: Task) -> BaseException:
        """The error of an answered task, as torch would raise it, with a note that says which batch it was."""
        del self._holder(task)[task.batch]
        # Neither the task nor a traceback of ours goes on referring to it, or they would keep each other alive.
        error, task.error = task.error, None
        assert error is not None
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"shmloader: this was {task.name()}")
        return error

    # -- late targets ------------------------------------------------------------------------------------------

    def expect(self, batch: int, reader: Any) -> None:
        """The inputs were handed over: from now on the targets of ``batch`` are for ``reader``, as long as it lives."""
        # No function of ours: a Ctrl-C in it would be raised where nobody hears it, and the targets never abandoned.
        self.targets[batch].reader = weakref.ref(reader, self._unread.append)

    def abandon_targets(self, batch: int) -> None:
        """Nobody will ask for the targets of ``batch``; the worker still makes them, unless it waits for space."""
        task = self.targets.pop(batch, None)
        if task is not None:
            if task.number in self.needy:
                del self.needy[task.number]
                self._drop(task)
            if task.layout is not None:
                self._discard(task)

    def handed_over(self) -> Iterator[Task]:
        """Targets whose inputs were handed over, in the order of their batches. A reader may have gone meanwhile."""
        return (task for task in self.targets.values() if task.reader is not None)

    def _forget_unread(self) -> None:
        while self._unread:
            gone = self._unread.popleft()
            for task in tuple(self.targets.values()):
                if task.reader is gone:
                    self.abandon_targets(task.batch)

    # -- room --------------------------------------------------------------------------------------------------

    def _copy_out(self, task: Task, layout: Layout, reason: str, event: SlotEvent = SlotEvent.COPY_OUT) -> None:
        assert task.slot is not None
        task.buffer = self.pool.copy_batch(task.slot, layout)
        self._leave(task.slot, event)
        task.slot = None
        self.counts.copied(reason)
        self._record.private_copies.note(task.buffer, layout.extent)

    def end_epoch(self) -> None:
        """Forget what was not delivered.

        Workers still carry out what they hold, or their random streams would leave torch's; what they owe is then
        nobody's, and only frees its slots.
        """
        for task in self.needy.values():
            self._drop(task)
        for task in self._undelivered():
            if task.layout is not None:
                self._discard(task)
        self.tasks.clear()
        self.targets.clear()
        self.needy.clear()
        self.reclaim()
        self.pool.ledger.settle()
        self.epoch += 1
        self.counts = Counts()

    def reclaim(self) -> None:
        """Take back the slots that nothing reads any more."""
        if self._unread:
            self._forget_unread()
        if self._transfer is not None:
            self._transfer.reclaim()
            self.counts.copy_wait_s += self._transfer.take_exposed_s()
        self.pool.reclaim()

    def _discard(self, task: Task) -> None:
        if task.slot is not None:
            self._leave(task.slot, SlotEvent.DISCARD)
        if task.flight is not None and self._transfer is not None:
            self._transfer.drop(task.flight)
        task.slot = task.buffer = task.flight = None

    def _leave(self, slot: Slot, event: SlotEvent) -> None:
        self.pool.ledger.apply(slot, event)
        self.pool.spoil(slot)

    def _notice(self, kind: str, text: str) -> None:
        """Keep a warning, once of its kind, for :meth:`warn`: here it might be raised as an error amid a step."""
        if kind not in self._noticed:
            self._noticed.add(kind)
            self.notices.append(PoolWarning(text))

    def warn(self) -> None:
        """Give the warnings that have come up, as if from the caller's caller's caller."""
        while self.notices:
            warnings.warn(self.notices.pop(0), stacklevel=4)


def _contents(fd: int) -> Any:
    """The file that a batch came in, mapped, or copied where it is small."""
    try:
        pages = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
    finally:
        os.close(fd)
    if len(pages) >= LEAST_MAPPED_BYTES:
        return pages
    copy = private_buffer(len(pages))
    copy[:] = np.frombuffer(pages, np.uint8)
    return copy
