"""The fake device notices what a real one would punish."""

from __future__ import annotations

import os

import pytest
import torch

from shmloader.device.accelerator import Accelerator
from tests.fakes import POISON, FakeAccelerator, FakeRuntime

X = torch.arange(5)


def poisoned(x: torch.Tensor) -> bool:
    return bool((x.contiguous().view(torch.uint8) == POISON).all())


def test_it_is_an_accelerator() -> None:
    asked = [name for name in vars(Accelerator) if not name.startswith("_")]
    assert all(hasattr(FakeAccelerator(), name) for name in [*asked, "device"])


def test_a_copy_reads_its_source_when_it_completes() -> None:
    with FakeAccelerator() as fake:
        x = X.clone()
        there = fake.copy(x)
        assert poisoned(there)
        x += 1
        assert fake.fetch(there).tolist() == (X + 1).tolist()


def test_work_of_one_stream_completes_in_order_and_of_several_in_any() -> None:
    orders = set()
    for seed in range(20):
        with FakeAccelerator(seed) as fake:
            streams, events = [fake.new_stream(), fake.new_stream()], []
            for _ in range(3):
                events += [fake.record(stream) for stream in streams]
            order = []
            while fake.step():
                order += [n for n, event in enumerate(events) if event.done and n not in order]
            assert [n for n in order if n % 2] == [1, 3, 5]
            orders.add(tuple(order))
    assert len(orders) > 5


def test_a_step_that_did_not_wait_for_the_copy_reads_a_pattern() -> None:
    with FakeAccelerator() as fake:
        side = fake.new_stream()
        with fake.on(side):
            there = fake.copy(X)
        assert poisoned(fake.fetch(there))
        fake.wait(fake.consumer, fake.record(side))
        assert fake.fetch(there).tolist() == X.tolist()


@pytest.mark.parametrize("used", [True, False])
def test_memory_let_go_while_a_step_reads_it_is_written_unless_it_was_said_to_be_used(used: bool) -> None:
    with FakeAccelerator() as fake:
        side = fake.new_stream()
        with fake.on(side):
            there = fake.copy(X)
        event = fake.record(side)
        fake.wait(fake.consumer, event)
        if used:
            fake.use(there, fake.consumer)
        reading = fake.read(there)
        del there
        fake.complete(fake.record(side))
        fake.run_all()
        assert poisoned(reading.value) is not used


def test_a_source_that_was_let_go_is_a_fault() -> None:
    fake = FakeAccelerator(seed=7)
    there = fake.copy(torch.ones(3))
    fake.run_all()
    assert poisoned(there)
    with pytest.raises(AssertionError, match=r"seed=7.*let go"):
        fake.__exit__()


def test_what_moves_itself_is_copied_late_as_well() -> None:
    with FakeAccelerator() as fake:
        sparse = torch.eye(3).to_sparse()
        plain, odd = fake.move(X), fake.move(sparse)
        assert poisoned(plain)
        assert not odd.to_dense().any()
        fake.run_all()
        assert plain.tolist() == X.tolist()
        assert torch.equal(odd.to_dense(), torch.eye(3))


def test_a_thread_completes_what_is_waited_for() -> None:
    with FakeAccelerator(late=True) as fake:
        there = fake.copy(X)
        fake.record(fake.consumer).synchronize()
        assert there.tolist() == X.tolist()


def test_nothing_is_to_be_asked_during_a_capture_or_in_a_child() -> None:
    with FakeAccelerator() as fake:
        event = fake.record(fake.consumer)
        fake.captures = True
        for ask in (event.query, event.synchronize, lambda: fake.copy(X), fake.new_stream):
            with pytest.raises(AssertionError, match="capture"):
                ask()
        fake.captures = False
        pid = os.fork()
        if pid == 0:
            try:
                event.query()
            except AssertionError:
                os._exit(3)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_ranges_are_page_locked_once_each_or_refused() -> None:
    runtime = FakeRuntime(refuses={2})
    runtime.register(4096, 8192)
    with pytest.raises(RuntimeError, match="refuses"):
        runtime.register(65536, 4096)
    runtime.register(12288, 4096)
    assert runtime.covers(5000, 100)
    assert not runtime.covers(12287, 2)  # two registrations
    with pytest.raises(AssertionError, match="twice"):
        runtime.register(8192, 8192)
    runtime.unregister(4096)
    with pytest.raises(AssertionError, match="not registered"):
        runtime.unregister(4096)
    assert (runtime.registrations, len(runtime.ranges)) == (4, 1)


def test_copies_are_noted_with_whether_their_source_was_page_locked() -> None:
    with FakeAccelerator() as fake:
        block, loose = fake.locked_memory(10), torch.ones(3)
        fake.copy(block[2:5])
        fake.copy(loose)
        assert [(copied.nbytes, copied.locked) for copied in fake.copies] == [(3, True), (12, False)]
        fake.run_all()
        fake.refuses_memory = True
        with pytest.raises(RuntimeError, match="no page-locked memory"):
            fake.locked_memory(10)
