"""The crew: real processes, started, heard and ended; no slots and no batches."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.process
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _DatasetKind

from shmloader.errors import ProtocolError
from shmloader.memory import codec
from shmloader.memory.segment import Segment
from shmloader.workers import crew as crews
from shmloader.workers.crew import Crew
from shmloader.workers.payload import Job
from shmloader.workers.protocol import Message, Tag, WorkerEvent, WorkerState
from tests.faulty import Numbers, Parent, SoundSleeper, Trap, Unpicklable
from tests.programs import alive, all_gone, descriptors, within

#: A range for every fill of a worker; the tests never have two workers write at once.
RANGE = (0, 1 << 16)
PATIENCE_S = 10.0


@pytest.fixture
def hire() -> Iterator[Callable[..., Crew]]:
    """Makes crews that are stopped in the end."""
    made: list[Crew] = []

    def make(dataset: Any, workers: int = 1, method: str = "fork", start: bool = True, **options: Any) -> Crew:
        segment = Segment(1 << 20, lambda: 1 << 40)
        segment.reserve(0, 1 << 20)
        crew = Crew(multiprocessing.get_context(method), segment)
        made.append(crew)
        if start:
            crew.start(job(dataset, workers, **options))
        return crew

    yield make
    while made:  # and keep none of them: pytest would keep them beyond the look at what is left behind
        made.pop().stop()


def job(dataset: Any, workers: int = 1, worker_init_fn: Callable[[int], None] | None = None) -> Job:
    """A job like a loader's."""
    return Job(
        dataset_kind=_DatasetKind.Map,
        dataset=dataset,
        auto_collation=True,
        collate_fns=(default_collate,),
        drop_last=False,
        worker_init_fn=worker_init_fn,
        base_seed=0,
        num_workers=workers,
        seed_batches=False,
    )


def order(crew: Crew, worker: int, batch: int, indices: list[int]) -> None:
    """A Fill."""
    body = codec.pack(indices)
    crew.workers[worker].send(Tag.FILL, batch=batch, offset=RANGE[0], size=RANGE[1], body=body)


def hear(crew: Crew, count: int) -> list[tuple[int, Message | None]]:
    """The next ``count`` things heard: worker and message, or None for its end."""
    heard: list[tuple[int, Message | None]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(heard) < count:
        assert time.monotonic() < deadline, f"heard only {heard}"
        heard += [(worker.id, message) for worker, message in crew.read(crew.wait(PATIENCE_S))]
    return heard


def until(crew: Crew, state: WorkerState) -> None:
    """Pump until every worker is in a state."""
    deadline = time.monotonic() + PATIENCE_S
    while any(worker.state is not state for worker in crew.workers):
        assert time.monotonic() < deadline
        assert not crew.read(crew.wait(PATIENCE_S))


def pids(crew: Crew) -> list[int]:
    """The workers' processes."""
    return [worker.process.pid or 0 for worker in crew.workers]


# -- starting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_say_hello_and_then_serve(hire: Callable[..., Crew], method: str) -> None:
    crew = hire(Numbers(), 3, method)
    assert [worker.state for worker in crew.workers] == [WorkerState.STARTING] * 3
    until(crew, WorkerState.SERVING)
    assert all(map(alive, pids(crew)))


def test_no_worker_stays_in_multiprocessings_table(hire: Callable[..., Crew]) -> None:
    """Or any process with a copy of the table would end them at its own exit."""
    before = set(multiprocessing.process._children)  # type: ignore[attr-defined]
    hire(Numbers(), 2)
    assert set(multiprocessing.process._children) == before  # type: ignore[attr-defined]


def test_a_worker_costs_four_descriptors(hire: Callable[..., Crew]) -> None:
    """Its channel, the one that watches the process, and multiprocessing's two."""
    crew = hire(Numbers(), start=False)
    before = descriptors()
    crew.start(job(Numbers(), 4))
    until(crew, WorkerState.SERVING)
    assert descriptors() - before <= 4 * 4


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_start_that_fails_half_way_leaves_nothing(
    hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """No descriptor is left for the one that watches the process, which has started already."""
    crew = hire(Numbers(), start=False)
    before = descriptors()
    started: list[int] = []

    def watch(process: Any) -> int:
        started.append(process.pid)
        if len(started) > failing:
            raise OSError(errno.EMFILE, "too many open files")
        return os.pidfd_open(process.pid)

    monkeypatch.setattr(crews, "_pidfd", watch)
    with pytest.raises(OSError, match="too many open files"):
        crew.start(job(Numbers(), 3))
    assert not alive(started[-1])
    crew.stop()
    assert all_gone(started, 0)
    crew.workers.clear()
    assert descriptors() == before


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_job_that_cannot_be_pickled_warns_in_torchs_words_and_leaves_nothing(
    hire: Callable[..., Crew], method: str
) -> None:
    crew = hire(Numbers(), method=method, start=False)
    before = descriptors()
    with (
        pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker Process"),
        pytest.raises((AttributeError, TypeError)),
    ):
        crew.start(job(Unpicklable()))
    crew.stop()
    assert descriptors() == before


def test_a_ctrl_c_while_workers_start_leaves_nothing(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers(), start=False)
    before = descriptors()
    started = []

    class Process(multiprocessing.get_context("fork").Process):  # type: ignore[misc, name-defined]
        """Its third start is followed by Ctrl-C at once."""

        def start(self) -> None:
            super().start()
            started.append(self.pid)
            if len(started) == 3:
                raise KeyboardInterrupt

    class Context:
        """fork's, with that process."""

        get_start_method = staticmethod(lambda: "fork")

    Context.Process = Process  # type: ignore[attr-defined]
    crew._context = Context
    with pytest.raises(KeyboardInterrupt):
        crew.start(job(Numbers(), 4))
    crew.stop()
    assert len(started) == 3
    assert all_gone(started, 0)
    crew.workers.clear()
    assert descriptors() == before


# -- hearing ------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_fills(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers())
    for batch in range(5):
        order(crew, 0, batch, [batch])
    heard = hear(crew, 5)
    assert [message.batch for _, message in heard if message is not None] == list(range(5))


def test_after_a_brief_wait_the_next_gives_way_before_it_sleeps(
    hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = hire(Numbers(8))
    until(crew, WorkerState.SERVING)
    turns: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: turns.append(None))
    monkeypatch.setattr(crews, "GIVE_WAY_S", 1e-3)

    monkeypatch.setattr(crews, "BRIEF_S", 0.0)
    assert crew.wait(0.002) == []  # whatever came before, it counts as long
    turns.clear()
    assert crew.wait(0.002) == []
    assert not turns

    monkeypatch.setattr(crews, "BRIEF_S", PATIENCE_S)
    assert crew.wait(0.002) == []  # not brief before, but brief now
    assert not turns
    assert crew.wait(0.0) == []  # who does not want to wait does not give way either
    assert not turns
    assert crew.wait(0.002) == []
    assert turns


def test_what_comes_while_it_gives_way_is_heard(hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    crew = hire(Numbers(8))
    until(crew, WorkerState.SERVING)
    channel = crew.workers[0].channel
    monkeypatch.setattr(os, "sched_yield", lambda: select.select([channel], [], [], PATIENCE_S))
    monkeypatch.setattr(crews, "BRIEF_S", PATIENCE_S)
    crew.wait(0.001)
    order(crew, 0, 5, [1])
    [(_, message)] = crew.read(crew.wait(None))
    assert message is not None
    assert (message.tag, message.batch) == (Tag.FILLED, 5)


def test_what_a_worker_had_said_is_heard_before_its_end(hire: Callable[..., Crew]) -> None:
    crew = hire(Trap("os._exit(7)", "fetch", at=3))
    for batch in range(5):
        order(crew, 0, batch, [batch])
    all_gone(pids(crew), PATIENCE_S)  # all answers, its end and unread fills lie there at once
    heard = [message and message.batch for _, message in hear(crew, 4)]
    assert heard == [0, 1, 2, None]
    assert crew.workers[0].state is WorkerState.GONE
    assert "exit code 7" in crew.workers[0].epitaph()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (signal.SIGKILL, "is killed by signal: Killed"),
        (signal.SIGSEGV, "is killed by signal: Segmentation fault"),
    ],
)
def test_the_epitaph_names_the_signal(hire: Callable[..., Crew], end: signal.Signals, words: str) -> None:
    crew = hire(Numbers())
    until(crew, WorkerState.SERVING)
    os.kill(pids(crew)[0], end)
    assert hear(crew, 1) == [(0, None)]
    assert crew.workers[0].epitaph().startswith(f"DataLoader worker (pid {pids(crew)[0]}) {words}")


def test_an_exit_code_that_somebody_else_collected_is_said_to_be_unknown(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers())
    until(crew, WorkerState.SERVING)
    os.kill(pids(crew)[0], signal.SIGKILL)
    os.waitpid(pids(crew)[0], 0)
    assert hear(crew, 1) == [(0, None)]
    assert "exit code was collected by somebody else" in crew.workers[0].epitaph()


def test_sending_to_a_worker_that_has_just_died_goes_nowhere(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers())
    until(crew, WorkerState.SERVING)
    os.kill(pids(crew)[0], signal.SIGKILL)
    all_gone(pids(crew), PATIENCE_S)
    order(crew, 0, 0, [0])  # before its end is heard
    assert hear(crew, 1) == [(0, None)]
    order(crew, 0, 1, [0])  # and after


def test_sending_between_the_end_of_the_channel_and_the_end_of_the_process(hire: Callable[..., Crew]) -> None:
    """The process is ending, and only its channel's end has been read."""
    crew = hire(Numbers())
    until(crew, WorkerState.SERVING)
    os.kill(pids(crew)[0], signal.SIGKILL)
    all_gone(pids(crew), PATIENCE_S)
    channel = crew.workers[0].channel.fileno()
    assert crew.read([entry for entry in crew.wait(0) if entry[0] == channel]) == []
    assert crew.workers[0].state is WorkerState.SERVING
    order(crew, 0, 0, [0])
    assert hear(crew, 1) == [(0, None)]


def test_a_grandchild_that_holds_everything_open_does_not_delay_the_notice(hire: Callable[..., Crew]) -> None:
    parent = Parent()
    crew = hire(parent)
    order(crew, 0, 0, [0])
    ((_, message),) = hear(crew, 1)
    assert message is not None
    grandchild = parent.hear()
    os.kill(pids(crew)[0], signal.SIGKILL)
    with within(2.0):
        assert hear(crew, 1) == [(0, None)]
    assert alive(grandchild)
    os.kill(grandchild, signal.SIGKILL)


def test_a_fork_of_our_own_does_not_confuse_the_poll_object(hire: Callable[..., Crew]) -> None:
    """A child closes what it inherits; with epoll that would take the parent's registrations along."""
    crew = hire(Numbers())
    until(crew, WorkerState.SERVING)
    child = os.fork()
    if child == 0:
        crew.disown()
        crew.stop()
        os._exit(0)
    os.waitpid(child, 0)
    order(crew, 0, 0, [0])
    ((_, message),) = hear(crew, 1)
    assert message is not None
    assert message.tag == Tag.FILLED


def test_a_number_that_is_used_again_is_nobodys_answer(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers(), 2)
    until(crew, WorkerState.SERVING)
    channel = crew.workers[0].channel.fileno()
    os.kill(pids(crew)[0], signal.SIGKILL)
    assert hear(crew, 1) == [(0, None)]
    one, other = socket.socketpair()
    assert channel in (one.fileno(), other.fileno())
    one.send(b"x")
    other.send(b"x")
    assert crew.wait(0) == []
    order(crew, 1, 0, [0])
    assert [worker for worker, _ in hear(crew, 1)] == [1]
    one.close()
    other.close()


# -- ending -------------------------------------------------------------------------------------------------------


def test_stopping_leaves_no_process_and_no_descriptor_and_may_be_repeated(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers(), start=False)
    before = descriptors()
    crew.start(job(Numbers(), 3))
    started = pids(crew)
    crew.stop()
    crew.stop()
    assert all_gone(started, 0)
    assert all(worker.process.exitcode == 0 for worker in crew.workers)
    crew.workers.clear()
    assert descriptors() == before


def test_workers_that_have_not_even_started_are_stopped(hire: Callable[..., Crew]) -> None:
    with within(2.0):
        crew = hire(Numbers(), 4)
        crew.stop()
    assert all_gone(pids(crew), 0)


def test_an_expected_end_is_not_reported(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers(), 2)
    until(crew, WorkerState.SERVING)
    crew.dismiss(crew.workers[0])
    deadline = time.monotonic() + PATIENCE_S
    while crew.workers[0].state is not WorkerState.GONE:
        assert time.monotonic() < deadline
        assert crew.read(crew.wait(PATIENCE_S)) == []
    assert crew.workers[1].state is WorkerState.SERVING


def test_a_worker_that_is_busy_is_asked_then_terminated(
    hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews, "ASK_S", 0.05)
    sleeper = SoundSleeper()
    crew = hire(sleeper)
    order(crew, 0, 0, [0])
    sleeper.hear()
    with within(2.0):
        crew.stop()
    assert all_gone(pids(crew), 0)


def test_a_worker_that_ignores_sigterm_is_killed(hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "ASK_S", 0.05)
    monkeypatch.setattr(crews, "INSIST_S", 0.05)
    sleeper = SoundSleeper()
    crew = hire(sleeper, worker_init_fn=ignore_sigterm)
    order(crew, 0, 0, [0])
    sleeper.hear()
    with within(2.0):
        crew.stop()
    assert crew.workers[0].process.exitcode == -signal.SIGKILL


def ignore_sigterm(worker_id: int) -> None:
    """worker_init_fn."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def test_a_stop_that_was_interrupted_is_finished_by_the_next(
    hire: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = hire(Numbers(), 2)
    started = pids(crew)

    def interrupt(timeout_s: float | None) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(crew, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            crew.stop()
    crew.stop()
    assert all_gone(started, 0)
    assert all(worker.state is WorkerState.GONE for worker in crew.workers)


def test_files_that_nobody_will_read_are_closed(hire: Callable[..., Crew]) -> None:
    before = descriptors()
    file = os.memfd_create("batch")
    crews.close_files([(None, Message(Tag.FILLED, fd=file)), (None, None), (None, Message(Tag.FILLED))])  # type: ignore[list-item]
    assert descriptors() == before


def test_a_forked_child_ends_nobody(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers(), 2)
    until(crew, WorkerState.SERVING)
    child = os.fork()
    if child == 0:
        crew.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert all(map(alive, pids(crew)))


def test_a_step_that_the_table_lacks_is_refused(hire: Callable[..., Crew]) -> None:
    crew = hire(Numbers())
    crew.stop()
    with pytest.raises(ProtocolError, match="worker 0: no step HELLO from GONE"):
        crew.workers[0].apply(WorkerEvent.HELLO)


# -- threads ------------------------------------------------------------------------------------------------------


def test_workers_outlive_the_thread_that_started_them(hire: Callable[..., Crew]) -> None:
    """With a death signal for the starting thread they would not."""
    made: list[Crew] = []
    thread = threading.Thread(target=lambda: made.append(hire(Numbers(), 2)))
    thread.start()
    thread.join()
    until(made[0], WorkerState.SERVING)
    order(made[0], 1, 0, [3])
    ((worker, message),) = hear(made[0], 1)
    assert worker == 1
    assert message is not None
