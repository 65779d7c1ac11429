"""Ways to go wrong x stages of a batch x start methods: the right error at once, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any

import pytest
import torch

from shmloader import DataLoader, WorkerDiedError
from shmloader.iterator import ShmIter
from shmloader.workers import crew as crews
from tests.faulty import STAGES, WAYS, Faults, Numbers, Sleepy, Trap
from tests.programs import all_gone, within

#: A death is told within a second; the bound is wide because test machines are busy.
PROMPTLY_S = 3.0
BATCH = 2

#: Starting workers by these methods takes seconds, so they get a sample of the matrix, and spawn the death alone that
#: its workers' being nobody else's children might hide.
SAMPLE = [
    ("spawn", "SIGKILL", "fetch"),
    ("forkserver", "raise", "start"),
    ("forkserver", "raise", "collate"),
    ("forkserver", "sys.exit(0)", "fetch"),
    ("forkserver", "sys.exit(3)", "start"),
    ("forkserver", "os._exit(7)", "holding"),
    ("forkserver", "SIGKILL", "holding"),
    ("forkserver", "SIGSEGV", "collate"),
]
MATRIX = [("fork", *case) for case in itertools.product(WAYS, STAGES)] + SAMPLE


def next_fails(iterator: Any) -> BaseException:
    """The error of the first next() that fails, which must come promptly."""
    while True:
        with within(PROMPTLY_S):
            try:
                next(iterator)
            except Exception as error:
                return error.with_traceback(None)  # which would keep the iterator


def take(loader: Any) -> tuple[list[Any], BaseException | None]:
    """What comes before the first error, and the error."""
    taken = []
    try:
        for batch in loader:
            taken.append(batch)  # noqa: PERF402 - the error must not lose what came before it
    except Exception as error:
        return taken, error.with_traceback(None)
    return taken, None


def values(loader: Any) -> list[int]:
    """First number of every item."""
    return [int(row[0]) for batch in loader for row in batch]


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(("method", "way", "stage"), MATRIX)
def test_a_fault_is_told_at_once_and_leaves_a_usable_loader(method: str, way: str, stage: str) -> None:
    trap = Trap(way, stage)
    workers = 1 if method == "spawn" else 2
    loader = DataLoader(trap, BATCH, num_workers=workers, multiprocessing_context=method, **trap.hooks())
    iterator = iter(loader)
    if method != "fork":
        # Under these methods the first batch waits for imports, which are no part of what is timed below.
        iterator._crew.wait(60)
    error = next_fails(iterator)
    if way == "raise":
        assert type(error) is ValueError
        assert "Original Traceback (most recent call last):" in str(error)
        assert "a broken sample" in str(error)
    else:
        assert type(error) is WorkerDiedError
        assert str(error).startswith("DataLoader worker (pid ")
        with pytest.raises(WorkerDiedError, match="DataLoader worker"), within(PROMPTLY_S):
            next(iterator)
        assert not any(process.is_alive() for process in iterator._workers)
    assert WAYS[way] in str(error)
    del iterator
    trap.armed = False
    if method != "spawn":  # whose next worker would import torch for seconds, to do what the others show
        assert values(loader) == list(range(40))


@pytest.mark.parametrize("stage", ["fetch", "collate", "holding"])
def test_iteration_goes_on_after_an_error_of_the_data(stage: str) -> None:
    trap = Trap("raise", stage)
    iterator = iter(DataLoader(trap, BATCH, num_workers=2, **trap.hooks()))
    seen, errors = [], 0
    while True:
        try:
            seen.append(next(iterator)[0, 0].item())
        except ValueError:
            errors += 1
        except StopIteration:
            break
    assert errors == 1
    assert seen == [index for index in range(0, 40, BATCH) if index != 20]
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_says_which_samples_it_came_from() -> None:
    trap = Trap("raise", "fetch")
    with pytest.raises(ValueError, match="a broken sample") as caught:
        list(DataLoader(trap, BATCH, num_workers=1))
    if hasattr(caught.value, "__notes__"):
        assert "batch 10, indices [20, 21]" in caught.value.__notes__[0]


def test_a_death_says_which_samples_it_came_from() -> None:
    trap = Trap("os._exit(7)", "fetch")
    with pytest.raises(WorkerDiedError, match=r"batch 10, indices \[20, 21\]"):
        list(DataLoader(trap, BATCH, num_workers=1))


def test_a_death_by_an_exception_says_the_exit_code_and_the_exception() -> None:
    trap = Trap("sys.exit(3)", "fetch")
    with pytest.raises(WorkerDiedError, match=r"with exit code 3\..* It ended with SystemExit: 3\."):
        list(DataLoader(trap, BATCH, num_workers=1))


def test_a_failing_start_answers_every_batch_with_its_error() -> None:
    trap = Trap("raise", "start", length=6)
    iterator = iter(DataLoader(trap, BATCH, num_workers=2, **trap.hooks()))
    for _ in range(3):
        with pytest.raises(ValueError, match="a broken sample"):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_caught_error_does_not_keep_the_iterator_alive() -> None:
    trap = Trap("raise", "fetch", at=0)
    iterator = iter(DataLoader(trap, BATCH, num_workers=1))
    pids = [process.pid for process in iterator._workers]
    with contextlib.suppress(ValueError):
        next(iterator)
    del iterator
    assert all_gone(pids, 0)


def test_batches_that_were_ready_before_a_death_are_not_mixed_up_with_it() -> None:
    """The worker dies with the answers of earlier batches sent: none of them is wrong, and then comes the error."""
    trap = Trap("os._exit(7)", "fetch", at=6)
    taken, error = take(DataLoader(trap, 1, num_workers=1, prefetch_factor=10))
    assert type(error) is WorkerDiedError
    assert [int(batch[0, 0]) for batch in taken] == list(range(len(taken)))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_killed_from_outside_while_idle_is_noticed(persistent: bool) -> None:
    loader = DataLoader(Numbers(), BATCH, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    error = next_fails(iterator)
    assert type(error) is WorkerDiedError
    assert "killed by signal: Killed" in str(error)
    assert values(loader) == list(range(40))
    loader.close()


def test_held_batches_survive_a_death() -> None:
    trap = Trap("SIGKILL", "holding")
    held, error = take(DataLoader(trap, BATCH, num_workers=2, **trap.hooks()))
    assert type(error) is WorkerDiedError
    assert len(held) == 10
    for number, batch in enumerate(held):
        assert batch.tolist() == [[2 * number] * 8, [2 * number + 1] * 8]


@pytest.mark.slow
def test_a_death_during_a_long_fetch_of_another_worker_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "ASK_S", 0.05)  # how long the other is waited for before it is terminated
    iterator = iter(DataLoader(Sleepy(at=0), 1, num_workers=2))
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    assert "killed by signal" in str(next_fails(iterator))


@pytest.mark.slow
def test_external_termination_and_repeated_shutdown_are_harmless() -> None:
    """What Ultralytics does to the workers of an iterator."""
    iterator = iter(DataLoader(Numbers(), BATCH, num_workers=2, persistent_workers=True))
    next(iterator)
    for process in iterator._workers:
        process.terminate()
    with within(PROMPTLY_S):
        iterator._shutdown_workers()
        iterator._shutdown_workers()
        iterator.__del__()
    assert not any(process.is_alive() for process in iterator._workers)


def test_termination_by_the_main_process_is_a_death_like_any_other() -> None:
    iterator = iter(DataLoader(Numbers(), BATCH, num_workers=1))
    iterator._workers[0].terminate()
    assert type(next_fails(iterator)) is WorkerDiedError


def test_an_error_with_a_message_of_300_kb_arrives_whole() -> None:
    loader = DataLoader(Faults(4, 300_000), 1, num_workers=2)
    iterator = iter(loader)
    for index in range(4):
        with pytest.raises(ValueError, match="Caught ValueError") as caught:
            next(iterator)
        assert f"{index}:" + "x" * 300_000 in str(caught.value)


def test_stop_iteration_of_a_map_style_data_set_is_an_error_and_not_an_end() -> None:
    with pytest.raises(RuntimeError, match="raised StopIteration for indices"):
        list(DataLoader(Ending(), BATCH, num_workers=1))


class Ending(Numbers):
    """Raises StopIteration halfway."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20:
            raise StopIteration
        return super().__getitem__(index)


def test_a_worker_of_a_dead_iterator_is_never_waited_for_twice() -> None:
    loader = DataLoader(Trap("SIGKILL", "fetch", at=0), BATCH, num_workers=2)
    iterator = iter(loader)
    assert isinstance(iterator, ShmIter)
    assert type(next_fails(iterator)) is WorkerDiedError
    with within(0.5):
        for _ in range(20):
            with pytest.raises(WorkerDiedError):
                next(iterator)
