"""The device path on a real device: ``pytest -m gpu``.

The first tests show the trap itself, so that the others are known to look where it is: what a copy reads from
page-locked memory that torch did not allocate is up to whoever fills that memory next.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from shmloader import DataLoader, PairedDataset
from shmloader.errors import WorkerDiedError
from tests.datasets import Made, Rows
from tests.equal import assert_same
from tests.nests import Point

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

LONG = 50_000_000  # clock cycles of a device that is busy: 25 ms and more
WIDTH = 1 << 18  # a row of 1 MiB
BATCHES, BATCH_SIZE = 16, 4
#: So few slots that each is filled again and again.
OPTIONS: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 2, "slots": 6}


def rows() -> Rows:
    return Rows(BATCHES * BATCH_SIZE, WIDTH)


def busy() -> None:
    """Keep the current stream busy, so that what is enqueued next waits."""
    torch.cuda._sleep(LONG)


def assert_rows(x: torch.Tensor, number: int) -> None:
    """Whether ``x`` is the data set's batch of that number, every element of it."""
    first = number * BATCH_SIZE
    expected = torch.arange(first, first + BATCH_SIZE, device=x.device, dtype=x.dtype)
    wrong = int((x != expected[:, None]).sum())
    assert wrong == 0, f"{wrong} elements of batch {number} are wrong"


@contextmanager
def registered(nbytes: int) -> Iterator[tuple[torch.Tensor, Callable[[int], Any]]]:
    """Page-locked memory that torch did not allocate, and what fills it with a number."""
    memory = mmap.mmap(-1, nbytes)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    address = tensor.data_ptr()
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(address, nbytes, 0)) == 0
    try:
        yield tensor, lambda number: ctypes.memset(address, number, nbytes)
    finally:
        torch.cuda.synchronize()
        assert int(runtime.cudaHostUnregister(address)) == 0


# -- the trap ----------------------------------------------------------------------------------------------------------


def test_torch_takes_registered_memory_for_pinned() -> None:
    with registered(256 << 20) as (memory, _):
        assert memory.is_pinned()
        assert memory.pin_memory().data_ptr() == memory.data_ptr()


def test_what_is_filled_again_under_a_copy_arrives_wrong() -> None:
    with registered(64 << 20) as (memory, fill), torch.cuda.stream(torch.cuda.Stream()):
        fill(1)
        for _ in range(4):
            busy()
        arrived = memory.to("cuda", non_blocking=True)
        fill(2)
        torch.cuda.synchronize()
        assert int((arrived != 1).sum()) > 0


def test_torchs_own_pinned_memory_is_not_given_out_under_a_copy() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        memory = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
        busy()
        arrived = memory.to("cuda", non_blocking=True)
        del memory
        torch.full((64 << 20,), 2, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        assert int((arrived != 1).sum()) == 0


# -- pin_memory=True: the user's own copies ----------------------------------------------------------------------------


def streams(names: str) -> list[AbstractContextManager[Any]]:
    """Where the copies are enqueued, in turn."""
    made = {"default": nullcontext(), "one": torch.cuda.Stream(), "two": torch.cuda.Stream()}
    return [made[name] if name == "default" else torch.cuda.stream(made[name]) for name in names.split()]


@pytest.mark.parametrize("names", ["default", "one", "one two", "default one two"])
@pytest.mark.parametrize("copy", [False, True], ids=["views", "copies"])
def test_a_batch_may_be_dropped_right_after_its_copy_was_enqueued(names: str, copy: bool) -> None:
    turns, arrived = streams(names), []
    for number, (x, _) in enumerate(DataLoader(rows(), pin_memory=True, copy=copy, **OPTIONS)):
        assert x.is_pinned()
        with turns[number % len(turns)]:
            busy()
            arrived.append(x.to("cuda", non_blocking=True))
        del x
    torch.cuda.synchronize()
    for number, each in enumerate(arrived):
        assert_rows(each, number)


def prefetched(loader: Any) -> Iterator[torch.Tensor]:
    """One batch ahead on a side stream, as timm's, PyG's and Ray's prefetchers do."""
    side, ahead = torch.cuda.Stream(), None
    for x, _ in loader:
        with torch.cuda.stream(side):
            busy()
            coming = x.to("cuda", non_blocking=True)
        del x
        if ahead is not None:
            yield ahead
        torch.cuda.current_stream().wait_stream(side)
        coming.record_stream(torch.cuda.current_stream())
        ahead = coming
    if ahead is not None:
        yield ahead


def test_batches_come_right_through_a_prefetcher() -> None:
    arrived = list(prefetched(DataLoader(rows(), pin_memory=True, **OPTIONS)))
    torch.cuda.synchronize()
    assert len(arrived) == BATCHES
    for number, x in enumerate(arrived):
        assert_rows(x, number)


def test_a_slot_over_which_a_graph_was_captured_is_never_filled_again() -> None:
    batches = iter(DataLoader(rows(), pin_memory=True, **OPTIONS))
    x, _ = next(batches)
    there = torch.empty(x.shape, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.copy_(x, non_blocking=True)
    del x
    for _ in batches:
        pass
    graph.replay()
    torch.cuda.synchronize()
    assert_rows(there, 0)


def test_slots_are_page_locked_and_no_longer_when_the_loader_is_closed() -> None:
    with DataLoader(rows(), pin_memory=True, **OPTIONS) as loader:
        for _ in loader:
            pass
        assert loader.stats().memory.page_locked > 0
    assert loader.stats().memory.page_locked == 0
    torch.cuda.synchronize()


# -- device="cuda" -----------------------------------------------------------------------------------------------------


def mixed(samples: list[Any]) -> Any:
    """A batch of many kinds."""
    x = torch.stack([row for row, _ in samples])
    numbers = [number for _, number in samples]
    return {
        "x": x,
        "its second row, transposed": x[1:].t(),
        "small": [torch.tensor(numbers), torch.tensor(numbers, dtype=torch.bfloat16), torch.tensor(1.5)],
        "point": Point(torch.arange(6.0).view(2, 3).t(), "text"),
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "sparse": torch.eye(3).to_sparse(),
        "grad": torch.ones(3, requires_grad=True),
        "numbers": numbers,
    }


def back(batch: Any) -> Any:
    """A copy of the batch on the CPU."""

    def copied(x: Any) -> Any:
        return x.detach().to("cpu", copy=True).requires_grad_(x.requires_grad) if torch.is_tensor(x) else x

    return tree_map(copied, batch)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("memory", [{}, {"memory_limit": 24 << 20}, {"copy": True}], ids=repr)
def test_batches_on_the_device_are_those_on_the_cpu(memory: dict[str, Any]) -> None:
    options = {"batch_size": BATCH_SIZE, "num_workers": 2, "collate_fn": mixed}
    on_device = list(DataLoader(rows(), device="cuda", **options, **memory))
    assert all(x.device.type == "cuda" for x in tree_leaves(on_device) if torch.is_tensor(x))
    row = on_device[0]["its second row, transposed"]
    assert row.untyped_storage().data_ptr() == on_device[0]["x"].untyped_storage().data_ptr()
    assert row._base is None
    for ours, theirs in zip(on_device, DataLoader(rows(), **options), strict=True):
        assert_same(back(ours), back(theirs))


@pytest.mark.parametrize("names", ["default", "one", "one two", "default one two"])
def test_a_device_batch_may_be_dropped_while_the_step_still_reads_it(names: str) -> None:
    turns, read = streams(names), []
    batches = iter(DataLoader(rows(), device="cuda", **OPTIONS))
    for number in range(BATCHES):
        with turns[number % len(turns)]:
            x, _ = next(batches)
            busy()
            read.append(x.clone())
        del x
    torch.cuda.synchronize()
    for number, each in enumerate(read):
        assert_rows(each, number)


def test_a_consumer_that_keeps_every_device_batch_has_every_batch() -> None:
    for number, (x, _) in enumerate(list(DataLoader(rows(), device="cuda", **OPTIONS))):
        assert_rows(x, number)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_a_captured_step_is_replayed_on_every_batch(option: dict[str, Any]) -> None:
    there = torch.zeros(BATCH_SIZE, WIDTH, device="cuda")
    there.mean(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        means = there.mean(1)
    for number, (x, _) in enumerate(DataLoader(rows(), **option, **OPTIONS)):
        there.copy_(x, non_blocking=True)
        del x
        graph.replay()
        first = number * BATCH_SIZE
        assert means.tolist() == [float(n) for n in range(first, first + BATCH_SIZE)]


def test_a_batch_cannot_be_taken_during_a_capture_and_spoils_none() -> None:
    batches = iter(DataLoader(rows(), device="cuda", **OPTIONS))
    next(batches)
    torch.cuda.synchronize()
    there, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captured"):
            next(batches)
        doubled = there * 2
    graph.replay()
    assert doubled.tolist() == [2.0] * 4


def test_how_long_the_step_waited_for_copies_is_told() -> None:
    loader = DataLoader(rows(), batch_size=16 * BATCH_SIZE, device="cuda")  # without workers nothing is ahead
    for x, _ in loader:
        x.sum().item()
    waited_s = loader.stats().copy_wait_s
    assert 0 < waited_s < 10


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_persistent_workers_serve_epoch_after_epoch(option: dict[str, Any]) -> None:
    with DataLoader(rows(), persistent_workers=True, **option, **OPTIONS) as loader:
        for _ in range(3):
            arrived = [x.to("cuda", non_blocking=True) for x, _ in loader]
            for number, x in enumerate(arrived):
                assert_rows(x, number)


def row(index: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(index))


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_late_targets_may_be_dropped_while_they_are_read_as_their_inputs_may(option: dict[str, Any]) -> None:
    pairs, arrived = PairedDataset(*[Made(BATCHES * BATCH_SIZE, row)] * 2), []
    for batch in DataLoader(pairs, late_targets=True, **option, **OPTIONS):
        busy()
        arrived.append([half.to("cuda", non_blocking=True).clone() for half in batch])
        del batch
    torch.cuda.synchronize()
    assert len(arrived) == BATCHES
    for number, halves in enumerate(arrived):
        for half in halves:
            assert_rows(half, number)


@pytest.mark.parametrize("workers", [0, 2])
def test_whoever_awaits_batches_has_them_in_the_stream_that_is_current(workers: int) -> None:
    arrived = []

    async def main() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            async for x, _ in DataLoader(rows(), BATCH_SIZE, num_workers=workers, device="cuda"):
                arrived.append(x.clone())

    asyncio.run(main())
    torch.cuda.synchronize()
    assert len(arrived) == BATCHES
    for number, x in enumerate(arrived):
        assert_rows(x, number)


@pytest.mark.filterwarnings("ignore")  # a compiler has warnings of its own
@pytest.mark.parametrize("backend", ["cudagraphs", "inductor"])
def test_a_compiled_step_comes_to_what_it_comes_to_uncompiled(backend: str) -> None:
    from torch._inductor import config

    model = torch.nn.Linear(64, 3).cuda()
    step = torch.compile(lambda x: model(x / 64).square().mean(), backend=backend)
    dataset = Rows(64, 64)
    with config.patch(compile_threads=1):  # leaves no processes behind
        losses = [float(step(x).detach()) for x, _ in DataLoader(dataset, 8, num_workers=2, device="cuda")]
    expected = [float(model(x.cuda() / 64).square().mean()) for x, _ in DataLoader(dataset, 8)]
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)


# -- forks and deaths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_workers_that_start_after_the_device_was_used_bring_right_batches(option: dict[str, Any], method: str) -> None:
    torch.ones(1, device="cuda").sum().item()
    loader = DataLoader(rows(), multiprocessing_context=method, **option, **OPTIONS)
    for number, (x, _) in enumerate(loader):
        assert_rows(x.to("cuda", non_blocking=True), number)


def end_quietly() -> None:
    """A child that does nothing, and ends as any child does."""


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_a_forked_child_ends_quietly_and_the_parent_goes_on(option: dict[str, Any]) -> None:
    for number, (x, _) in enumerate(DataLoader(rows(), **option, **OPTIONS)):
        if number == 3:
            child = multiprocessing.get_context("fork").Process(target=end_quietly)
            child.start()
            child.join()
            assert child.exitcode == 0
        assert_rows(x.to("cuda", non_blocking=True), number)


@pytest.mark.parametrize("option", [{"device": "cuda"}, {"pin_memory": True}], ids=repr)
def test_after_a_workers_death_the_device_is_in_order_and_the_loader_starts_afresh(option: dict[str, Any]) -> None:
    loader = DataLoader(rows(), **option, **OPTIONS)
    batches = iter(loader)
    x, _ = next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        for _ in batches:
            pass
    assert_rows(x.to("cuda", non_blocking=True), 0)
    for number, (again, _) in enumerate(loader):
        assert_rows(again.to("cuda", non_blocking=True), number)
