"""Exceptions out of nowhere, at any place: all data right, or an iterator that says that it is broken."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from shmloader import IteratorBrokenError
from shmloader.memory import pool as pools
from tests.faulty import Numbers
from tests.loaders import COUNT, loader, numbers, pids, pool_of
from tests.programs import (
    Teller,
    alive,
    all_gone,
    children,
    told_by,
)

#: Between two places of interruption that are tried. Places vary from run to run, so in time all are.
STRIDE = 53
#: A run of ten batches has about this many.
MOST_PLACES = 1500


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
    assert 5 < sum(is_broken for _, _, is_broken in verdicts) < len(verdicts) - 1


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
        for trial in range(40 if persistent else 20):
            iterator = iter(source)
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + (0.0005 if persistent else 0.001) * trial)
            try:
                seen, broken = go_through(iterator, kind)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except kind:  # it came between the loop and here
                continue
            verdicts.append("broken" if broken and seen == list(range(len(seen))) else seen == list(range(20)))
        source.close()
        teller.tell(verdicts)

    verdicts = told_by(trials)
    assert False not in verdicts
    assert verdicts.count(True) > len(verdicts) / 4, "hardly any interruption was survived"


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
        pool = pool_of(source)
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
