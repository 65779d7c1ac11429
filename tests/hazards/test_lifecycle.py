"""Beginnings and ends: deaths that are seen, ends that leave nothing, exceptions out of nowhere, forks, and exits."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from shmloader import DataLoader, IteratorBrokenError, WorkerDiedError
from shmloader.loader import _homes
from shmloader.memory import pool as pools
from tests.faulty import Faults, Numbers, Parent, Sleepy, SoundSleeper, Trap, Unpicklable
from tests.programs import (
    Forked,
    Program,
    Teller,
    alive,
    all_gone,
    descriptors,
    mappings,
    run,
    told_by,
    within,
)

COUNT = 40
#: Between two places of interruption that are tried. Places vary from run to run, so in time all are.
STRIDE = 17
#: A run of ten batches has about this many.
MOST_PLACES = 1500
#: Workers of a process that was killed are gone within this.
GONE_S = 2.0


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """Batches of one item that is full of its index."""
    return DataLoader(dataset or Numbers(COUNT), **{"num_workers": 2, **options})


def numbers(batches: Any) -> list[int]:
    """First number of every batch."""
    return [int(batch[0, 0]) for batch in batches]


def pids(iterator: Any) -> list[int]:
    """An iterator's workers."""
    return [process.pid for process in iterator._workers]


def children() -> set[int]:
    """Children of this process, zombies included."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


# -- 15: deaths that are seen ---------------------------------------------------------------------------------------


def test_a_grandchild_does_not_delay_the_notice_of_its_parents_death() -> None:
    parent = Parent()
    iterator = iter(loader(parent))
    next(iterator)
    grandchild = parent.hear()
    os.kill(pids(iterator)[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="killed by signal"), within(2.0):
        list(iterator)
    assert alive(grandchild)
    os.kill(grandchild, signal.SIGKILL)


def test_a_worker_that_dies_by_its_own_hand_with_a_grandchild_around() -> None:
    class Suicidal(Parent):
        def __getitem__(self, index: int) -> torch.Tensor:
            item = super().__getitem__(index)
            if index == 0:
                os._exit(7)
            return item

    parent = Suicidal()
    iterator = iter(loader(parent))
    with pytest.raises(WorkerDiedError, match="exit code 7"), within(2.0):
        next(iterator)
    os.kill(parent.hear(), signal.SIGKILL)


def test_under_an_ignored_sigchld_a_death_is_seen_and_its_code_said_to_be_unknown() -> None:
    def deaths(teller: Teller) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        assert numbers(loader()) == list(range(COUNT))
        iterator = iter(loader(Trap("os._exit(7)", "fetch", at=5)))
        started = time.monotonic()
        try:
            list(iterator)
        except WorkerDiedError as error:
            teller.tell((str(error), time.monotonic() - started))

    text, taken = told_by(deaths)
    assert text.startswith("DataLoader worker (pid ")
    assert "collected by somebody else" in text
    assert taken < 2.0


def test_the_users_sigchld_handler_and_children_are_left_alone() -> None:
    def bystander(teller: Teller) -> None:
        calls: list[int] = []
        signal.signal(signal.SIGCHLD, lambda signum, frame: calls.append(signum))
        handler = signal.getsignal(signal.SIGCHLD)
        iterator = iter(loader())
        child = os.fork()
        if child == 0:
            os._exit(3)
        seen = numbers(iterator)
        assert signal.getsignal(signal.SIGCHLD) is handler
        teller.tell((seen, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(calls) > 0))

    assert told_by(bystander) == (list(range(COUNT)), 3, True)


# -- 16: the death of the main process ------------------------------------------------------------------------------


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
    ("method", "situation"),
    [
        *(("fork", situation) for situation in (idle, fetching, sending, starting, lonely)),
        *(("forkserver", situation) for situation in (idle, fetching, lonely)),
        *(("spawn", situation) for situation in (fetching, lonely)),
    ],
)
def test_workers_die_with_the_main_process(method: str, situation: Callable[[str], Any]) -> None:
    def main(teller: Teller) -> None:
        iterator = situation(method)
        teller.tell(pids(iterator))
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


# -- 17, 18: channels of the dead -----------------------------------------------------------------------------------


def test_a_death_with_messages_unread_on_both_sides() -> None:
    iterator = iter(loader(FailsThenDies(), num_workers=1, prefetch_factor=20))
    assert all_gone(pids(iterator), 10)  # its answers lie there, and so do the fills that it never read
    with pytest.raises(WorkerDiedError, match="exit code 7"), within(2.0):
        next(iterator)


class FailsThenDies(Faults):
    """Fails six times, which it can tell without a slot, then dies."""

    def __init__(self) -> None:
        super().__init__(COUNT, 10)

    def __getitem__(self, index: int) -> torch.Tensor:
        return os._exit(7) if index == 6 else super().__getitem__(index)


def test_descriptor_numbers_of_dead_workers_are_used_again_without_confusion() -> None:
    for _ in range(10):
        trap = Trap("SIGKILL", "fetch", at=5)
        source = loader(trap, **trap.hooks())
        with pytest.raises(WorkerDiedError):
            list(source)
        pipes = [os.pipe() for _ in range(4)]
        trap.armed = False
        iterator = iter(source)
        for read_end, write_end in pipes:
            os.close(read_end)
            os.close(write_end)
        assert numbers(iterator) == list(range(COUNT))


# -- 21: exceptions out of nowhere ----------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises, like KeyboardInterrupt."""


class Timeout(Exception):
    """What a signal handler raises, like TimeoutError."""


def go_through(iterator: Iterator[Any], kind: type[BaseException]) -> tuple[list[int], bool]:
    """What a consumer gets who goes on after every interruption, and whether the iterator said that it is broken.

    In a for loop nothing can come between the iterator's return and the append, so what is missing is its fault.
    """
    seen: list[torch.Tensor] = []
    while True:
        try:
            for batch in iterator:
                seen.append(batch)  # noqa: PERF402 - an interruption must not lose them
            return numbers(seen), False
        except kind:
            continue
        except IteratorBrokenError:
            return numbers(seen), True


class Injector:
    """Raises at the n-th place of a run where Python would run a signal handler: at calls, and after C functions."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self.left = 0

    def run(self, iterator: Iterator[Any], place: int) -> tuple[list[int], bool]:
        """Go through the iterator, interrupted once."""
        self.left = place
        sys.setprofile(self._profile)
        try:
            return go_through(iterator, self._kind)
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code in CONSUMERS:
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise self._kind


#: What is interrupted in these is not the iterator.
CONSUMERS = {function.__code__ for function in (go_through, numbers, Injector.run)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Interrupt, {"persistent_workers": True, "num_workers": 1}),
        (Timeout, {"persistent_workers": True, "sampler": [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]}),
        (Interrupt, {"num_workers": 1}),
        (Timeout, {"in_order": False}),
    ],
)
def test_an_interruption_anywhere_leaves_all_data_right_or_a_broken_iterator(
    kind: type[BaseException], options: dict[str, Any]
) -> None:
    def trials(teller: Teller) -> None:
        sys.unraisablehook = lambda unraisable: None  # what is raised in a finalizer nobody can catch
        source = loader(Numbers(10), **options)
        injector, place, verdicts = Injector(kind), 1, []
        while injector.left <= 0 and place < MOST_PLACES:
            verdicts.append((place, *injector.run(iter(source), place)))
            place += STRIDE
        source.close()
        verdicts.append((place, numbers(source), False))
        source.close()
        teller.tell((verdicts, children()))

    # In a child: an interruption between a system call and its return may cost the process a descriptor.
    verdicts, left = told_by(trials)
    wanted, ordered = options.get("sampler", list(range(10))), options.get("in_order", True)
    for place, seen, is_broken in verdicts:
        if not is_broken:
            assert (seen if ordered else sorted(seen)) == wanted, f"silently wrong after {place} places"
        elif ordered:
            assert seen == wanted[: len(seen)], f"wrong after {place} places"
        else:
            assert len(seen) == len(set(seen)), f"wrong after {place} places"
    assert not left
    assert 20 < sum(is_broken for _, _, is_broken in verdicts) < len(verdicts) - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Timeout])
@pytest.mark.parametrize("persistent", [False, True])
def test_signals_at_any_time_leave_all_data_right_or_a_broken_iterator(
    kind: type[BaseException], persistent: bool
) -> None:
    """The same with real signals, which mostly find the loader waiting."""

    def trials(teller: Teller) -> None:
        def interrupt(signum: int, frame: Any) -> None:
            raise kind

        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, interrupt)
        source = loader(Slow(), persistent_workers=persistent)
        verdicts = []
        for trial in range(80 if persistent else 40):
            iterator = iter(source)
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + (0.00025 if persistent else 0.0005) * trial)
            try:
                seen, broken = go_through(iterator, kind)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except kind:  # it came between the loop and here
                continue
            verdicts.append("broken" if broken and seen == list(range(len(seen))) else seen == list(range(20)))
        source.close()
        teller.tell(verdicts)

    verdicts = told_by(trials, timeout_s=60)
    assert False not in verdicts
    assert verdicts.count(True) > len(verdicts) / 2, "hardly any interruption was survived"


class Slow(Numbers):
    """Takes half a millisecond an item."""

    def __init__(self) -> None:
        super().__init__(20)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0005)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_broken_iterator_the_loader_starts_afresh(persistent: bool) -> None:
    source = loader(persistent_workers=persistent)
    held = []
    for _ in range(3):
        iterator = iter(source)
        held.append(next(iterator))
        workers = pids(iterator)
        _, broken = Injector(Interrupt).run(iterator, 40)
        assert broken
        with pytest.raises(IteratorBrokenError, match=r"call iter\(\) on the loader again"):
            next(iterator)
        assert numbers(source) == list(range(COUNT))
        del iterator
        assert persistent or all_gone(workers, 0)
    assert numbers(held) == [0, 0, 0]
    source.close()


def test_a_sampler_that_raises_does_not_cost_what_was_drawn_before() -> None:
    class Failing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(10)
            raise LookupError("no more")

    iterator = iter(loader(sampler=Failing()))
    seen, errors = [], []
    for _ in range(30):
        try:
            seen.append(int(next(iterator)[0, 0]))
        except (LookupError, IteratorBrokenError) as error:
            errors.append(type(error))
    assert seen == list(range(10))
    assert errors[0] is LookupError
    assert set(errors[1:]) == {IteratorBrokenError}


def test_a_second_ctrl_c_while_workers_end_leaves_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(loader())
    workers = pids(iterator)
    next(iterator)

    def interrupted(timeout_s: float | None) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(iterator._crew, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iterator._shutdown_workers()
    del iterator
    assert all_gone(workers, 0)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_iterator_that_the_garbage_collector_finds_leaves_its_loader_whole(method: str) -> None:
    """Whatever it finds together it finalizes together: descriptors, registers, and last the iterator."""
    source = loader(num_workers=1, multiprocessing_context=method)
    for _ in range(3):
        iterator = iter(source)
        workers = pids(iterator)
        cycle: list[Any] = [iterator]
        cycle.append(cycle)
        assert int(next(iterator)[0, 0]) == 0
        del iterator, cycle
        gc.collect()
        assert all_gone(workers, 0)
        pool = source_pool(source)
        assert pool.segment.fd >= 0
        assert pool in [ref() for ref in pools._pools]
        del pool
    seen = list(source)
    assert numbers(seen) == list(range(COUNT))
    assert source.stats().oversize_batches == source.stats().private_copies == 0
    source.close()


def test_the_end_of_one_iterator_in_the_middle_of_anothers_pump() -> None:
    """As when the garbage collector finds it there: it waits until that pump is through."""
    gc.collect()
    gc.disable()
    dying = iter(loader())
    workers = pids(dying)
    cycle: list[Any] = [dying]
    cycle.append(cycle)
    del dying, cycle
    living = iter(loader())
    gc.enable()
    pump = living._crew.read

    def collecting(ready: Any) -> Any:
        gc.collect()
        assert all(map(alive, workers)), "it was ended in the middle of a step"
        living._crew.read = pump
        return pump(ready)

    living._crew.read = collecting
    assert int(next(living)[0, 0]) == 0
    assert all_gone(workers, 0)
    assert numbers(living) == list(range(1, COUNT))


# -- 22: forks that exit normally -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["exit", "_exit", "process"])
def test_a_child_that_exits_leaves_its_parents_workers_alone(way: str) -> None:
    outcome = run(
        """
        import multiprocessing, os, sys
        from shmloader import DataLoader
        from tests.faulty import Numbers

        way = sys.argv[1]
        iterator = iter(DataLoader(Numbers(40), num_workers=2))
        next(iterator)
        if way == "process":
            process = multiprocessing.get_context("fork").Process(target=print, args=("in the child",))
            process.start()
            process.join()
        elif (child := os.fork()) == 0:
            (sys.exit if way == "exit" else os._exit)(0)
        else:
            assert os.waitpid(child, 0)[1] == 0
        assert [int(batch[0, 0]) for batch in iterator] == list(range(1, 40))
        print("done", flush=True)
        """,
        way,
    )
    assert (outcome.code, outcome.err, outcome.left) == (0, "", ())
    assert outcome.out.endswith("done\n")


# -- 24: the interpreter's exit -------------------------------------------------------------------------------------


EXITS = {
    "persistent, mid-epoch": "iterator = iter(source); next(iterator)",
    "with held batches": "held = [batch for batch in source]; kept = held[0].numpy()",
    "held by a cycle": "iterator = iter(source); cycle = [iterator]; cycle.append(cycle); del iterator, cycle",
    "held by a module": "import json; json.iterator = iter(source); json.batch = next(json.iterator)",
    "in an exception": "iterator = iter(source); next(iterator); raise SystemExit(0)",
    "in a daemon thread": (
        "import threading, time\\n"
        "def work():\\n"
        "    while True:\\n"
        "        for batch in source: print(end='')\\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start(); time.sleep(0.3)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("situation", "method"),
    [*((situation, "fork") for situation in EXITS), ("persistent, mid-epoch", "forkserver")],
)
def test_the_interpreters_exit_is_silent_and_leaves_no_process(situation: str, method: str) -> None:
    outcome = run(
        f"""
        import sys
        from shmloader import DataLoader
        from tests.faulty import Numbers

        if __name__ == "__main__":
            source = DataLoader(
                Numbers(40), num_workers=2, persistent_workers="thread" not in sys.argv[1],
                multiprocessing_context=sys.argv[2],
            )
            exec({EXITS[situation]!r}.replace("\\\\n", "\\n"))
        """,
        situation,
        method,
    )
    assert outcome.err == ""
    assert (outcome.code, outcome.left) == (0, ())


@pytest.mark.slow
def test_an_uncaught_error_ends_the_program_with_one_traceback() -> None:
    outcome = run(
        """
        from shmloader import DataLoader
        from tests.faulty import Trap

        for batch in DataLoader(Trap("raise", "fetch"), num_workers=2, persistent_workers=True):
            pass
        """
    )
    assert (outcome.code, outcome.left) == (1, ())
    assert outcome.err.count("Traceback (most recent call last)") == 2  # ours, and within its message the worker's
    assert "ValueError: Caught ValueError in DataLoader worker process 1." in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ctrl_c_to_the_whole_group_prints_one_traceback(method: str) -> None:
    with Program(
        """
        import sys
        from shmloader import DataLoader
        from tests.faulty import Sleepy

        if __name__ == "__main__":
            source = DataLoader(Sleepy(at=30), num_workers=2, multiprocessing_context=sys.argv[1])
            for number, batch in enumerate(source):
                if number == 20:
                    print("going", flush=True)
        """,
        method,
    ) as program:
        program.wait_for("going")
        os.killpg(program.pid, signal.SIGINT)
        with within(5.0):
            outcome = program.finish()
    assert outcome.err.count("Traceback (most recent call last)") == 1
    assert outcome.err.rstrip().endswith("KeyboardInterrupt")
    assert (outcome.code, outcome.left) == (-signal.SIGINT, ())


# -- 25: pages at close ---------------------------------------------------------------------------------------------


def pool_bytes(iterator: Any) -> int:
    """Memory that the pool's file takes."""
    return 512 * os.fstat(iterator._pool.segment.fd).st_blocks


@pytest.mark.parametrize("held", [0, 3])
def test_closing_gives_pages_back_though_a_forked_child_maps_them(held: int) -> None:
    source = loader(Numbers(COUNT, 100_000))
    iterator = iter(source)
    kept = [next(iterator) for _ in range(held)]
    for batch in iterator:
        del batch
    pool = source_pool(source)
    file = os.dup(pool.segment.fd)
    del pool

    def sleep(teller: Teller) -> None:
        teller.tell("mapped")
        signal.pause()

    with Forked(sleep) as child:
        child.hear()
        del iterator
        source.close()
        slot = 100_000 * 8 * 9 // 8
        assert 512 * os.fstat(file).st_blocks <= held * slot
    os.close(file)
    assert numbers(kept) == list(range(held))


def source_pool(source: Any) -> Any:
    """The pool that a loader keeps between epochs."""
    return _homes[id(source)]._lender._idle


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(DataLoader(Numbers(COUNT), num_workers=2))
    gc.collect()
    assert numbers(iterator) == list(range(COUNT))


def test_a_loader_is_told_by_its_identity() -> None:
    class Equal(DataLoader[Any]):
        """Equal to everything."""

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    one, other = Equal(Numbers(5), num_workers=1), Equal(Numbers(9), num_workers=1)
    assert [len(numbers(one)), len(numbers(other))] == [5, 9]
    assert (one.stats().batches, other.stats().batches) == (5, 9)


def test_a_dropped_loader_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        before = descriptors(), mappings()
        for persistent in (False, True):
            source = loader(persistent_workers=persistent)
            iterator = iter(source)
            workers = pids(iterator)
            assert int(next(iterator)[0, 0]) == 0
            del iterator, source
            assert all_gone(workers, 0)
        assert descriptors() == before[0]
        assert mappings() <= before[1] + 2  # arenas of the allocator
    finally:
        gc.enable()


# -- 30: descriptors ------------------------------------------------------------------------------------------------


class Nested(Dataset[Any]):
    """Many tensors an item."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return {str(key): torch.full((4,), index * 10 + key) for key in range(10)}


def test_descriptors_and_mappings_depend_on_neither_tensors_nor_batches() -> None:
    held = []
    for number, batch in enumerate(loader(Nested(), batch_size=1)):
        held.append(batch)
        if number == 10:
            before = descriptors(), mappings()
    # A mapping may be split or joined by the allocator at any time; a hundred batches of ten tensors would show.
    assert descriptors() <= before[0]
    assert mappings() <= before[1] + 10
    for number, batch in enumerate(held):
        assert all(batch[str(key)].tolist() == [[number * 10 + key] * 4] for key in range(10))


@pytest.mark.parametrize("workers", [1, 4])
def test_an_iterator_costs_two_descriptors_and_four_per_worker(workers: int) -> None:
    before = descriptors()
    iterator = iter(loader(num_workers=workers))
    next(iterator)
    assert descriptors() - before <= 2 + 4 * workers
    del iterator


# -- ends of every kind ---------------------------------------------------------------------------------------------


def leave_by_break(source: Any) -> None:
    for batch in source:
        del batch
        break


def leave_by_del(source: Any) -> None:
    iterator = iter(source)
    next(iterator)
    del iterator


def leave_by_exhaustion(source: Any) -> None:
    for batch in source:
        del batch


def leave_by_close(source: Any) -> None:
    iterator = iter(source)
    next(iterator)
    source.close()
    source.close()


def leave_by_with(source: Any) -> None:
    with source as entered:
        assert entered is source
        next(iter(entered))


def leave_by_exception(source: Any) -> None:
    with contextlib.suppress(LookupError):
        for _ in source:
            raise LookupError


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_del, leave_by_exhaustion, leave_by_close, leave_by_with, leave_by_exception],
)
def test_however_an_epoch_is_left_the_next_is_whole(leave: Callable[[Any], None], persistent: bool) -> None:
    source = loader(persistent_workers=persistent)
    for _ in range(3):
        leave(source)
        assert numbers(source) == list(range(COUNT))
    source.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_held_batches_outlive_whatever_made_them(persistent: bool) -> None:
    source = loader(Numbers(COUNT, 1000), persistent_workers=persistent)
    iterator = iter(source)
    held = [next(iterator) for _ in range(5)]
    held += list(source)  # with persistent workers a rewind of the same iterator
    source.close()
    held += list(source)
    del iterator, source
    gc.collect()
    assert numbers(held) == [*range(5), *range(COUNT), *range(COUNT)]
    assert all(bool((batch == batch[0, 0]).all()) for batch in held)


def test_after_close_the_old_iterator_says_so_and_a_new_one_works() -> None:
    source = loader()
    iterator = iter(source)
    next(iterator)
    source.close()
    with pytest.raises(RuntimeError, match=r"shut down; call iter\(\) on the loader again"):
        next(iterator)
    assert numbers(source) == list(range(COUNT))


def test_a_loader_that_never_ran_can_be_closed() -> None:
    source = loader()
    source.close()
    with source:
        pass


def test_workers_are_gone_before_the_epochs_end_is_told() -> None:
    iterator = iter(loader())
    workers = pids(iterator)
    for batch in iterator:
        del batch
    assert all_gone(workers, 0)
    with pytest.raises(StopIteration):
        next(iterator)


def test_persistent_workers_stay_and_never_deliver_what_was_left_over() -> None:
    dataset = Numbers(COUNT)
    source = loader(dataset, persistent_workers=True)
    iterator = iter(source)
    workers = pids(iterator)
    held = []
    for leave in range(1, 20):
        again = iter(source)
        assert again is iterator
        held.append([next(iterator) for _ in range(leave)])
    assert [numbers(batches) for batches in held] == [list(range(leave)) for leave in range(1, 20)]
    assert pids(iter(source)) == workers
    source.close()
    assert all_gone(workers, 0)
    assert [numbers(batches) for batches in held] == [list(range(leave)) for leave in range(1, 20)]


class Endless(Sampler[int]):
    """Never ends, and has no length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(COUNT)


def test_an_endless_sampler_can_be_left_at_any_time() -> None:
    source = loader(sampler=Endless())
    for _ in range(5):
        seen = []
        for batch in source:
            seen.append(int(batch[0, 0]))
            if len(seen) == 50:
                break
        assert seen == [*range(COUNT), *range(10)]


@pytest.mark.slow
def test_ending_takes_a_bounded_time_even_if_a_worker_is_busy_for_an_hour() -> None:
    sleeper = SoundSleeper()
    iterator = iter(loader(sleeper))
    sleeper.hear()
    workers = pids(iterator)
    with within(4.0):
        del iterator
    assert all_gone(workers, 0)


def test_ending_is_quick_when_workers_are_idle() -> None:
    source = loader(Numbers(4))
    for _ in range(3):
        iterator = iter(source)
        next(iterator)
        with within(1.0):
            del iterator


class Stream(IterableDataset[torch.Tensor]):
    """An endless stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        index = 0
        while True:
            yield torch.full((8,), index)
            index += 1


@pytest.mark.parametrize("persistent", [False, True])
def test_an_endless_stream_can_be_left(persistent: bool) -> None:
    source = loader(Stream(), num_workers=1, persistent_workers=persistent)
    for _ in range(4):
        iterator = iter(source)
        assert [int(next(iterator)[0, 0]) for _ in range(10)] == list(range(10))
    del iterator
    source.close()


# -- starts that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_data_set_that_cannot_be_sent_is_refused_with_torchs_warning(method: str) -> None:
    source = loader(Unpicklable(), multiprocessing_context=method)
    before = descriptors(), children()
    with (
        pytest.warns(UserWarning, match="Got pickle error when attempting to start a worker Process"),
        pytest.raises((AttributeError, TypeError)),
    ):
        iter(source)
    source.close()
    assert (descriptors(), children()) == before


def limit_for(spare: int) -> int:
    """The limit of descriptors under which ``spare`` more can be opened."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(1 << 16) if number not in used)
    return next(itertools.islice(free, spare, None))


def ours_open() -> Iterator[str]:
    """Descriptors of kinds that a loader opens."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("/memfd:shmloader", "anon_inode:[pidfd]", "socket:")):
                yield target


@pytest.mark.slow
def test_a_lack_of_descriptors_at_any_point_of_the_start_leaves_nothing() -> None:
    def starve(teller: Teller) -> None:
        source = loader(num_workers=3)
        assert numbers(source) == list(range(COUNT))
        source.close()
        gc.collect()
        opened = descriptors()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        failures = 0
        for spare in range(1, 24):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit_for(spare), hard))
            try:
                for batch in source:
                    del batch
            except OSError:
                failures += 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            source.close()
            gc.collect()
            assert not multiprocessing.active_children()
            teller.tell((spare, children(), list(ours_open())))
        teller.tell((failures, numbers(source), descriptors() - opened))

    with Forked(starve) as child:
        while len(told := child.hear()) and not isinstance(told[1], list):
            spare, left, kinds = told
            assert (left, kinds) == (set(), []), f"left behind with {spare} descriptors"
        failures, seen, grown = told
    assert failures > 5
    assert seen == list(range(COUNT))
    # multiprocessing itself loses two when its second pipe fails.
    assert grown <= 2 * failures
