"""The child's body: fetch, collate into the range, answer. A plain function that a test can call in-process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from shmloader.errors import UnpicklableBatchError
from shmloader.memory import codec
from shmloader.memory.collate import Arena, allocating_in
from shmloader.memory.layout import Interner
from shmloader.memory.locate import locate
from shmloader.memory.segment import Segment, address_of
from shmloader.workers import seeding
from shmloader.workers.channel import Channel, close_inherited
from shmloader.workers.failure import pack_failure
from shmloader.workers.halves import fetched_by
from shmloader.workers.inbox import Inbox, Orphaned, Stopped
from shmloader.workers.payload import FdParcel, Job, Payload, Unopened
from shmloader.workers.protocol import HALVES, INLINE_BYTES, NO_LAYOUT, Flag, Message, Tag

_PR_SET_PDEATHSIG = 1
#: Characters of the exception that ends a worker.
MOST_LAST_WORDS = 200


@dataclass(slots=True)
class Seat:
    """What one worker is started with.

    ``death_signal`` asks the kernel to kill the worker with the thread that started it: only where that is the main
    thread of the loader's process, because a helper thread may end long before its loader does.
    """

    worker_id: int
    end: socket.socket
    job: Job | Payload | Unopened
    pool: Segment | tuple[FdParcel, int]
    loader_pid: int
    forked: bool
    death_signal: bool


def main(seat: Seat) -> None:
    """The target of the worker process."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if seat.forked:
            close_inherited(seat.end)
        watch = _watch_loader(seat)
        _yield_to_loader()
        torch._C._set_worker_signal_handlers()
        torch.multiprocessing._set_thread_name("pt_data_worker")
        # What was inherited is not garbage; letting the collector walk it would copy every page of it.
        gc.freeze()
        segment = seat.pool if isinstance(seat.pool, Segment) else Segment.attach(seat.pool[0].fd, seat.pool[1])
        assert not isinstance(seat.job, Payload), "a payload arrives unopened"
        channel = Channel(seat.end)
        with _last_words(channel):
            serve(seat.worker_id, seat.job, Inbox(channel, watch), segment)
    except (KeyboardInterrupt, Orphaned):
        pass
    finally:
        # A second Ctrl-C while the process winds up would print a traceback that helps nobody.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _last_words(channel: Channel) -> Iterator[None]:
    """Let the main process know what ends this one, if it is an exception: ``sys.exit()`` in a data set, say."""
    try:
        yield
    except Orphaned:
        raise
    except BaseException as error:
        text = f"{type(error).__qualname__}: {error}".removesuffix(": ")[:MOST_LAST_WORDS]
        with contextlib.suppress(EOFError):
            channel.send(Tag.DYING, Flag.NONE, NO_LAYOUT, 0, 0, 0, 0, text.encode(errors="replace"))
        raise


def _yield_to_loader() -> None:
    """Do not interrupt the training process when woken: it has just handed out work, and is about to go on.

    A woken process of the default policy takes the processor at once, often the very one that the waker runs on; one
    of SCHED_BATCH waits for its turn, and then gets the same share (sched(7)).
    """
    with contextlib.suppress(OSError):  # where it must not be changed, it stays as it is
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _watch_loader(seat: Seat) -> int:
    """A descriptor that becomes readable when the loader's process ends, and a net for a long fetch meanwhile."""
    try:
        watch = os.pidfd_open(seat.loader_pid)
    except ProcessLookupError:
        raise Orphaned from None
    if seat.death_signal:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != seat.loader_pid:
            raise Orphaned
    else:
        threading.Thread(target=_exit_with, args=(watch,), name="shmloader-watch", daemon=True).start()
    return watch


def _exit_with(watch: int) -> NoReturn:
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    poller.poll()
    os._exit(1)


def serve(worker_id: int, job: Job | Unopened, inbox: Inbox, segment: Segment) -> None:
    """Set up as torch sets up its workers, then answer until told to stop.

    Raises:
        Orphaned: the main process is gone.
    """
    arena = Arena(segment)
    with allocating_in(arena):
        bench = _Bench(worker_id, inbox, arena, segment)
        try:
            bench.set_up(job)
            while True:
                bench.handle(inbox.take())
        except Stopped:
            pass


class _Bench:
    """One worker at work."""

    def __init__(self, worker_id: int, inbox: Inbox, arena: Arena, segment: Segment) -> None:
        self._id = worker_id
        self._inbox = inbox
        self._arena = arena
        self._segment = segment
        self._interner = Interner()
        self._where = f"in DataLoader worker process {worker_id}"
        #: One for whole batches, or one for each half.
        self._fetchers: list[Any] = []
        self._set_up_error: ExceptionWrapper | None = None
        self._ended = False
        self._iterable = False
        self._seed_batches = False
        #: Halves, or the whole, of which a batch has been made in a slot.
        self._had_slot: set[int] = set()

    # -- setting up --------------------------------------------------------------------------------------------

    def set_up(self, job: Job | Unopened) -> None:
        """Threads, seeds, WorkerInfo, worker_init_fn, fetcher: in torch's order. What raises answers every Fill."""
        torch.set_num_threads(1)
        try:
            self._take_job(job.open() if isinstance(job, Unopened) else job)
        except Exception:
            self._set_up_error = ExceptionWrapper(where=self._where)
        self._send_for(Message(Tag.RESUME), Tag.HELLO)

    def _take_job(self, job: Job) -> None:
        self._job = job
        seed = seeding.seed_worker(job.base_seed, self._id)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=job.num_workers, seed=seed, dataset=job.dataset
        )
        self._iterable = job.dataset_kind == _DatasetKind.Iterable
        self._seed_batches = job.seed_batches
        if job.worker_init_fn is not None:
            job.worker_init_fn(self._id)
        self._make_fetchers()

    def _make_fetchers(self) -> None:
        job = self._job
        self._fetchers = [
            _DatasetKind.create_fetcher(
                job.dataset_kind, dataset, job.auto_collation, self._arena.collating(collate_fn), job.drop_last
            )
            for dataset, collate_fn in fetched_by(job.dataset, job.collate_fns)
        ]

    # -- answering ---------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Do what one message asks for."""
        match message.tag:
            case Tag.FILL:
                self._fill(message)
            case Tag.RESUME:
                self._resume()
        while self._arena.returned:
            offset, _ = self._arena.returned.popleft()
            self._send_for(message, Tag.LET_GO, offset=offset)

    def _resume(self) -> None:
        self._ended = False
        if not self._fetchers:
            return
        self._set_up_error = None  # of an earlier epoch's beginning
        try:
            self._make_fetchers()
        except Exception:
            self._set_up_error = ExceptionWrapper(where=self._where)

    def _fill(self, message: Message) -> None:
        if self._ended:
            return  # the main process voids these itself when it reads EXHAUSTED
        self._arena.open(message.offset, message.size)
        encoded = self._make(message)
        if encoded is None:
            return
        if len(encoded.skeleton) > INLINE_BYTES and not encoded.plain:
            encoded.ship_skeleton()  # an outline comes again and then is a number
        offsets = codec.place(encoded, self._arena.address, self._arena.capacity, self._arena.used)
        if offsets is not None:
            self._answer(message, encoded, offsets)
        else:
            self._ask_for_space(message, encoded)
        half = self._place(message)[1] or 0
        if message.size and half not in self._had_slot:
            # Earlier, the memory of one batch without a slot would be given back just before the next one needs it.
            self._had_slot.add(half)
            _trim_heap()

    def _make(self, message: Message) -> codec.Encoded | None:
        """Fetch, collate and take apart; the batch itself is gone when this returns."""
        failure = self._set_up_error
        data: Any = None
        try:
            if failure is None:
                data = self._fetch(message)
        except StopIteration:
            self._ended = True
        except Exception:
            failure = ExceptionWrapper(where=self._where)
        # Not inside an except clause: a live exception refers to the frames that it came through, and so to parts of
        # the batch, which would count as kept.
        if self._ended:
            self._send_for(message, Tag.EXHAUSTED, self._close_arena())
            return None
        if isinstance(data, ExceptionWrapper):
            failure = data  # one that the data set or the collate function made is raised, as by torch's loader
        if failure is None:
            try:
                return data if isinstance(data, codec.Encoded) else codec.encode(data)
            except Exception as error:
                failure = _unpicklable(error, data, self._where)
        del data
        self._fail(message, failure)
        return None

    def _place(self, message: Message) -> tuple[int, int | None]:
        """The number of the batch, and of the half if it has halves."""
        return divmod(message.batch, HALVES) if len(self._fetchers) == HALVES else (message.batch, None)

    def _fetch(self, message: Message) -> Any:
        batch, half = self._place(message)
        if self._seed_batches:
            seeding.seed_batch(self._job.base_seed, message.epoch, batch, half)
        indices = codec.unpack(message.body)
        try:
            return self._fetchers[half or 0].fetch(indices)
        except StopIteration as error:
            if self._iterable:
                raise
            # Passed on, it would end the epoch early without a word.
            text = f"the map-style data set raised StopIteration for {_shortened(indices)}"
            raise RuntimeError(text) from error

    def _ask_for_space(self, message: Message, encoded: codec.Encoded) -> None:
        arena = self._arena
        # Enough for all of it anew, and for this batch beside what its collate function took and dropped.
        beside = codec.need(encoded, arena.address, arena.used)
        self._send_for(message, Tag.NEED_SPACE, size=max(beside, codec.need(encoded)))
        grant = self._inbox.take_grant()
        if grant.flags & Flag.DROP:
            encoded.drop()
            self._send_for(message, Tag.FAILED, self._close_arena())
        elif grant.flags & Flag.NOTHING:
            self._answer_in_file(message, encoded)
        else:
            there = codec.place(encoded, self._segment.address + grant.offset, grant.size)
            assert there is not None, "the grant is as large as was asked for"
            self._answer(message, encoded, there)

    def _answer_in_file(self, message: Message, encoded: codec.Encoded) -> None:
        failure = None
        try:
            file, offsets = _in_file(encoded)
        except OSError:  # out of memory or of descriptors: this batch's error, not the worker's end
            failure = ExceptionWrapper(where=self._where)
        if failure is None:
            self._answer(message, encoded, offsets, Flag.IN_FILE, file)
        else:
            encoded.drop()
            self._fail(message, failure)

    def _answer(
        self, message: Message, encoded: codec.Encoded, offsets: list[int], flags: int = Flag.NONE, file: int = -1
    ) -> None:
        """Say that the batch is there, its regions at ``offsets``."""
        if encoded.skeleton:
            number, new = self._interner.number(encoded.key(offsets))
            offset = size = 0
        else:
            number, new = None, False
            offset, size = offsets[-1], encoded.regions[-1].nbytes
            flags |= Flag.IN_RANGE
        body = encoded.values
        if number is None or new:
            body = encoded.layout(offsets).to_bytes() + body
        # Before the arena is closed, or the batch would count as kept by its own sender.
        encoded.drop()
        flags |= self._close_arena() | (Flag.DEFINE if new else Flag.NONE)
        layout = NO_LAYOUT if number is None else number
        self._send_for(message, Tag.FILLED, flags, layout, offset=offset, size=size, body=body, fd=file)

    def _close_arena(self) -> int:
        return Flag.KEPT if self._arena.close() else Flag.NONE

    def _fail(self, message: Message, error: ExceptionWrapper) -> None:
        self._send_for(message, Tag.FAILED, self._close_arena(), body=pack_failure(error))

    def _send_for(
        self,
        message: Message,
        tag: int,
        flags: int = Flag.NONE,
        layout: int = NO_LAYOUT,
        *,
        offset: int = 0,
        size: int = 0,
        body: bytes = b"",
        fd: int = -1,
    ) -> None:
        inbox = self._inbox
        try:
            inbox.channel.send(tag, flags, layout, message.epoch, message.batch, offset, size, body, fd, inbox.spent)
        except EOFError:
            raise Orphaned from None


def _unpicklable(error: Exception, data: Any, where: str) -> ExceptionWrapper:
    """The error of a batch that cannot be sent, saying which part of it."""
    try:
        text = f"{locate(data)} cannot be sent to the main process: {error}"
        raise UnpicklableBatchError(text) from error
    except UnpicklableBatchError:
        return ExceptionWrapper(where=where)


def _trim_heap() -> None:
    """Give back what the first batches took, which were made before anybody knew how large a slot has to be.

    glibc keeps a freed block below 32 MB for the next one of its kind, which here comes from a slot (mallopt(3)).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _in_file(encoded: codec.Encoded) -> tuple[int, list[int]]:
    """The batch in an anonymous file of its own, for when the pool has no room for it."""
    nbytes = max(codec.need(encoded), 1)
    file = os.memfd_create("shmloader-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, nbytes)
        with mmap.mmap(file, nbytes, mmap.MAP_SHARED) as pages:
            offsets = codec.place(encoded, address_of(pages), nbytes)
    except BaseException:
        os.close(file)
        raise
    assert offsets is not None
    return file, offsets


def _shortened(indices: Any) -> str:
    try:
        text = f"indices {indices}"
    except Exception:  # whatever the sampler's own objects make of it
        text = f"indices of {type(indices).__name__} that cannot be printed"
    return text if len(text) < 200 else text[:200] + "…"
