"""The death of the main process, and the end of a thread in it: workers end with the one, not with the other."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.faulty import Faults, Sleepy, SoundSleeper
from tests.loaders import COUNT, loader, numbers, pids
from tests.programs import (
    Forked,
    Teller,
    alive,
    all_gone,
)

#: Workers of a process that was killed are gone within this.
GONE_S = 2.0


def idle(method: str) -> Any:
    """Workers that have done everything that they were given."""
    iterator = iter(loader(multiprocessing_context=method, persistent_workers=True))
    next(iterator)
    while any(not task.answered for task in iterator._pump.tasks.values()):
        iterator._serve_needs()
        iterator._hear()
    iterator._settle()
    return iterator


def fetching(method: str) -> Any:
    """Workers in a fetch that lasts an hour."""
    dataset = SoundSleeper() if method == "fork" else Sleepy(at=0)
    iterator = iter(loader(dataset, batch_size=1, num_workers=1, multiprocessing_context=method))
    if isinstance(dataset, SoundSleeper):
        dataset.hear()
    else:
        while iterator._crew.workers[0].state.name != "SERVING":
            iterator._crew.read(iterator._crew.wait(10))
    return iterator


def sending(method: str) -> Any:
    """Workers with more answers than find room."""
    iterator = iter(loader(Faults(200, 300_000), prefetch_factor=50, multiprocessing_context=method))
    with contextlib.suppress(ValueError):
        next(iterator)
    return iterator


def starting(method: str) -> Any:
    """Workers that are only just being started."""
    return iter(loader(multiprocessing_context=method))


def lonely(method: str) -> Any:
    """Workers that a helper thread started, which has ended since."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(idle(method)))
    thread.start()
    thread.join()
    assert numbers(made[0]) == list(range(1, COUNT))
    return made[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "situations"),
    [
        *(("fork", [situation]) for situation in (idle, fetching, sending, starting, lonely)),
        ("forkserver", [idle, fetching, lonely]),  # in one process: its fork server imports torch for seconds
        ("spawn", [fetching, lonely]),
    ],
)
def test_workers_die_with_the_main_process(method: str, situations: list[Callable[[str], Any]]) -> None:
    def main(teller: Teller) -> None:
        iterators = [situation(method) for situation in situations]
        teller.tell([pid for iterator in iterators for pid in pids(iterator)])
        signal.pause()

    with Forked(main) as child:
        workers = child.hear()
        assert all(map(alive, workers))
        child.kill()
        assert all_gone(workers, GONE_S)


@pytest.mark.slow
def test_workers_die_with_the_main_process_though_a_child_of_it_lives() -> None:
    """The child has copies of every descriptor, so no channel and no pipe ever comes to its end."""

    def main(teller: Teller) -> None:
        iterator = lonely("fork")
        bystander = os.fork()
        if bystander == 0:
            signal.pause()
        teller.tell((pids(iterator), bystander))
        signal.pause()

    with Forked(main) as child:
        workers, bystander = child.hear()
        child.kill()
        assert all_gone(workers, GONE_S)
        assert alive(bystander)


def test_workers_survive_the_end_of_the_thread_that_made_the_loader() -> None:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(iter(loader())))
    thread.start()
    thread.join()
    assert numbers(made[0]) == list(range(COUNT))
