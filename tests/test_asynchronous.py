"""``async for``: the same batches, and an event loop that goes on whatever the workers do."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, PairedDataset, WorkerDiedError
from shmloader.bell import Bell
from tests.datasets import Made, Shards
from tests.gates import Gate, Gated
from tests.programs import children

COUNT = 24


def row(index: int) -> torch.Tensor:
    return torch.full((700,), float(index))


def firsts(batches: list[Any]) -> list[list[int]]:
    return [[int(value) for value in batch[:, 0]] for batch in batches]


async def collected(loader: Any) -> list[Any]:
    return [batch async for batch in loader]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()
    made.close()


@pytest.mark.parametrize(
    "options", [{}, {"in_order": False}, {"persistent_workers": True}, {"seeding": "batch"}], ids=str
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batches_are_those_of_the_ordinary_loop(workers: int, options: dict[str, Any]) -> None:
    with DataLoader(Made(COUNT, row), 4, num_workers=workers, **options) as loader:
        for _ in range(3):
            assert sorted(firsts(asyncio.run(collected(loader)))) == firsts(list(DataLoader(Made(COUNT, row), 4)))


@pytest.mark.parametrize("dataset", [Made(COUNT, row), Shards([row(1), row(2)], [row(3)])], ids=["map", "stream"])
def test_without_workers_batches_are_made_in_a_thread(dataset: Any) -> None:
    loader = DataLoader(dataset, 4)
    assert firsts(asyncio.run(collected(loader))) == firsts(list(loader))


def test_the_event_loop_goes_on_while_a_batch_is_made(gate: Gate) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while ticks < 20:
            await asyncio.sleep(0)
            ticks += 1
        gate.open()

    async def main() -> list[Any]:
        ticking = asyncio.create_task(tick())
        batches = await collected(DataLoader(Gated(COUNT, row, {0: gate}), 4, num_workers=2))
        await ticking
        return batches

    assert len(asyncio.run(main())) == 6
    assert ticks == 20


def test_a_cancelled_wait_loses_nothing(gate: Gate) -> None:
    async def main() -> list[Any]:
        iterator = aiter(DataLoader(Gated(COUNT, row, {5: gate}), 4, num_workers=2))
        batches = [await anext(iterator)]
        waiting = asyncio.ensure_future(anext(iterator))
        while not iterator._iterator._bell.waiters:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not iterator.ready()
        gate.open()
        return batches + [batch async for batch in iterator]

    assert firsts(asyncio.run(main())) == firsts(list(DataLoader(Made(COUNT, row), 4)))


def test_a_cancelled_wait_without_workers_loses_nothing() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(index: int) -> torch.Tensor:
        if index == 4:
            begun.set()
            go_on.wait()
        return row(index)

    async def main() -> list[Any]:
        iterator = aiter(DataLoader(Made(COUNT, slow), 4))
        batches = [await anext(iterator)]
        waiting = asyncio.ensure_future(anext(iterator))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        go_on.set()
        return batches + [batch async for batch in iterator]

    assert firsts(asyncio.run(main())) == firsts(list(DataLoader(Made(COUNT, row), 4)))


def test_several_tasks_share_an_iterator() -> None:
    async def main() -> list[Any]:
        iterator = aiter(DataLoader(Made(COUNT, row), 2, num_workers=2))
        shares = await asyncio.gather(*(collected(iterator) for _ in range(3)))
        return [batch for share in shares for batch in share]

    assert sorted(firsts(asyncio.run(main()))) == firsts(list(DataLoader(Made(COUNT, row), 2)))


def test_targets_and_the_next_batch_are_awaited_at_once(gate: Gate) -> None:
    # Whoever is woken first reads what the other waits for.
    dataset = PairedDataset(Made(COUNT, row), Gated(COUNT, row, {3: gate, 5: gate}))

    async def main() -> list[Any]:
        found, reading = [], []
        async for batch in DataLoader(dataset, 2, num_workers=2, late_targets=True):
            reading.append(asyncio.create_task(batch.wait_targets()))
            found.append(batch.inputs)
            if len(found) == 3:
                gate.open()
        return [found, await asyncio.gather(*reading)]

    inputs, targets = asyncio.run(main())
    assert firsts(inputs) == firsts(targets) == firsts(list(DataLoader(Made(COUNT, row), 2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_targets_can_be_awaited(workers: int) -> None:
    loader = DataLoader(PairedDataset(Made(8, row), Made(8, row)), 2, num_workers=workers, late_targets=True)

    async def main() -> list[Any]:
        return [(batch.inputs, await batch.wait_targets()) async for batch in loader]

    assert all(torch.equal(x, y) for x, y in asyncio.run(main()))


def test_without_workers_targets_are_made_once_and_nothing_beside_them() -> None:
    busy, most, made = 0, 0, []

    def slow(index: int) -> torch.Tensor:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        made.append(index)
        time.sleep(0.001)  # long enough for another thread to get in, if it may
        busy -= 1
        return torch.rand(1)

    async def main() -> None:
        iterator = aiter(DataLoader(PairedDataset(Made(COUNT, slow), Made(COUNT, slow)), 4, late_targets=True))
        batch = await anext(iterator)
        first, again, later = await asyncio.gather(batch.wait_targets(), batch.wait_targets(), anext(iterator))
        assert torch.equal(first, again)
        waiting = asyncio.ensure_future(later.wait_targets())
        await asyncio.sleep(0)  # it begins
        waiting.cancel()
        assert torch.equal(await later.wait_targets(), later.targets)

    asyncio.run(main())
    assert most == 1
    assert sorted(made) == sorted([*range(8), *range(8)])


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_are_those_of_the_ordinary_loop(workers: int) -> None:
    def refusing(index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("no such item")
        return row(index)

    async def main() -> list[Any]:
        iterator = aiter(DataLoader(Made(12, refusing), 4, num_workers=workers))
        batches = [await anext(iterator)]
        with pytest.raises(KeyError, match="no such item"):
            await anext(iterator)
        return batches + [batch async for batch in iterator]

    assert firsts(asyncio.run(main())) == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_a_death_is_noticed(gate: Gate) -> None:
    async def main() -> None:
        iterator = aiter(DataLoader(Gated(COUNT, row, {0: gate}), 4, num_workers=1))
        waiting = asyncio.ensure_future(anext(iterator))
        while not iterator._iterator._bell.waiters:
            await asyncio.sleep(0)
        os.kill(iterator._iterator._workers[0].pid, 9)
        with pytest.raises(WorkerDiedError, match="killed by signal"):
            await waiting

    asyncio.run(main())


def test_a_timeout_is_kept(gate: Gate) -> None:
    async def main() -> None:
        iterator = aiter(DataLoader(Gated(COUNT, row, {0: gate}), 4, num_workers=1, timeout=0.2))
        with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
            await anext(iterator)
        gate.open()
        assert firsts([await anext(iterator)]) == [[0, 1, 2, 3]]

    asyncio.run(main())


def test_a_break_ends_the_workers_without_blocking_the_loop(gate: Gate) -> None:
    others = children()

    async def main() -> float:
        async for _ in DataLoader(Gated(COUNT, row, {4: gate}), 4, num_workers=1):
            break
        gc.collect()
        longest, before = 0.0, time.perf_counter()
        threading.Timer(0.3, gate.open).start()
        while children() - others:
            await asyncio.sleep(0.001)
            longest, before = max(longest, time.perf_counter() - before), time.perf_counter()
        return longest

    assert asyncio.run(main()) < 0.25  # the worker needs the gate, 0.3 s from now


def test_persistent_workers_outlive_a_break() -> None:
    async def main(loader: Any) -> None:
        async for _ in loader:
            break

    others = children()
    with DataLoader(Made(COUNT, row), 4, num_workers=1, persistent_workers=True) as loader:
        asyncio.run(main(loader))
        first = children() - others
        assert len(first) == 1
        asyncio.run(main(loader))
        assert children() - others == first


def test_ready_says_whether_next_would_wait(gate: Gate) -> None:
    iterator = iter(DataLoader(Gated(8, row, {4: gate}), 4, num_workers=1))
    next(iterator)
    assert not iterator.ready()
    gate.open()
    while not iterator.ready():
        pass
    assert firsts([next(iterator)]) == [[4, 5, 6, 7]]
    assert iterator.ready()  # to say that it has ended
    assert list(iterator) == []
    assert iterator.ready()


def test_without_workers_there_is_nobody_to_ask() -> None:
    iterator: Any = iter(DataLoader(Made(8, row), 4))
    with pytest.raises(RuntimeError, match=r"ready\(\) is for loaders with workers"):
        iterator.ready()


def test_the_time_awaited_is_waited_and_not_the_steps(gate: Gate) -> None:
    loader = DataLoader(Gated(12, row, {4: gate}), 4, num_workers=1)

    async def main() -> None:
        number = 0
        async for _ in loader:
            number += 1
            if number == 1:
                threading.Timer(0.3, gate.open).start()

    asyncio.run(main())
    stats = loader.stats()
    assert stats.wait_s >= 0.25
    assert stats.step_s < 0.2
    assert stats.waits["max"] >= 0.25


def test_a_bell_wakes_all_that_wait_and_lets_go_of_them() -> None:
    async def main() -> list[bool]:
        bell = Bell()
        waiting = [asyncio.ensure_future(bell.wait([], None)) for _ in range(3)]
        while len(bell.waiters) < 3:
            await asyncio.sleep(0)
        await asyncio.to_thread(bell.ring)
        found = await asyncio.gather(*waiting)
        assert not bell.waiters
        return [*found, await bell.wait([], 0.01)]

    assert asyncio.run(main()) == [True, True, True, False]
