"""A slot comes back when nothing can read it any more, and not a moment earlier, however it is read."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shmloader import DataLoader, PairedDataset, WorkerDiedError
from shmloader.errors import PoolWarning
from shmloader.memory import lease
from shmloader.memory.budget import PAGE_BYTES
from shmloader.memory.codec import ALIGN_BYTES, encode, place
from shmloader.memory.pool import Pool
from shmloader.memory.rebuild import decode
from shmloader.workers.protocol import SlotEvent, SlotState
from tests.datasets import Made, Rows, stack_numpy

E, S = SlotEvent, SlotState


class Way(NamedTuple):
    """A way to hold on to a tensor's memory, and how to read the tensor's sum through it."""

    keep: Callable[[torch.Tensor], Any]
    total: Callable[[Any], float]


def tracked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.ones_like(x, requires_grad=True)
    return weight, (weight * x).sum()


def through_autograd(kept: tuple[torch.Tensor, torch.Tensor]) -> float:
    weight, loss = kept
    (gradient,) = torch.autograd.grad(loss, weight)
    return float(gradient.sum())


def bytes_as_floats(data: Any) -> float:
    return float(np.frombuffer(data, np.float32).sum())


WAYS = {
    "the tensor": Way(lambda x: x, lambda x: float(x.sum())),
    "a view": Way(lambda x: x.view(-1), lambda x: float(x.sum())),
    "a row, expanded": Way(lambda x: x[0].expand(4, *x[0].shape), lambda x: float(x.sum())),
    "a detached tensor": Way(lambda x: x.detach(), lambda x: float(x.sum())),
    "a parameter": Way(lambda x: torch.nn.Parameter(x), lambda x: float(x.detach().sum())),
    "another dtype": Way(lambda x: x.view(torch.int32), lambda x: float(x.view(torch.float32).sum())),
    "a numpy view": Way(lambda x: x.numpy(), lambda x: float(x.sum())),
    "a view of a numpy view": Way(lambda x: x.numpy()[:, :].T, lambda x: float(x.sum())),
    "a memoryview": Way(lambda x: memoryview(x.numpy()), lambda x: bytes_as_floats(x)),
    "the storage": Way(lambda x: x.untyped_storage(), lambda x: float(torch.empty(0).set_(x).sum())),
    "what autograd saved": Way(tracked, through_autograd),
    "from_dlpack": Way(lambda x: torch.from_dlpack(x), lambda x: float(x.sum())),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# -- one slot ---------------------------------------------------------------------------------------------------


@each_way
def test_a_slot_stays_leased_while_it_can_be_read_in_this_way(way: Way) -> None:
    pool = Pool(1 << 20, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    encoded = encode(torch.ones(4, 8))
    slot = pool.ledger.acquire()
    assert slot is not None
    offsets = place(encoded, pool.segment.address + slot.offset, slot.capacity)
    pool.ledger.apply(slot, E.FILLED)
    batch = decode(encoded.layout(offsets or []), pool.lend(slot))
    kept = way.keep(batch)
    del batch
    pool.reclaim()
    assert slot.state is S.LEASED
    assert way.total(kept) == 32
    del kept
    pool.reclaim()
    assert slot.state is S.FREE


def test_an_array_and_its_views_have_memory_of_their_own_and_hold_no_slot() -> None:
    pool = Pool(1 << 20, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    encoded = encode([np.arange(6), np.ones((2, 3), order="F")])
    slot = pool.ledger.acquire()
    assert slot is not None
    offsets = place(encoded, pool.segment.address + slot.offset, slot.capacity)
    pool.ledger.apply(slot, E.FILLED)
    batch = decode(encoded.layout(offsets or []), pool.lend(slot))
    views = [memoryview(batch[0])[2:4], torch.from_numpy(batch[1])[1]]
    del batch
    pool.reclaim()
    assert slot.state is S.FREE
    ctypes.memset(pool.segment.address + slot.offset, 0, PAGE_BYTES)
    assert [view.tolist() for view in views] == [[2, 3], [1, 1, 1]]


def test_the_end_of_a_lease_takes_no_step_of_python_in_which_an_exception_could_come() -> None:
    pool = Pool(1 << 20, lambda: 1 << 40)
    pool.ledger.learn(PAGE_BYTES)
    slot = pool.ledger.acquire()
    assert slot is not None
    pool.ledger.apply(slot, E.FILLED)
    held = torch.frombuffer(pool.lend(slot), dtype=torch.uint8)
    kept = [held]
    del held
    assert steps_of_python(kept.clear) == 0
    pool.reclaim()
    assert slot.state is S.FREE


def test_who_has_late_targets_goes_without_a_step_of_python() -> None:
    pairs = PairedDataset(Rows(8), Rows(8))
    with DataLoader(pairs, 2, num_workers=1, late_targets=True) as loader:
        for batch in loader:
            kept = [batch.inputs, batch]
            del batch
            assert steps_of_python(kept.clear) == 0


def steps_of_python(step: Callable[[], Any]) -> int:
    """How many functions of Python are called by one of C."""
    called = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            called.append(frame)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(called)


@pytest.mark.slow
def test_leases_of_thousands_of_sizes_cost_few_types_and_no_memory() -> None:
    pool = Pool(1 << 26, lambda: 1 << 40)
    sizes = np.random.default_rng(0).integers(1, 1 << 20, 3000).tolist()
    before = len(lease._types)
    resident = []
    for count, nbytes in enumerate(sizes):
        pool.ledger.learn(nbytes)
        slot = pool.ledger.acquire(nbytes)
        assert slot is not None
        pool.ledger.apply(slot, E.FILLED)
        pool.ledger.apply(slot, E.LEASE)
        lease.lease(pool.segment.map, slot.offset, slot.capacity, slot, pool._returned)
        pool.reclaim()
        if count % 1000 == 999:
            resident.append(anonymous_bytes())
    assert len(lease._types) - before <= 8 * 20
    assert resident[-1] - resident[0] < 4 << 20


def ragged(index: int) -> torch.Tensor:
    return torch.zeros(1 + index * 7919 % 100_003)


@pytest.mark.slow
def test_thousands_of_ragged_batches_cost_no_memory() -> None:
    resident = []
    for count, batch in enumerate(DataLoader(Made(3000, ragged), batch_size=None, num_workers=1, memory_limit="8MiB")):
        assert len(batch) == len(ragged(count))
        if count % 500 == 499:
            resident.append(anonymous_bytes())
    assert resident[-1] - resident[1] < 4 << 20


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


# -- whole epochs -----------------------------------------------------------------------------------------------

COUNT, WIDTH, ROWS = 24, 1024, 4


def loader_of(**options: Any) -> DataLoader[Any]:
    """Batch *i* holds rows of a whole page of *4i* to *4i+3*: a slot used too early shows another batch."""
    options = {"num_workers": 1, "batch_size": ROWS, **options}
    return DataLoader(Rows(COUNT * ROWS, WIDTH), **options)


def total_of(batch: int) -> float:
    return float(sum(WIDTH * (ROWS * batch + row) for row in range(ROWS)))


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed slots are overwritten at once, so that a slot freed too early cannot look right by luck."""
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")


@each_way
@pytest.mark.usefixtures("patterns")
def test_what_is_kept_of_each_batch_is_unchanged_at_the_end(way: Way) -> None:
    kept = [way.keep(x) for x, _ in loader_of(memory_limit="64MiB")]
    first_rows = "expanded" in next(name for name, its in WAYS.items() if its is way)
    for batch, held in enumerate(kept):
        assert way.total(held) == (4.0 * WIDTH * ROWS * batch if first_rows else total_of(batch))


@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("workers", [1, 2])
def test_ten_times_more_batches_than_slots_are_held_and_every_one_is_right(workers: int) -> None:
    with pytest.warns(PoolWarning, match="raise memory_limit or slots, or hold fewer batches"):
        held = list(loader_of(num_workers=workers, slots=2))
    for batch, (x, y) in enumerate(held):
        assert y.tolist() == list(range(ROWS * batch, ROWS * batch + ROWS))
        assert x[:, 0].tolist() == x[:, -1].tolist() == y.tolist()


def test_a_consumer_that_holds_all_it_wants_gets_no_copies_while_the_budget_lasts() -> None:
    loader = loader_of(memory_limit="64MiB")
    held = list(loader)
    stats = loader.stats()
    assert stats.private_copies == stats.oversize_batches == 0
    assert stats.slots["LEASED"] == COUNT == len(held)


def test_a_consumer_that_lets_go_gets_every_batch_from_a_few_slots() -> None:
    loader = loader_of(slots=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        totals = [float(x.sum()) for x, _ in loader]
    assert totals == [total_of(batch) for batch in range(COUNT)]
    assert sum(loader.stats().slots.values()) <= 3


def test_copies_only_leave_no_slot_leased() -> None:
    loader = loader_of(copy=True)
    held = list(loader)
    assert [float(x.sum()) for x, _ in held] == [total_of(batch) for batch in range(COUNT)]
    assert "LEASED" not in loader.stats().slots
    assert loader.stats().private_copies == COUNT


@pytest.mark.usefixtures("patterns")
def test_arrays_and_lists_that_a_collate_function_returns_are_unchanged_at_the_end() -> None:
    held = list(loader_of(collate_fn=stack_numpy))
    for batch, fields in enumerate(held):
        assert float(fields["x"].sum()) == total_of(batch)
        assert fields["y"] == list(range(ROWS * batch, ROWS * batch + ROWS))
        fields["x"] += 1  # writable


# -- beyond an epoch --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_held_over_epoch_ends_and_early_breaks_are_unchanged(persistent: bool) -> None:
    loader = loader_of(num_workers=2, persistent_workers=persistent)
    held: list[tuple[int, torch.Tensor]] = []
    for stop in (COUNT, 3, 5, COUNT, 1, COUNT):
        for batch, (x, _) in enumerate(loader):
            if batch % 3 == 0:
                held.append((batch, x))
            if batch + 1 == stop:
                break
    for batch, x in held:
        assert float(x.sum()) == total_of(batch)
    loader.close()


@pytest.mark.usefixtures("patterns")
def test_batches_outlive_their_iterator_their_loader_and_its_close() -> None:
    loader = loader_of()
    iterator = iter(loader)
    first = next(iterator)[0]
    del iterator
    second = next(iter(loader))[0]
    loader.close()
    third = next(iter(loader))[0]
    del loader
    gc.collect()
    others = [x for x, _ in loader_of()]
    assert [float(x.sum()) for x in (first, second, third)] == [total_of(0)] * 3
    assert len(others) == COUNT


def suicide(index: int) -> torch.Tensor:
    if index == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((WIDTH,), index)


@pytest.mark.usefixtures("patterns")
def test_batches_held_while_a_worker_is_killed_are_unchanged() -> None:
    iterator = iter(DataLoader(Made(40, suicide), batch_size=ROWS, num_workers=1))
    held = [next(iterator) for _ in range(3)]
    with pytest.raises(WorkerDiedError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed"):
        held += list(iterator)
    del iterator
    gc.collect()
    for batch, x in enumerate(held):
        assert x[:, 0].tolist() == list(range(ROWS * batch, ROWS * batch + ROWS))


# -- what users do with batches ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("patterns")
def test_writing_into_one_batch_disturbs_neither_another_nor_a_pending_backward() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    iterator = iter(loader_of())
    first, second = next(iterator)[0], next(iterator)[0]
    loss = (weight * first).sum()
    second.add_(1000).mul_(2)
    later = [x.add_(5) for x, _ in iterator]
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == first.sum(0).tolist() == [float(0 + 1 + 2 + 3)] * WIDTH
    assert float(later[0].sum()) == total_of(2) + 5 * WIDTH * ROWS


def test_each_field_of_a_batch_has_a_version_counter_of_its_own() -> None:
    x, y = next(iter(loader_of()))
    before = x._version
    y.add_(1)
    assert x._version == before


def test_a_batch_can_be_detached_in_place_and_refuses_to_grow_as_torchs_does() -> None:
    x, _ = next(iter(loader_of()))
    x.detach_()
    assert x._base is None
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        x.resize_(10 * x.numel())


def test_a_persistent_loader_first_used_in_inference_mode_can_train_afterwards() -> None:
    loader = loader_of(persistent_workers=True)
    model = torch.nn.Linear(WIDTH, 1)
    with torch.inference_mode():
        for x, _ in loader:
            assert not x.is_inference()
            model(x)
    for x, _ in loader:
        model(x).sum().backward()
    assert model.weight.grad is not None
    loader.close()


def test_saving_a_batch_writes_its_bytes_and_little_else() -> None:
    for x, y in loader_of():
        for tensor in (x, y):
            assert tensor.storage_offset() == 0
            assert tensor.data_ptr() % ALIGN_BYTES == 0
        file = io.BytesIO()
        torch.save([x, y], file)
        assert file.tell() <= x.nbytes + y.nbytes + 4096
