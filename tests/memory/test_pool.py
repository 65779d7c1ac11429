"""Pools: lent to one iterator at a time, kept between epochs, and careful with whoever may still read."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.memory import pool as pools
from shmloader.memory.budget import PAGE_BYTES
from shmloader.memory.codec import ALIGN_BYTES, encode, place
from shmloader.memory.layout import Layout
from shmloader.memory.pool import DEBUG_PATTERN, Lender, Pool, private_buffer
from shmloader.memory.rebuild import decode
from shmloader.memory.slots import Slot
from shmloader.workers.protocol import SlotEvent, SlotState

E, S = SlotEvent, SlotState
MIB = 1 << 20


def plenty() -> int:
    return 1 << 40


def new_pool() -> Pool:
    """A pool that knows its slots' size. No fixture: pytest would hold it beyond the look at what is left behind."""
    pool = Pool(4 * MIB, plenty)
    pool.ledger.learn(PAGE_BYTES)
    return pool


def fill(pool: Pool, batch: Any) -> tuple[Slot, Layout]:
    """What a worker and the pump do: a slot, the batch in it, answered."""
    encoded = encode(batch)
    slot = pool.ledger.acquire(PAGE_BYTES)
    assert slot is not None
    offsets = place(encoded, pool.segment.address + slot.offset, slot.capacity)
    assert offsets is not None
    pool.ledger.apply(slot, E.FILLED)
    return slot, encoded.layout(offsets)


def lend(pool: Pool, batch: Any) -> tuple[Slot, Any]:
    slot, layout = fill(pool, batch)
    return slot, decode(layout, pool.lend(slot))


# -- batches ----------------------------------------------------------------------------------------------------


def test_a_lent_batch_lies_in_its_slot_and_gives_it_back_when_it_is_dropped() -> None:
    pool = new_pool()
    slot, batch = lend(pool, [torch.arange(5), torch.ones(3)])
    start = pool.segment.address + slot.offset
    assert start <= batch[0].data_ptr() < batch[1].data_ptr() < start + slot.capacity
    assert slot.state is S.LEASED
    del batch
    assert slot.state is S.LEASED, "finalizers only append; the pump frees"
    pool.reclaim()
    assert slot.state is S.FREE


def test_a_batch_may_be_dropped_in_any_thread() -> None:
    pool = new_pool()
    slot, batch = lend(pool, [torch.arange(5)])
    thread = threading.Thread(target=batch.clear)
    thread.start()
    thread.join()
    pool.reclaim()
    assert slot.state is S.FREE


def test_a_copied_batch_has_nothing_to_do_with_its_slot() -> None:
    pool = new_pool()
    slot, layout = fill(pool, torch.arange(5))
    copy = pool.copy_batch(slot, layout)
    pool.ledger.apply(slot, E.COPY_OUT)
    ctypes.memset(pool.segment.address + slot.offset, 0xFF, slot.capacity)
    assert copy.ctypes.data % ALIGN_BYTES == 0
    assert copy.nbytes == layout.extent
    assert copy[:40].view(np.int64).tolist() == [0, 1, 2, 3, 4]


def test_private_memory_is_aligned_as_slots_are() -> None:
    assert all(private_buffer(nbytes).ctypes.data % ALIGN_BYTES == 0 for nbytes in (1, 63, 1000, 100_000))
    assert [private_buffer(nbytes).nbytes for nbytes in (0, 1, 63)] == [0, 1, 63]


def test_a_part_of_a_slot_is_read_as_a_copy() -> None:
    pool = new_pool()
    slot, _ = fill(pool, torch.arange(5, dtype=torch.uint8))
    assert pool.read(slot, 1, 3) == b"\1\2\3"


def test_a_batch_outlives_its_pool() -> None:
    pool = new_pool()
    slot, batch = lend(pool, torch.arange(5))
    pool.close()
    watch = weakref.ref(pool)
    del pool, slot
    gc.collect()
    assert watch() is None
    assert batch.tolist() == [0, 1, 2, 3, 4]


def test_closing_gives_back_all_pages_but_those_that_are_read() -> None:
    pool = new_pool()
    _, held = lend(pool, torch.arange(5))
    dropped = [lend(pool, torch.arange(5))[1] for _ in range(3)]
    blocks = os.fstat(fd := os.dup(pool.segment.fd))
    del dropped
    pool.close()
    after = os.fstat(fd)
    os.close(fd)
    assert (blocks.st_blocks, after.st_blocks) == (4 * PAGE_BYTES // 512, PAGE_BYTES // 512)
    assert held.tolist() == [0, 1, 2, 3, 4]


def test_what_workers_left_behind_is_free_once_they_are_gone() -> None:
    pool = new_pool()
    slots = [pool.ledger.acquire() for _ in range(3)]
    filling, kept, ready = [slot for slot in slots if slot is not None]
    pool.ledger.apply(kept, E.FILLED_KEPT)
    pool.ledger.apply(ready, E.FILLED)
    leased, batch = lend(pool, torch.arange(5))
    pool.abandon()
    assert [slot.state for slot in (filling, kept, ready, leased)] == [S.FREE, S.FREE, S.FREE, S.LEASED]
    assert batch.tolist() == [0, 1, 2, 3, 4]


def test_a_range_that_a_worker_lets_go_is_free() -> None:
    pool = new_pool()
    slot = pool.ledger.acquire()
    assert slot is not None
    pool.ledger.apply(slot, E.FILLED_KEPT)
    pool.let_go(slot.offset)
    assert slot.state is S.FREE


@pytest.mark.parametrize("debug", ["1", "0"])
def test_only_under_debug_a_freed_slot_is_filled_with_a_pattern(monkeypatch: pytest.MonkeyPatch, debug: str) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", debug)
    pool = new_pool()
    slot, batch = lend(pool, torch.full((PAGE_BYTES,), 7, dtype=torch.uint8))
    stale = memoryview(pool.segment.map)[slot.offset : slot.offset + slot.capacity]
    del batch
    pool.reclaim()
    assert set(stale.tolist()) == {DEBUG_PATTERN if debug == "1" else 7}


# -- lending ----------------------------------------------------------------------------------------------------


def lender_of(budget: int = 4 * MIB, most_slots: int | None = None) -> Lender:
    return Lender(lambda: budget, plenty, most_slots)


def test_the_next_epoch_finds_the_pool_of_the_last_with_its_slots() -> None:
    lender = lender_of()
    pool = lender.lend()
    pool.ledger.learn(PAGE_BYTES)
    pool.ledger.apply(pool.ledger.acquire() or pytest.fail("no slot"), E.FAILED)
    lender.take_back(pool)
    again = lender.lend()
    assert again is pool
    assert again.ledger.count(S.FREE) == 1


def test_overlapping_iterators_get_pools_of_their_own_under_one_budget() -> None:
    lender = lender_of(4 * PAGE_BYTES)
    first, second = lender.lend(), lender.lend()
    assert first is not second
    for pool in (first, second):
        pool.ledger.learn(PAGE_BYTES)
    slots = [pool.ledger.acquire() for pool in (first, second, first, second, first, second)]
    assert [slot is not None for slot in slots] == [True] * 4 + [False] * 2
    lender.take_back(first)
    lender.take_back(second)
    assert lender.lend() is first
    assert second.segment.fd == -1


def test_a_pool_that_comes_back_frees_budget_for_its_sibling() -> None:
    lender = lender_of(2 * PAGE_BYTES)
    first, second = lender.lend(), lender.lend()
    for pool in (first, second):
        pool.ledger.learn(PAGE_BYTES)
    held = [first.ledger.acquire(), first.ledger.acquire()]
    assert second.ledger.acquire() is None
    for slot in held:
        first.ledger.apply(slot or pytest.fail("no slot"), E.FAILED)
    first.ledger.give_back()
    assert second.ledger.acquire() is not None


def test_a_closed_lender_closes_what_comes_back() -> None:
    lender = lender_of()
    idle, lent = lender.lend(), lender.lend()
    lender.take_back(idle)
    lender.close()
    assert idle.segment.fd == -1
    assert lent.segment.fd >= 0
    lender.take_back(lent)
    assert lent.segment.fd == -1


def test_the_number_of_slots_reaches_the_pool() -> None:
    pool = lender_of(most_slots=2).lend()
    pool.ledger.learn(PAGE_BYTES)
    assert [pool.ledger.acquire() is None for _ in range(3)] == [False, False, True]


def test_a_pool_of_an_iterator_that_was_cut_short_is_not_lent_again() -> None:
    lender = lender_of()
    pool = lender.lend()
    lender.write_off(pool)
    assert pool.segment.fd == -1
    assert lender.lend() is not pool


# -- forks ------------------------------------------------------------------------------------------------------


def fork_child() -> tuple[int, int]:
    """A child of a plain fork that lives until it is let go; its pid and the descriptor that lets it go."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    return pid, write


def let_go(pid: int, write: int) -> None:
    os.close(write)
    os.waitpid(pid, 0)


def test_a_slot_leased_at_a_foreign_fork_is_never_handed_out_again() -> None:
    pool = new_pool()
    slot, batch = lend(pool, torch.arange(5))
    child = fork_child()
    later, unharmed = lend(pool, torch.arange(5))
    del batch, unharmed
    pool.reclaim()
    assert slot.state is S.EXPOSED
    assert later.state is S.FREE
    assert pool.tainted
    assert slot not in [pool.ledger.acquire() for _ in range(20)]
    let_go(*child)


def test_a_slot_leased_while_our_own_worker_is_forked_comes_back_with_its_end() -> None:
    pool = new_pool()
    token = object()
    slot, batch = lend(pool, torch.arange(5))
    with pools.forking(token):
        child = fork_child()
    del batch
    pool.reclaim()
    assert slot.state is S.EXPOSED
    assert not pool.tainted
    let_go(*child)
    pools.gone(token)
    assert slot.state is S.EXPOSED, "ends are only posted; the pool's own thread notes them"
    pool.reclaim()
    assert slot.state is S.FREE


def test_a_fork_in_another_thread_is_not_taken_for_our_own_workers() -> None:
    pool = new_pool()
    children: list[tuple[int, int]] = []
    slot, batch = lend(pool, torch.arange(5))
    with pools.forking(object()):
        thread = threading.Thread(target=lambda: children.append(fork_child()))
        thread.start()
        thread.join()
    assert pool.tainted
    del batch
    pool.reclaim()
    assert slot.state is S.EXPOSED
    let_go(*children[0])


def test_a_child_reads_what_it_was_forked_with_whatever_the_parent_fills_next() -> None:
    pool = new_pool()
    _, batch = lend(pool, torch.zeros(PAGE_BYTES, dtype=torch.uint8))
    ask, answer = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ask[0], 1)
        os.write(answer[1], bytes([int(batch.sum())]))
        os._exit(0)
    del batch
    pool.reclaim()
    for _ in range(10):
        fill(pool, torch.ones(PAGE_BYTES, dtype=torch.uint8))
    os.write(ask[1], b"x")
    assert os.read(answer[0], 1) == b"\0"
    os.waitpid(pid, 0)
    for fd in (*ask, *answer):
        os.close(fd)


def test_the_next_epoch_gets_a_fresh_pool_when_slots_are_lost_to_a_foreign_child() -> None:
    lender = lender_of()
    pool = lender.lend()
    pool.ledger.learn(PAGE_BYTES)
    _, batch = lend(pool, torch.arange(5))
    let_go(*fork_child())
    del batch
    lender.take_back(pool)
    assert lender.lend() is not pool
    assert pool.segment.fd == -1


def test_in_a_forked_child_nothing_of_the_parents_pool_is_given_back_or_lent() -> None:
    lender = lender_of()
    pool = lender.lend()
    pool.ledger.learn(PAGE_BYTES)
    slot, batch = lend(pool, torch.arange(5))
    pool.ledger.apply(pool.ledger.acquire() or pytest.fail("no slot"), E.FAILED)
    lender.take_back(pool)
    pid = os.fork()
    if pid == 0:
        inherited = pool.inherited
        other = lender.lend()
        pool.close()
        os._exit(0 if inherited and other is not pool and pool.segment.fd >= 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert batch.tolist() == [0, 1, 2, 3, 4]
    assert pool.ledger.count(S.FREE) == 1
    assert slot.state is S.LEASED
