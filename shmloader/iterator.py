"""Iterators: the order of things. One epoch's life, or with persistent workers several.

The pump runs inside ``__next__``: there is no thread and no lock. While the training step runs, the workers live off
the assignments that they hold, ``prefetch_factor`` each. What is pulled from the sampler, when, and to which worker it
goes is torch's to the letter; the names that frameworks look for are torch's, too.

With late targets, ``next()`` hands over the inputs of a batch, and who reads its targets pumps on until they are there.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
)

from shmloader import endings
from shmloader.bell import Bell
from shmloader.device import locking
from shmloader.device.accelerator import Accelerator
from shmloader.device.transfer import Transfer
from shmloader.errors import IteratorBrokenError, WorkerDiedError
from shmloader.late import LateBatch, Pending
from shmloader.memory.pool import Lender
from shmloader.pump import Pump
from shmloader.stats import Record
from shmloader.task import Task
from shmloader.turns import Turns
from shmloader.workers.crew import ASK_S, Crew, Worker, close_files
from shmloader.workers.payload import Job
from shmloader.workers.protocol import Message, Tag

#: So many batches are copied to the device before they are asked for: one is read while the other's copy runs.
AHEAD = 2
_profiler_enabled = torch._C._autograd._profiler_enabled


@dataclass(frozen=True, slots=True)
class Terms:
    """The loader's options, resolved, as an iterator needs them."""

    lender: Lender
    limit_bytes: int | None
    available: Callable[[], int]
    seed_batches: bool
    copy: bool
    record: Record
    #: Where batches are delivered, if not on the CPU.
    accelerator: Accelerator | None = None
    #: The collate functions of inputs and of targets, if targets may come late.
    half_collates: tuple[Callable[[Any], Any], ...] = ()


class _Outcome(NamedTuple):
    """What one ``next()`` comes to."""

    data: Any = None
    error: BaseException | None = None


class ShmIter(_MultiProcessingDataLoaderIter):
    """The multi-process iterator: a subclass of torch's by name, of which only the base class's code is used.

    Args:
        loader: anything with a loader's attributes.
        terms: the options, resolved.

    Raises:
        Exception: what starting a worker, or the first pull from the sampler, raises.
    """

    def __init__(self, loader: Any, terms: Terms) -> None:
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._turn = threading.RLock()  # held by the thread that pumps
        self._shutdown = self._ended = True  # until there is something to shut down
        self._workers: list[Any] = []
        _BaseDataLoaderIter.__init__(self, loader)
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        if self._num_workers <= 0:
            raise AssertionError("num_workers must be greater than 0 for MultiProcessingDataLoaderIter")
        if self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._terms = terms
        # Batches of a map-style data set that are seeded one by one may be made by anybody.
        self._anybody = terms.seed_batches and self._dataset_kind != _DatasetKind.Iterable
        self._unsettled = False
        self._fatal: str | None = None
        self._withheld: _Outcome | None = None  # what next() has come to, until it has returned it
        self._bell = Bell()
        try:
            self._start(loader)
            self._reset(loader, first_iter=True)
        except BaseException:
            self._shutdown_workers()
            raise

    def _start(self, loader: Any) -> None:
        terms = self._terms
        self._pool = pool = terms.lender.lend()
        self._transfer = self._open_device()
        self._crew = Crew(loader.multiprocessing_context or torch.multiprocessing, pool.segment)
        self._pump = Pump(
            self._crew,
            pool,
            terms.limit_bytes,
            terms.available,
            terms.copy,
            terms.record,
            self._transfer,
            late_targets=bool(terms.half_collates),
        )
        self._shutdown = self._ended = False
        endings.register(self)
        self._crew.start(self._job(loader))
        self._workers = [worker.process for worker in self._crew.workers]

    def _open_device(self) -> Transfer | None:
        accelerator = self._terms.accelerator
        if accelerator is not None:
            self._pin_memory = False  # there is nothing left to be pinned
            locking.lock(self._pool, accelerator.device)
            return Transfer(accelerator, self._pool.locked, self._pool.notices)
        if self._pin_memory:
            locking.lock(self._pool)
        return None

    def _job(self, loader: Any) -> Job:
        return Job(
            dataset_kind=self._dataset_kind,
            dataset=self._dataset,
            auto_collation=self._auto_collation,
            collate_fns=self._terms.half_collates or (self._collate_fn,),
            drop_last=self._drop_last,
            worker_init_fn=loader.worker_init_fn,
            base_seed=int(self._base_seed),
            num_workers=self._num_workers,
            seed_batches=self._terms.seed_batches,
        )

    # -- an epoch ----------------------------------------------------------------------------------------------

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            self._check_usable()
        outermost = endings.enter()
        try:
            self._unsettled = True
            self._begin(loader, first_iter)
            self._settle()
        finally:
            endings.leave(outermost)

    def _begin(self, loader: Any, first_iter: bool) -> None:
        if not first_iter:
            self._give_targets()
            self._pump.end_epoch()
            for worker in self._crew.workers:
                worker.send(Tag.RESUME, epoch=self._pump.epoch)
        # A second iter() on the sampler before the first epoch, as torch does: samplers that draw in __iter__ feel it.
        super(_MultiProcessingDataLoaderIter, self)._reset(loader, first_iter)
        self._send_idx = 0  # the next batch to be assigned
        self._rcvd_idx = 0  # the next batch to be delivered, in order
        self._arrived: deque[int] = deque()  # answered batches as they came, for in_order=False
        self._turns = Turns(self._crew.workers, self._prefetch_factor, self._in_order, self._anybody)
        self._length_called = loader._IterableDataset_len_called is not None
        self._withheld = None
        self._handing = False
        self._cut_off = False
        self._note_record()
        for _ in range(self._prefetch_factor * self._num_workers):
            self._try_put_index()

    def _note_record(self) -> None:
        record, ledger, crew = self._terms.record, weakref.ref(self._pool.ledger), weakref.ref(self._crew)
        self._counts = self._pump.counts
        record.begin(self._counts)
        record.workers = self._num_workers
        record.slots = lambda: found.summary() if (found := ledger()) is not None else {}
        pool, transfer = weakref.ref(self._pool), weakref.ref(self._transfer) if self._transfer is not None else None
        record.page_locked = lambda: found.locked_bytes if (found := pool()) is not None else 0
        record.staging = lambda: found.staging.nbytes if transfer and (found := transfer()) is not None else 0
        record.pids = lambda: found.pids() if (found := crew()) is not None else []

    def __next__(self) -> Any:
        # torch's own counts against the length that the data set gave, and opens a range for the profiler, which
        # takes longer than fetching a small batch even when there is none.
        self._handing = True
        self._counts.enter()
        if self._length_called or _profiler_enabled():
            data = super().__next__()
        else:
            data = self._next_data()
            self._num_yielded += 1
        self._counts.leave()
        # From here to the return nothing is called, so no signal handler can come in between and lose the batch;
        # until here it is withheld, and an exception leaves it to the next call.
        self._handing, self._withheld = False, None
        return data

    def _next_data(self) -> Any:
        if self._unsettled or self._fatal or self._shutdown:
            self._check_usable(delivering=True)
        if self._withheld is None:
            self._run()
        self._unsettled = False
        if self._pump.notices:
            self._pump.warn()  # where warnings are errors, the batch is still there for the next call
        outcome = self._withheld
        assert outcome is not None
        if outcome.error is not None:
            error = outcome.error
            outcome = self._withheld = None
            try:
                raise error
            finally:
                del error  # or it, its traceback and this frame would keep each other, and the iterator, alive
        if not self._handing:
            self._withheld = None
        return outcome.data

    def _run(self) -> None:
        """Pump until the next batch, or its error, is there: it is then withheld for the caller."""
        self._claim()
        outermost = endings.enter()
        self._unsettled = True
        self._thread = threading.get_ident()
        try:
            while self._withheld is None:
                self._pump.reclaim()
                if self._pump.needy:
                    self._serve_needs()
                task = self._due()
                if task is not None:
                    self._hand_over(task)
                else:
                    self._hear()
            if self._transfer is not None:
                self._fly_ahead()
        finally:
            self._leave(outermost)

    def _claim(self) -> None:
        """Pump in this thread, until :meth:`_leave`.

        Raises:
            RuntimeError: another thread does.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "another thread is waiting in next() of this iterator, or for the targets of one of its batches; use "
                "an iterator, and batches whose targets are still to come, in one thread at a time"
            )

    def _leave(self, outermost: bool) -> None:
        """A pump is through: whoever awaits something else from it has to look again."""
        self._turn.release()
        endings.leave(outermost)
        if self._bell.waiters:
            self._bell.ring()

    def _fly_ahead(self) -> None:
        """Enqueue the copies of the batches that come next, as far as they are there."""
        for late in self._pump.handed_over():
            self._pump.send_ahead(late)
        for place in range(AHEAD):
            task = self._coming(place)
            if task is None or not task.answered:
                self._hear_what_there_is()
                task = self._coming(place)
            if task is None or not task.answered:
                return
            self._pump.send_ahead(task)
            if task.batch in self._pump.targets:
                self._pump.send_ahead(self._pump.targets[task.batch])

    def _coming(self, place: int) -> Task | None:
        """The task that is delivered after ``place`` others."""
        tasks = self._pump.tasks
        if self._in_order:
            return next(islice(tasks.values(), place, None), None)
        return tasks[self._arrived[place]] if place < len(self._arrived) else None

    def _hear_what_there_is(self) -> None:
        try:
            while self._hear_once(time.monotonic()):
                self._serve_needs()
        except WorkerDiedError:
            pass  # the next next() says so

    def _due(self) -> Task | None:
        """The task to deliver now, if it is answered; ends the epoch when there is none left."""
        tasks = self._pump.tasks
        if not tasks:
            self._give_targets()
            self._settle()
            if not self._persistent_workers:
                self._shutdown_workers()
            if self._cut_off:
                raise IteratorBrokenError(
                    "an exception came out of the sampler, or came in the middle of it, so batches may be missing at "
                    "the end; call iter() on the loader again"
                )
            raise StopIteration
        if not self._in_order:
            return tasks[self._arrived.popleft()] if self._arrived else None
        while (task := tasks.get(self._rcvd_idx)) is None:
            self._rcvd_idx += 1
        return task if task.answered else None

    def _awaited(self) -> list[Task]:
        """What everybody waits for: it is always granted space, or the order could not be kept."""
        tasks, targets = self._pump.tasks.values(), self._pump.handed_over()
        # A worker that makes the next batch may wait for space for the targets of an earlier one.
        late = next((task for task in targets if not task.answered), None)
        first = next((task for task in tasks if self._in_order or not task.answered), None)
        return [task for task in (late, first) if task is not None]

    def _serve_needs(self, wanted: Task | None = None) -> None:
        awaited = self._awaited()
        if wanted is not None:
            awaited.append(wanted)
        for task in self._pump.serve_needs(awaited, self._in_order):
            self._note_settled(task)

    def _note_settled(self, task: Task) -> None:
        if not self._in_order and not task.lane:
            self._arrived.append(task.batch)

    def _hand_over(self, task: Task) -> None:
        self._turns.delivered(task.worker)
        outcome = self._outcome(task)
        if self._terms.half_collates:
            outcome = self._with_targets(task.batch, outcome)
        if self._pump.needy:
            self._serve_needs()
        # Before the caller sees the batch, or its error, as in torch: the worker goes on meanwhile. Should the sampler
        # raise, the batch is not lost with it: the next call delivers it.
        self._withheld = outcome
        # The frames of an error that came out of _deliver refer to this one: it, too, must not refer to the error.
        del outcome
        self._try_put_index()

    def _outcome(self, task: Task) -> _Outcome:
        return _Outcome(error=self._pump.fail(task)) if task.error is not None else self._deliver(task)

    def _deliver(self, task: Task) -> _Outcome:
        try:
            data = self._pump.deliver(task)
            if self._pin_memory:
                data = pin_memory(data, self._pin_memory_device)
        except Exception as error:
            if self._pump.holds(task):
                raise  # it came out of nowhere, and the batch is not delivered yet
            # The batch's own classes may raise anything. Kept in a variable of this frame, which its traceback refers
            # to, the error would keep itself alive, and with it the slot.
            return _Outcome(error=error)
        return _Outcome(data)

    def poke(self) -> int:
        """Note what has been said, and grant what can be granted, without waiting.

        Returns:
            How many batches are ready.
        """
        self._look()
        return 0 if self.spent else sum(task.answered for task in self._pump.tasks.values())

    def _look(self) -> None:
        if self.spent or endings.pumping():
            return
        self._claim()
        outermost = endings.enter()
        try:
            self._unsettled = True
            self._pump.reclaim()
            self._serve_needs()
            self._hear_what_there_is()
            if self._transfer is not None and not self._fatal:
                self._fly_ahead()
            self._settle()
        finally:
            self._leave(outermost)

    # -- without blocking --------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether ``next()`` would return, or raise, without waiting. To be called by the thread that iterates."""
        if self._withheld is not None:
            return True
        self._look()
        if self.spent:
            return True
        if self._pump.tasks:
            task = self._coming(0)
            return task is not None and task.answered
        return not any(task.read_by() for task in self._pump.handed_over() if not task.answered)

    async def until_ready(self) -> None:
        """Wait until ``next()`` would not, without blocking the event loop.

        Raises:
            RuntimeError: the loader's ``timeout`` has passed.
        """
        self._counts.awaited(await self._until(self.ready))

    async def _until(self, there: Callable[[], bool]) -> float:
        started = time.perf_counter()
        left = None
        while not there():
            if self._timeout > 0:
                left = max(0.0, started + self._timeout - time.perf_counter())
            if not await self._bell.wait(self._crew.descriptors(), left):
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        return time.perf_counter() - started

    def abandoned(self) -> bool:
        """Whether it can be ended once its loop is over: it has no other epoch, and nobody waits for targets."""
        if self._persistent_workers or self._ended or self._pid != os.getpid():
            return False
        return not any(task.read_by() for task in self._pump.handed_over())

    async def retire(self) -> None:
        """End the workers, who may be in the middle of a long fetch, without blocking the event loop meanwhile."""
        if self._ended or self._pid != os.getpid():
            return
        self._shutdown = True
        try:
            self._crew.dismiss_all()
            deadline = time.monotonic() + ASK_S
            while (running := self._crew.unended()) and (left := deadline - time.monotonic()) > 0:
                await self._bell.wait([(running[0], select.POLLIN)], left)
        finally:
            self._shutdown_workers()

    # -- late targets ------------------------------------------------------------------------------------------

    def _with_targets(self, batch: int, outcome: _Outcome) -> _Outcome:
        if outcome.error is not None:
            self._pump.abandon_targets(batch)
            return outcome
        pending = Pending(self, batch)
        self._pump.expect(batch, pending)
        return _Outcome(LateBatch(outcome.data, pending))

    def bring(self, pending: Pending) -> None:
        """Pump until the targets, or their error, are there.

        Raises:
            RuntimeError: the iterator has ended; the loader's ``timeout`` has passed; a worker died.
        """
        self._check_usable()
        self._claim()
        outermost, counts = endings.enter(), self._counts
        before = counts.wait_s
        self._unsettled = True
        self._thread = threading.get_ident()
        try:
            while not pending.settled:
                self._pump.reclaim()
                task = self._pump.targets[pending.batch]
                if self._pump.needy:
                    self._serve_needs(task)
                if task.answered:
                    self._give(task)
                else:
                    self._hear()
            self._settle()
        finally:
            counts.waited_amid(counts.wait_s - before)
            self._leave(outermost)
        if self._pump.notices:
            self._pump.warn()

    def has(self, pending: Pending) -> bool:
        """Whether :meth:`bring` would return, or raise, without waiting."""
        self._look()
        if pending.settled or self.spent:
            return True
        return self._pump.targets[pending.batch].answered

    async def until(self, pending: Pending) -> None:
        """Wait until :meth:`bring` would not, without blocking the event loop."""
        waited = await self._until(lambda: self.has(pending))
        self._counts.wait_s += waited
        self._counts.waited_amid(waited)

    def _give(self, task: Task) -> None:
        reader = task.read_by()
        if reader is None:
            self._pump.abandon_targets(task.batch)
            return
        outcome = self._outcome(task)
        if outcome.error is not None:
            reader.fail(outcome.error)
        else:
            reader.put(outcome.data)

    def _give_targets(self) -> None:
        """Wait for the targets that somebody can still read: after this, nobody makes them."""
        while tasks := tuple(self._pump.handed_over()):
            self._pump.reclaim()
            if self._pump.needy:
                self._serve_needs()
            for task in tasks:
                if task.answered or task.read_by() is None:
                    self._give(task)
            if any(self._pump.handed_over()):
                self._hear()

    def _part_with_targets(self) -> None:
        """Give what is there to who can read it, and an error for the rest: nobody makes it any more."""
        for task in tuple(self._pump.handed_over()):
            reader = task.read_by()
            if task.answered or reader is None:
                self._give(task)
            elif self._fatal:
                reader.fail(WorkerDiedError(self._fatal))
            else:
                reader.fail(RuntimeError(f"the loader was closed before {task.title()} were there"))

    # -- out ---------------------------------------------------------------------------------------------------

    def _try_put_index(self, amid: bool = False) -> None:
        """Pull one batch of indices and assign it; the sampler is never asked for more than that.

        What the user's sampler raises is theirs, and unless it comes ``amid`` another step, all that was pulled before
        is still delivered. What was being pulled may be lost, and a generator has ended: nothing is pulled after it.
        """
        if self._cut_off:
            return
        try:
            indices = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        except BaseException:
            self._cut_off, self._unsettled = True, amid
            raise
        worker = self._turns.next()
        if worker is None:
            return
        self._pump.assign(self._send_idx, worker, indices)
        self._send_idx += 1

    # -- in ----------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Wait for the workers and note what they say."""
        deadline = time.monotonic() + self._timeout if self._timeout > 0 else None
        started = time.perf_counter()
        try:
            while not self._hear_once(deadline):
                if deadline is not None and time.monotonic() >= deadline:
                    self._settle()
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
        finally:
            self._counts.wait_s += time.perf_counter() - started

    def _hear_once(self, deadline: float | None) -> bool:
        # Nothing is under way while it waits, so this is where a Ctrl-C does no harm.
        self._unsettled = False
        ready = self._crew.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._unsettled = True
        heard = self._crew.read(ready)
        for position, (worker, message) in enumerate(heard):
            if message is None:
                close_files(heard[position:])
                self._die(worker)
            if message.tag == Tag.EXHAUSTED:
                self._exhaust(worker, message)
                continue
            task = self._pump.note(message)
            if task is not None:
                self._note_settled(task)
        return bool(heard)

    def _exhaust(self, worker: Worker, message: Message) -> None:
        self._pump.void(worker, message)
        if message.epoch == self._pump.epoch:
            self._turns.exhausted(worker)
            if not self._persistent_workers:
                self._crew.dismiss(worker)
            self._try_put_index(amid=True)

    def _die(self, worker: Worker) -> NoReturn:
        tasks = chain(self._pump.tasks.values(), self._pump.targets.values())
        held = [task for task in tasks if task.worker is worker and not task.answered]
        first = min(held, key=lambda task: task.number, default=None)
        text = worker.epitaph() + (f" It was given {first.name()}." if first else "")
        self._fatal = text
        self._settle()
        self._shutdown_workers()
        raise WorkerDiedError(text)

    # -- usable or not -----------------------------------------------------------------------------------------

    @property
    def spent(self) -> bool:
        """Whether this iterator can begin no other epoch."""
        return self._shutdown or self._unsettled or self._fatal is not None or self._pid != os.getpid()

    def _settle(self) -> None:
        """Between two steps: an exception may leave from here without anything being lost."""
        self._unsettled = False

    def _check_usable(self, delivering: bool = False) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this iterator belongs to the process that made it, not to a forked child")
        if self._fatal:
            raise WorkerDiedError(self._fatal)
        if self._unsettled:
            self._claim()  # it may be another thread that is in the middle of a step
            self._turn.release()
            raise IteratorBrokenError(
                "an exception cut an earlier next() of this iterator short, and batches may be missing; "
                "call iter() on the loader again"
            )
        if self._shutdown and not (delivering and not self._pump.tasks):
            raise RuntimeError("this iterator was shut down; call iter() on the loader again")

    # -- ending ------------------------------------------------------------------------------------------------

    def _shutdown_workers(self) -> None:
        """End the workers and give the pool back. Idempotent; does nothing in a forked child.

        An exception, such as a second Ctrl-C, may cut it short: the next call, the finalizer's or the exit hook's,
        goes on where it stopped.
        """
        if self._ended or self._pid != os.getpid():
            return
        self._shutdown = True
        if not self._unsettled:
            self._unsettled = True
            self._part_with_targets()
            self._settle()
        if self._transfer is not None:
            self._transfer.finish()
        self._crew.stop()
        self._ended = True
        if self._unsettled:
            self._terms.lender.write_off(self._pool)
        else:
            self._pool.abandon()
            self._terms.lender.take_back(self._pool)

    def _elsewhere(self) -> bool:
        """Whether another thread, which still runs, was the last to ask for a batch."""
        return self._thread != threading.get_ident() and any(
            thread.ident == self._thread for thread in threading.enumerate()
        )

    def _disown(self) -> None:
        """In a forked child: this iterator, its workers and its pool are the parent's."""
        self._unsettled = True
        self._crew.disown()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):
            endings.finalize(self)
