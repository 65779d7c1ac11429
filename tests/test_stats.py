"""The read-outs of real loaders, and what serves them: stats(), loaders(), poke()."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
from typing import Any

import pytest
import torch

import shmloader
from shmloader import DataLoader
from shmloader.stats import MOST_RECENT
from tests.datasets import Made, Rows

PATIENCE_S = 60

# -- stats ------------------------------------------------------------------------------------------------------


def test_before_anything_there_is_nothing_to_report() -> None:
    stats = DataLoader(Rows(8), num_workers=1).stats()
    assert not any(value for name, value in stats.as_dict().items() if name != "cores")
    assert stats.verdict.kind == "balanced"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_counted_while_they_are_delivered(workers: int) -> None:
    loader = DataLoader(Rows(8), 2, num_workers=workers)
    for count, (x, y) in enumerate(loader, 1):
        stats = loader.stats()
        assert stats.batches == count
        assert stats.bytes == (count * (x.nbytes + y.nbytes) if workers else 0)
        assert stats.workers == workers
    assert loader.stats().wait_s > 0
    list(loader)
    assert loader.stats().batches == 4, "of the last epoch"


def test_a_read_out_is_frozen_and_goes_out_flat() -> None:
    loader = DataLoader(Rows(8, 1024), 2, num_workers=1)
    iterator = iter(loader)
    held = next(iterator), next(iterator)
    stats = loader.stats()
    with pytest.raises(AttributeError):
        stats.batches = 7  # type: ignore[misc]
    list(iterator)
    assert stats.batches == 2
    assert stats.slots["LEASED"] == len(held)
    assert sum(stats.slot_bytes.values()) == stats.pool_bytes
    flat = stats.as_dict()
    assert flat["slots/LEASED"] == 2
    assert flat["batches"] == 2
    assert all(isinstance(value, (int, float)) for value in flat.values())


def test_the_last_epoch_can_still_be_read_after_closing() -> None:
    with DataLoader(Rows(8), 2, num_workers=1) as loader:
        list(loader)
    assert loader.stats().batches == 4
    assert loader.stats().pool_bytes == 0


def test_lifetime_adds_up_all_epochs_of_all_iterators() -> None:
    loader = DataLoader(Rows(8), 2, num_workers=1)
    for _ in range(3):
        list(loader)
    next(iter(loader))
    assert loader.stats().batches == 1
    whole = loader.stats(lifetime=True)
    assert (whole.batches, whole.bytes) == (13, 13 * 2 * (8 * 4 + 8))
    assert whole.worked_s >= loader.stats().worked_s > 0


def slow(index: int) -> torch.Tensor:
    time.sleep(0.01)
    return torch.zeros(1)


@pytest.mark.parametrize(("workers", "epochs"), [(1, 2), (0, 2), (0, MOST_RECENT + 3)])
def test_lifetime_counts_what_overlapping_iterators_deliver(workers: int, epochs: int) -> None:
    loader = DataLoader(Rows(4), 2, num_workers=workers)
    iterators = [iter(loader) for _ in range(epochs)]
    assert len(list(zip(*iterators, strict=True))) == 2
    assert loader.stats(lifetime=True).batches == 2 * min(epochs, MOST_RECENT)


def test_a_slow_data_set_is_told_from_a_slow_step() -> None:
    starving = DataLoader(Made(48, slow), 2, num_workers=2)
    list(starving)
    stats = starving.stats()
    assert stats.verdict.kind == "loader"
    assert stats.worked_s > 0.8 * (stats.worked_s + stats.idle_s + stats.held_up_s)
    assert stats.wait_s > 10 * (stats.step_s + stats.hand_over_s)
    assert stats.waits["p50"] <= stats.waits["p90"] <= stats.waits["p99"] <= stats.waits["max"] <= stats.wait_s
    busy = DataLoader(Rows(24), 2, num_workers=2)
    for _ in busy:
        time.sleep(0.05)  # far longer than a batch takes, also beside another process
    stats = busy.stats()
    assert stats.verdict.kind == "step"
    assert stats.idle_s > stats.worked_s
    assert stats.step_s > 11 * 0.05


class Keeps:
    """A collate function that keeps what it returned."""

    def __call__(self, samples: list[Any]) -> Any:
        self.kept = torch.utils.data.default_collate(samples)
        return self.kept


def test_copies_are_counted_by_reason_and_their_memory_as_long_as_it_is_held() -> None:
    asked = DataLoader(Rows(32, 1024), 4, num_workers=1, copy=True)
    held = list(asked)
    assert asked.stats().copies == {"asked": 8}
    assert asked.stats().memory.private_copies >= sum(x.nbytes + y.nbytes for x, y in held)
    del held[1:]
    gc.collect()
    assert 0 < asked.stats().memory.private_copies < 2 * (held[0][0].nbytes + held[0][1].nbytes)
    kept = DataLoader(Rows(32, 1024), 4, num_workers=1, collate_fn=Keeps())
    list(kept)
    assert set(kept.stats().copies) == {"kept"}
    full = DataLoader(Rows(64, 1024), 4, num_workers=1, slots=3)
    with pytest.warns(shmloader.PoolWarning):
        held = list(full)
    stats = full.stats()
    assert stats.copies.get("held", 0) + stats.oversize_batches > 0
    assert stats.memory.private_copies + stats.memory.oversize > 0
    assert stats.private_copies == sum(stats.copies.values())


def test_what_workers_hold_themselves_is_told() -> None:
    loader = DataLoader(Rows(64), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    assert loader.stats().memory.workers_private > 1 << 20
    loader.close()


# -- loaders ----------------------------------------------------------------------------------------------------


def test_loaders_are_known_as_long_as_they_live() -> None:
    before = shmloader.loaders()
    one, two = DataLoader(Rows(8)), DataLoader(Rows(8), num_workers=1)
    three = copy.copy(one)
    assert [loader for loader in shmloader.loaders() if loader not in before] == [one, two]
    list(three)
    assert shmloader.loaders()[-1] is three
    del one, two, three
    gc.collect()
    assert shmloader.loaders() == before


# -- poke -------------------------------------------------------------------------------------------------------


def poke_until(loader: DataLoader[Any], ready: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while loader.poke() < ready:
        assert time.monotonic() < deadline


def test_what_was_poked_is_there_without_waiting_and_in_order() -> None:
    loader = DataLoader(Rows(400), 2, num_workers=2)
    seen = []
    iterator = iter(loader)
    for _, y in iterator:
        seen += y.tolist()
        if len(seen) < 390:
            poke_until(loader, 4)
            waited = loader.stats().wait_s
            seen += next(iterator)[1].tolist()
            assert loader.stats().wait_s == waited
    assert seen == list(range(400))


def test_poking_gives_space_to_workers_that_ask_for_it() -> None:
    loader = DataLoader(Made(40, lambda n: torch.zeros(1000 * (n + 1))), batch_size=None, num_workers=2)
    iterator = iter(loader)
    for count in range(40):
        assert next(iterator).numel() == 1000 * (count + 1)
        poke_until(loader, min(4, 39 - count))


def test_there_is_nothing_to_poke_without_workers_before_and_after() -> None:
    assert DataLoader(Rows(8)).poke() == 0
    loader = DataLoader(Rows(8), num_workers=1)
    assert loader.poke() == 0
    list(loader)
    assert loader.poke() == 0
    loader.close()
    assert loader.poke() == 0


def test_a_death_that_poking_notices_is_told_by_the_next_call() -> None:
    loader = DataLoader(Made(40, slow), 2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while not iterator._fatal:
        loader.poke()
        assert time.monotonic() < deadline
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid .* is killed by signal"):
        next(iterator)


def test_in_a_forked_child_there_is_nothing_to_poke() -> None:
    loader = DataLoader(Rows(400), 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        os._exit(loader.poke())
    assert os.waitpid(pid, 0)[1] == 0
    assert next(iterator)[1].tolist() == [2, 3]
    loader.close()
