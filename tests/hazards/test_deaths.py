"""Deaths of workers: they are seen at once, whoever else is around, and what the dead had said is sorted out."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shmloader import WorkerDiedError
from tests.faulty import Faults, Parent, Trap
from tests.loaders import COUNT, loader, numbers, pids
from tests.programs import (
    Teller,
    alive,
    all_gone,
    told_by,
    within,
)

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
