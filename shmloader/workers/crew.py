"""The crew: start, feed, hear, stop, bury. It knows processes and channels, and neither slots nor batches."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.process
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any

from shmloader.errors import ProtocolError
from shmloader.memory import pool as pools
from shmloader.memory.layout import Layout
from shmloader.memory.segment import Segment
from shmloader.workers import worker as body
from shmloader.workers.channel import Channel, pair
from shmloader.workers.payload import FdParcel, Job, Payload
from shmloader.workers.protocol import NO_LAYOUT, NO_TIME, WORKER_TABLE, Flag, Message, Tag, WorkerEvent, WorkerState

#: How long workers may take to end by themselves, all together: they finish the sample that they are at.
ASK_S = 2.0
#: How long they may take after SIGTERM, all together; then SIGKILL.
INSIST_S = 1.0
#: A worker's exit code reaches its parent a little after its end is known, where another process collects it.
EXIT_CODE_S = 0.5
#: After a wait shorter than this, the next is expected to be as short: it goes to sleep only after :data:`GIVE_WAY_S`.
#: Falling asleep and being woken takes both sides longer than that, most of all on a virtual machine, while a process
#: that is merely giving way has its answer when its turn comes again. After a long wait it sleeps at once: then a
#: turn that some other process takes would be one that the batch comes late by.
BRIEF_S = 200e-6
GIVE_WAY_S = 40e-6


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as the main process sees it."""

    id: int
    process: BaseProcess
    channel: Channel
    pidfd: int
    state: WorkerState = WorkerState.STARTING
    #: Batches that it was given and has not answered.
    owes: int = 0
    #: What it has spent its time with, by its last message.
    spent: tuple[float, ...] = NO_TIME
    #: The exception that its process ends with, by its own account.
    last_words: str = ""
    #: Whether the poll object also waits for room in the channel.
    clogged: bool = False
    #: Layouts by number, as this process announced them: the numbers live as long as it does.
    layouts: dict[int, Layout] = field(default_factory=dict)

    def apply(self, event: WorkerEvent) -> None:
        """Move along the worker's table.

        Raises:
            ProtocolError: the table has no such step.
        """
        after = WORKER_TABLE.get((self.state, event))
        if after is None:
            raise ProtocolError(f"worker {self.id}: no step {event.name} from {self.state.name}")
        self.state = after

    def send(
        self,
        tag: int,
        flags: int = Flag.NONE,
        *,
        epoch: int = 0,
        batch: int = 0,
        offset: int = 0,
        size: int = 0,
        body: bytes = b"",
    ) -> None:
        """Send a message. To a worker that has just died it goes nowhere: its end is for the wait to notice."""
        try:  # noqa: SIM105 - suppress() takes a microsecond of every batch
            self.channel.send(tag, flags, NO_LAYOUT, epoch, batch, offset, size, body)
        except EOFError:
            pass

    def epitaph(self) -> str:
        """How the process ended: in torch's words, and in its own."""
        return self._end() + (f" It ended with {self.last_words}." if self.last_words else "")

    def _end(self) -> str:
        pid, code = self.process.pid, _exit_code(self.process)
        if code is None:
            return f"DataLoader worker (pid {pid}) exited unexpectedly; its exit code was collected by somebody else"
        if code < 0:
            return f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}. "
        return (
            f"DataLoader worker (pid {pid}) exited unexpectedly with exit code {code}. Details are lost due to "
            "multiprocessing. Rerunning with num_workers=0 may give better error trace."
        )


#: What :meth:`Crew.read` returns: a worker and its message, or None for its unexpected end.
Heard = tuple[Worker, Message | None]


#: Crews with workers. Held here: where the garbage collector finds a crew together with its iterator, it would close
#: the sockets and sentinels first, and then call the iterator's finalizer, which needs them.
_at_work: set[Crew] = set()


class Crew:
    """The workers of one iterator.

    Args:
        context: a multiprocessing context, or module, with ``Process``.
        segment: the pool's mapping.
    """

    def __init__(self, context: Any, segment: Segment) -> None:
        self.workers: list[Worker] = []
        self._by_fd: dict[int, Worker] = {}
        # A poll object lives in this process only: a forked child has nothing of it, and can undo nothing in it.
        self._poller = select.poll()
        self._context = context
        self._segment = segment
        self._pid = os.getpid()
        #: Whether the last wait was a brief one.
        self._brief = False

    # -- starting ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Start the workers, all with this job. If that fails, those that did start are left to :meth:`stop`."""
        _at_work.add(self)
        method = self._context.get_start_method()
        if method == "forkserver":
            _preload(job)
        worker_ids = range(job.num_workers)  # out here: that a float is no count has nothing to do with pickling
        with _explained(), _sigint_blocked():
            payload = job if method == "fork" else Payload(job)
            try:
                for worker_id in worker_ids:
                    self._start_one(worker_id, payload, method)
            finally:
                if isinstance(payload, Payload):
                    payload.close()

    def _start_one(self, worker_id: int, payload: Job | Payload, method: str) -> None:
        channel, there = pair()
        token: Any = channel
        process = None
        try:
            seat = self._seat(worker_id, there, payload, method)
            process = self._context.Process(target=body.main, args=(seat,), daemon=True)
            with pools.forking(token):
                process.start()
            # Out of multiprocessing's table: it ends every daemonic process in it when *any* process that has a copy
            # of the table exits, such as a child of a plain os.fork(). Our own exit hook stops the workers instead.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
            worker = Worker(worker_id, process, channel, _pidfd(process))
        except BaseException:
            channel.close()
            if process is not None and process.pid is not None:
                process.kill()
                process.join()
            pools.gone(token)
            raise
        finally:
            there.close()
        self.workers.append(worker)
        self._enlist(worker)

    def _seat(self, worker_id: int, there: socket.socket, payload: Job | Payload, method: str) -> body.Seat:
        segment, forked = self._segment, method == "fork"
        return body.Seat(
            worker_id=worker_id,
            end=there,
            job=payload,
            pool=segment if forked else (FdParcel(segment.fd), segment.nbytes),
            loader_pid=self._pid,
            forked=forked,
            death_signal=method != "forkserver" and threading.current_thread() is threading.main_thread(),
        )

    # -- hearing -----------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait until a worker has said something, has ended, or takes what is queued for it.

        It changes nothing, so an exception from a signal handler may cut it short at any point.
        """
        for worker in self.workers:
            if worker.channel.backlog or worker.clogged:
                self._attend(worker)
        ready = self._poller.poll(0)
        if ready or timeout_s == 0:
            return ready
        started = time.perf_counter()
        if self._brief:
            ready = self._give_way(started)
        if not ready:
            ready = self._poller.poll(None if timeout_s is None else timeout_s * 1000)
        self._brief = time.perf_counter() - started < BRIEF_S
        return ready

    def _give_way(self, started: float) -> list[tuple[int, int]]:
        """Look a few times more, letting whoever waits for this core run in between, which may be a worker."""
        ready: list[tuple[int, int]] = []
        while not ready and time.perf_counter() - started < GIVE_WAY_S:
            os.sched_yield()
            ready = self._poller.poll(0)
        return ready

    def descriptors(self) -> list[tuple[int, int]]:
        """What to poll, and for which events, to know when :meth:`wait` would return."""
        found = []
        for worker in self._alive():
            found.append((worker.pidfd, select.POLLIN))
            if worker.channel.fileno() >= 0:
                room = select.POLLOUT if worker.channel.backlog else 0
                found.append((worker.channel.fileno(), select.POLLIN | room))
        return found

    def _enlist(self, worker: Worker) -> None:
        self._by_fd[worker.pidfd] = worker
        self._poller.register(worker.pidfd, select.POLLIN)
        if worker.channel.fileno() >= 0:
            self._by_fd[worker.channel.fileno()] = worker
        self._attend(worker)

    def _attend(self, worker: Worker) -> None:
        """Poll a worker's channel: for what it says, and for room where something waits to be sent to it."""
        if worker.channel.fileno() >= 0:
            worker.clogged = worker.channel.backlog
            self._poller.register(worker.channel.fileno(), select.POLLIN | (select.POLLOUT if worker.clogged else 0))

    def _close_channel(self, worker: Worker) -> None:
        self._forget(worker.channel.fileno())
        worker.channel.close()

    def _forget(self, fd: int) -> None:
        """Out of the poll object before it is closed: the number will be another file's. Idempotent, unlike both."""
        if fd >= 0:
            with contextlib.suppress(KeyError):
                self._poller.unregister(fd)
            self._by_fd.pop(fd, None)

    def read(self, ready: list[tuple[int, int]]) -> list[Heard]:
        """The next that each of these has said, and which have ended though nobody told them to.

        An end comes after everything that the worker had said: its exit is confirmed and its channel was read until
        it would block.
        """
        heard: list[Heard] = []
        ended = []
        for fd, events in ready:
            worker = self._by_fd[fd]
            if fd == worker.pidfd:
                ended.append(worker)
                continue
            if events & select.POLLOUT:
                with contextlib.suppress(EOFError):
                    worker.channel.flush()
            message = self._receive(worker)
            if message is not None:
                heard.append((worker, message))
        for worker in ended:
            heard.extend(self.drain(worker))
            expected = worker.state is WorkerState.STOPPING
            self._bury(worker)
            if not expected:
                heard.append((worker, None))
        return heard

    def drain(self, worker: Worker) -> Iterator[Heard]:
        """What ``worker`` has said, without waiting."""
        while (message := self._receive(worker)) is not None:
            yield worker, message

    def _receive(self, worker: Worker) -> Message | None:
        """The next message but Hello and Dying, which concern only the crew; None if there is none now."""
        channel = worker.channel
        try:
            while channel.fileno() >= 0 and (message := channel.receive()) is not None:
                if message.tag == Tag.DYING:
                    worker.last_words = message.body.decode()
                    continue
                if message.tag != Tag.HELLO:
                    return message
                worker.apply(WorkerEvent.HELLO)
                worker.spent = message[7:10]  # starting is no work on batches
        except EOFError:
            # The process is ending; only its pidfd says when it has, and until then this end would always be ready.
            self._close_channel(worker)
        return None

    # -- ending ------------------------------------------------------------------------------------------------

    def dismiss(self, worker: Worker) -> None:
        """Tell one worker to end; :meth:`stop` sees to it that it does."""
        if worker.state is not WorkerState.GONE:
            worker.apply(WorkerEvent.STOP)
            worker.send(Tag.STOP)

    def stop(self) -> None:
        """Ask, insist, kill; each with a bound. Afterwards no process and no descriptor is left.

        Idempotent; if an exception cuts it short, the next call goes on.
        """
        if self._pid != os.getpid():
            return
        for worker in self._alive():
            # Again: an exception may have come between.
            self._enlist(worker)
            self.dismiss(worker)
        if not self._all_end(ASK_S):
            for worker in self._alive():
                worker.process.terminate()
            if not self._all_end(INSIST_S):
                for worker in self._alive():
                    worker.process.kill()
                self._all_end(None)
        _at_work.discard(self)

    def dismiss_all(self) -> None:
        """Tell the workers to end, without waiting for it; :meth:`stop` sees to it that they do."""
        for worker in self._alive():
            self.dismiss(worker)

    def unended(self) -> list[int]:
        """Descriptors that will be readable when processes that still run have ended."""
        poller = select.poll()
        fds = [worker.pidfd for worker in self._alive()]
        for fd in fds:
            poller.register(fd, select.POLLIN)
        ended = {fd for fd, _ in poller.poll(0)}
        return [fd for fd in fds if fd not in ended]

    def pids(self) -> list[int]:
        """Process ids of the workers that are not known to have ended."""
        return [pid for worker in tuple(self.workers) if worker.channel.fileno() >= 0 and (pid := worker.process.pid)]

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.state is not WorkerState.GONE]

    def _all_end(self, within_s: float | None) -> bool:
        deadline = None if within_s is None else time.monotonic() + within_s
        while self._alive():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            close_files(self.read(self.wait(left)))
        return True

    def _bury(self, worker: Worker) -> None:
        """The exit is confirmed: reap it, and close what led to it."""
        self._close_channel(worker)
        pools.gone(worker.channel)
        _exit_code(worker.process)
        self._forget(worker.pidfd)
        worker.apply(WorkerEvent.EXIT)
        os.close(worker.pidfd)

    def disown(self) -> None:
        """In a forked child, whose parent keeps the workers: close the inherited ends, end nobody."""
        for worker in self.workers:
            worker.channel.close()


def close_files(heard: Iterable[Heard]) -> None:
    """Nobody will read these messages: close the files that came with them."""
    for _, message in heard:
        if message is not None and message.fd >= 0:
            os.close(message.fd)


def _exit_code(process: BaseProcess) -> int | None:
    """The exit code of a process that has ended; None if somebody else collected it."""
    if process.exitcode is None:
        process.join(EXIT_CODE_S)
    return process.exitcode


def _pidfd(process: BaseProcess) -> int:
    """A descriptor that is readable once the process has ended, whoever else holds its pipes."""
    assert process.pid is not None
    try:
        return os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        # It has ended already and was collected, or the kernel is older than 5.3: the sentinel knows.
        return os.dup(process.sentinel)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Add torch's hint to a pickling error: the error alone does not say what was being pickled."""
    try:
        yield
    except (TypeError, AttributeError, PicklingError):
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. This might be because the worker Process "
            "arguments are not picklable. Python 3.14+ changed the multiprocessing start method in non-Mac POSIX "
            "platforms to 'forkserver', which requires the worker Process arguments to be picklable. You can also try "
            "multiprocessing.set_start_method('fork').",
            stacklevel=2,
        )
        raise


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Children start with SIGINT blocked and unblock it where they can end quietly."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _preload(job: Job) -> None:
    """Let the fork server import what workers need, unless the user has said what it shall import.

    A worker then starts in milliseconds and shares the imported pages; without effect once the server runs.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        server.set_forkserver_preload(["__main__", "torch", body.__name__, *_modules(job)])


def _modules(job: Job) -> Iterable[str]:
    parts = (type(job.dataset), *job.collate_fns, job.worker_init_fn)
    names = dict.fromkeys(getattr(part, "__module__", None) for part in parts if part is not None)
    return [name for name in names if name and name != "__main__"]
