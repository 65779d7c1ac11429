"""Late targets: inputs at once, targets when they are used, each batch's own, whatever happens in between."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    random_split,
)

from shmloader import DataLoader, IteratorBrokenError, LateBatch, PairedDataset, PoolWarning, WorkerDiedError
from shmloader.late import Pending
from shmloader.paired import PairedItems
from shmloader.workers.halves import halves_of
from tests.datasets import Made, Rows
from tests.gates import Gate, Gated
from tests.programs import Teller, children, told_by

COUNT = 48


def page(index: int) -> torch.Tensor:
    return torch.full((600,), float(index))


def label(index: int) -> dict[str, Any]:
    return {"label": index, "mask": torch.full((1700,), index)}


def pairs(count: int = COUNT) -> PairedDataset[Any]:
    return PairedDataset(Made(count, page), Made(count, label))


class Loads(Dataset[Any]):
    """Inputs and targets by methods of their own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def load_input(self, index: int) -> Any:
        return page(index)

    def load_target(self, index: int) -> Any:
        return label(index)

    def __getitem__(self, index: int) -> Any:
        return self.load_input(index), self.load_target(index)


def checked(batch: Any) -> list[int]:
    """The indices of a batch, which its inputs and its targets agree on."""
    inputs, targets = batch
    found = [int(value) for value in inputs[:, 0]]
    assert (inputs == inputs[:, :1]).all()
    assert targets["label"].tolist() == found
    assert (targets["mask"] == targets["label"][:, None]).all()
    return found


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()
    made.close()


# -- the same pairs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_twenty_epochs_with_shuffling_and_early_breaks_hold_no_wrong_pair(
    workers: int, seeding: str, in_order: bool
) -> None:
    options: dict[str, Any] = {"in_order": in_order, "persistent_workers": workers > 0}
    with DataLoader(pairs(), 4, True, num_workers=workers, seeding=seeding, late_targets=True, **options) as loader:
        for epoch in range(20):
            seen, held = [], []
            for number, batch in enumerate(loader):
                if number % 3 == 2:
                    held.append(batch)  # read after later ones
                else:
                    seen += checked(batch)
                if epoch % 3 == 1 and number == 5:
                    break
            for batch in held:
                seen += checked(batch)
            assert len(set(seen)) == len(seen) == (24 if epoch % 3 == 1 else COUNT)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_under_every_start_method(method: str) -> None:
    loader = DataLoader(Loads(12), 4, num_workers=2, late_targets=True, multiprocessing_context=method)
    assert [checked(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "dataset",
    [
        pairs(),
        StackDataset(Made(COUNT, page), Made(COUNT, label)),
        Loads(COUNT),
        Subset(pairs(), range(3, 40)),
        ConcatDataset([pairs(7), Subset(Loads(20), [5, 3, 8]), StackDataset(Made(9, page), Made(9, label))]),
        random_split(pairs(), [30, 18], generator=torch.Generator().manual_seed(1))[0],
        PairedDataset(Made(COUNT, page), Made(5, lambda index: label(index)), cycle="targets"),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_batches_equal_those_that_come_whole(dataset: Any, workers: int) -> None:
    whole = list(DataLoader(dataset, 4))
    late = list(DataLoader(dataset, 4, num_workers=workers, late_targets=True))
    assert len(whole) == len(late)
    for (inputs, targets), batch in zip(whole, late):
        assert torch.equal(batch.inputs, inputs)
        assert batch.targets.keys() == targets.keys()
        assert all(torch.equal(batch.targets[key], targets[key]) for key in targets)


def test_a_collate_function_for_each_side_is_used_for_its_half() -> None:
    dataset = PairedDataset(Made(8, page), Made(8, label), collate=(sum, len))
    for loader in (DataLoader(dataset, 4, num_workers=n, late_targets=True) for n in (0, 1)):
        assert [(batch.inputs[0].item(), batch.targets) for batch in loader] == [(6.0, 4), (22.0, 4)]


@pytest.mark.parametrize("workers", [0, 1])
def test_without_batching(workers: int) -> None:
    loader = DataLoader(pairs(5), batch_size=None, num_workers=workers, late_targets=True)
    assert [(int(x[0]), y["label"]) for x, y in loader] == [(index, index) for index in range(5)]


class Draws(Dataset[Any]):
    """Items that are drawn."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3)


def test_each_half_of_a_batch_is_seeded_by_itself_whoever_makes_it() -> None:
    def drawn(workers: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(7)
        loader = DataLoader(PairedDataset(Draws(), Draws()), 4, num_workers=workers, seeding="batch", late_targets=True)
        batches = list(loader)
        return torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])

    torch.manual_seed(7)
    first = drawn(1)
    assert not torch.equal(*first)
    for workers in (0, 2, 3):
        assert all(torch.equal(mine, its) for mine, its in zip(drawn(workers), first))


# -- late -------------------------------------------------------------------------------------------------------


def test_inputs_are_handed_over_while_the_worker_is_at_the_targets(gate: Gate) -> None:
    dataset = PairedDataset(Made(4, page), Gated(4, label, {1: gate}))
    for batch in DataLoader(dataset, 2, num_workers=1, late_targets=True):
        if batch.inputs[0, 0] == 0:
            assert not batch.targets_ready()
            gate.open()
        checked(batch)
        assert batch.targets_ready()


def test_targets_can_be_read_after_the_epoch_and_after_the_loader_is_gone(gate: Gate) -> None:
    dataset = PairedDataset(Made(8, page), Gated(8, label, {3: gate}))
    threading.Timer(0.05, gate.open).start()
    kept = list(DataLoader(dataset, 2, num_workers=2, late_targets=True))
    assert [checked(batch) for batch in kept] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_targets_can_be_read_after_an_early_break(gate: Gate) -> None:
    dataset = PairedDataset(Made(8, page), Gated(8, label, {1: gate}))
    for batch in DataLoader(dataset, 2, num_workers=2, late_targets=True):  # noqa: B007
        break
    gate.open()
    assert checked(batch) == [0, 1]


def test_a_new_epoch_of_persistent_workers_waits_for_the_targets_that_can_still_be_read(gate: Gate) -> None:
    dataset = PairedDataset(Made(8, page), Gated(8, label, {1: gate}))
    with DataLoader(dataset, 2, num_workers=1, late_targets=True, persistent_workers=True) as loader:
        kept = next(iter(loader))
        threading.Timer(0.05, gate.open).start()
        again = list(loader)
        assert checked(kept) == [0, 1]
        assert [checked(batch) for batch in again] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_closing_gives_the_targets_that_are_there_and_an_error_for_the_rest(gate: Gate) -> None:
    dataset = PairedDataset(Made(8, page), Gated(8, label, {3: gate}))
    loader = DataLoader(dataset, 2, num_workers=1, late_targets=True)
    iterator = iter(loader)
    first, second = next(iterator), next(iterator)
    assert first.targets_ready()
    loader.close()
    assert checked(first) == [0, 1]
    with pytest.raises(RuntimeError, match="closed before the targets of batch 1 were there"):
        second.targets  # noqa: B018


def test_batches_that_are_dropped_unread_take_no_room() -> None:
    loader = DataLoader(pairs(), 2, num_workers=2, late_targets=True, slots=3)
    for batch in loader:
        assert batch.inputs.shape == (2, 600)
    assert loader.stats().copies == {}
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    del batch
    gc.collect()
    assert iterator._pump.targets.keys() >= set(range(10, 12))
    loader.poke()
    assert all(number >= 10 for number in iterator._pump.targets)


def test_each_half_has_as_many_slots_as_were_asked_for() -> None:
    loader = DataLoader(pairs(), 2, num_workers=2, late_targets=True, slots=3)
    iterator = iter(loader)
    held = [tuple(next(iterator)) for _ in range(2)]
    assert loader.stats().slots["LEASED"] == 4
    assert not loader.stats().copies
    assert [checked(batch) for batch in held] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("slots", [1, 2, 6])
def test_whoever_holds_many_unread_batches_gets_all_of_them(slots: int, workers: int) -> None:
    loader = DataLoader(pairs(), 2, num_workers=workers, late_targets=True, slots=slots)
    with pytest.warns(PoolWarning, match="the consumer holds so many batches"):
        held = list(loader)
    assert [checked(batch) for batch in held] == [[i, i + 1] for i in range(0, COUNT, 2)]


def test_targets_that_grow_beyond_the_budget_get_through() -> None:
    dataset = PairedDataset(Made(12, page), Made(12, lambda index: torch.full((10_000 * (index + 1),), index)))
    loader = DataLoader(dataset, 1, num_workers=2, late_targets=True, memory_limit="1MiB")
    with pytest.warns(PoolWarning, match="the slot pool"):
        found = [(int(x[0, 0]), y.shape[1], int(y[0, 0])) for x, y in loader]
    assert found == [(index, 10_000 * (index + 1), index) for index in range(12)]


# -- errors -----------------------------------------------------------------------------------------------------


def refusing(index: int) -> Any:
    if index == 5:
        raise KeyError("no such target")
    return label(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_targets_is_raised_where_they_are_used(workers: int) -> None:
    loader = DataLoader(PairedDataset(Made(12, page), Made(12, refusing)), 4, num_workers=workers, late_targets=True)
    batches = list(loader)
    assert [int(batch.inputs[0, 0]) for batch in batches] == [0, 4, 8]
    assert checked(batches[2]) == [8, 9, 10, 11]
    with pytest.raises(KeyError, match="no such target"):
        batches[1].targets  # noqa: B018
    with pytest.raises(RuntimeError, match="batch 1 could not be loaded, which has been raised before: KeyError"):
        batches[1].targets  # noqa: B018
    assert checked(batches[0]) == [0, 1, 2, 3]


def test_a_thread_beside_one_that_waits_is_an_error_that_says_so_and_costs_no_batch(gate: Gate) -> None:
    dataset = PairedDataset(Made(8, page), Gated(8, label, {1: gate}))
    iterator: Any = iter(DataLoader(dataset, 2, num_workers=2, late_targets=True))
    first, found = next(iterator), []
    thread = threading.Thread(target=lambda: found.append(checked(first)))
    thread.start()
    while iterator._turn.acquire(blocking=False):  # until the thread waits
        iterator._turn.release()
    for ask in (lambda: next(iterator), lambda: first.targets):
        with pytest.raises(RuntimeError, match="another thread is waiting"):
            ask()
    gate.open()
    thread.join()
    assert found + [checked(batch) for batch in iterator] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_inputs_is_raised_by_next_and_the_rest_comes(workers: int) -> None:
    def inputs(index: int) -> Any:
        if index == 5:
            raise KeyError("no such input")
        return page(index)

    loader = DataLoader(PairedDataset(Made(12, inputs), Made(12, label)), 4, num_workers=workers, late_targets=True)
    iterator = iter(loader)
    assert checked(next(iterator)) == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="no such input"):
        next(iterator)
    assert checked(next(iterator)) == [8, 9, 10, 11]
    assert list(iterator) == []


def dying(index: int) -> Any:
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return label(index)


def test_a_death_between_the_halves_is_an_error_of_whoever_waits(gate: Gate) -> None:
    loader = DataLoader(PairedDataset(Made(8, page), Made(8, dying)), 2, num_workers=1, late_targets=True)
    iterator = iter(loader)
    first, second = next(iterator), next(iterator)
    with pytest.raises(WorkerDiedError, match="the targets of batch 1, indices \\[2, 3\\]"):
        second.targets  # noqa: B018
    assert checked(first) == [0, 1]
    with pytest.raises(WorkerDiedError):
        next(iterator)


def test_a_timeout_while_targets_are_waited_for_can_be_tried_again(gate: Gate) -> None:
    dataset = PairedDataset(Made(4, page), Gated(4, label, {1: gate}))
    batch = next(iter(DataLoader(dataset, 2, num_workers=1, late_targets=True, timeout=0.2)))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        batch.targets  # noqa: B018
    gate.open()
    assert checked(batch) == [0, 1]


# -- interruptions ----------------------------------------------------------------------------------------------


#: Between two places of interruption that are tried. Places vary from run to run, so in time all are.
STRIDE = 41


class Timeout(Exception):
    """What a signal handler raises."""


def interrupted_at(place: int, workers: int) -> tuple[list[list[int]], bool, bool]:
    """What a consumer gets who is interrupted once and goes on; whether it was, and whether that was the end."""
    loader = DataLoader(pairs(24), 4, num_workers=workers, late_targets=True)
    iterator, left = iter(loader), place
    mine = {interrupted_at.__code__, checked.__code__, page.__code__}

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code not in mine and "shmloader" in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                raise Timeout

    seen: list[Any] = []
    batch = None
    sys.setprofile(profile)
    try:
        while True:
            try:
                if batch is None:
                    batch = next(iterator)
                pair = batch.inputs, batch.targets
            except Timeout:
                continue
            seen.append(pair)
            batch = None
    except StopIteration:
        broken = False
    except IteratorBrokenError:
        broken = True
    finally:
        sys.setprofile(None)
    return [checked(pair) for pair in seen], left <= 0, broken


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_anywhere_parts_no_pair(workers: int) -> None:
    def trials(teller: Teller) -> None:
        sys.unraisablehook = lambda unraisable: None  # what is raised in a finalizer nobody can catch
        gc.disable()  # or an interruption would come in the middle of somebody's finalizer
        place, verdicts = 1, []
        while True:
            seen, came, broken = interrupted_at(place, workers)
            verdicts.append((place, seen, broken))
            if not came:
                break
            place += STRIDE
            gc.collect()
        teller.tell((verdicts, children()))

    # In a child: an interruption between a system call and its return may cost the process a descriptor.
    verdicts, left = told_by(trials)
    expected = [list(range(start, start + 4)) for start in range(0, 24, 4)]
    for place, seen, broken in verdicts:
        assert seen == expected[: len(seen)], f"wrong after {place} places"
        assert broken or len(seen) == len(expected), f"silently short after {place} places"
    assert not left
    assert 5 < sum(broken for _, _, broken in verdicts) < len(verdicts) - 1


# -- a tuple ----------------------------------------------------------------------------------------------------


class Settled:
    """A source that brings what it was given, and counts how often it was asked."""

    def __init__(self, targets: Any) -> None:
        self.targets, self.asked = targets, 0

    def bring(self, pending: Pending) -> None:
        self.asked += 1
        pending.put(self.targets)

    def has(self, _pending: Pending) -> bool:
        return True

    async def until(self, _pending: Pending) -> None:
        return


ZERO = (0,)
READERS: dict[str, Callable[[LateBatch], Any]] = {
    "[1]": lambda batch: ("x", batch[1]),
    "[-1]": lambda batch: ("x", batch[-1]),
    "slice": lambda batch: batch[:],
    "unpacking": lambda batch: [*batch],
    "call": lambda batch: (lambda *both: both)(*batch),
    "tuple": tuple,
    "list": list,
    "add": lambda batch: (batch + ZERO)[:2],
    "radd": lambda batch: (ZERO + batch)[1:],
    "mul": lambda batch: (batch * 2)[2:],
    "reversed": lambda batch: list(reversed(batch))[::-1],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "zip": lambda batch: [each for each, _ in zip(batch, range(2))],
    "match": lambda batch: (batch.inputs, batch.targets),
    "index": lambda batch: ("x", ("x", "y")[batch.index("y")]),
    "max": lambda batch: (min(batch), max(batch)),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_it_as_a_tuple_gets_the_targets(reader: str) -> None:
    source = Settled("y")
    assert tuple(READERS[reader](LateBatch("x", Pending(source, 0)))) == ("x", "y")
    assert source.asked == 1


def test_inputs_length_and_truth_ask_for_no_targets() -> None:
    source = Settled("y")
    batch = LateBatch("x", Pending(source, 0))
    assert (batch.inputs, batch[0], batch[-2], len(batch), bool(batch)) == ("x", "x", "x", 2, True)
    assert repr(batch) == "LateBatch(inputs='x', targets=<not read yet>)"
    assert source.asked == 0
    assert batch == ("x", "y")
    assert batch != ("x", "z")
    assert batch < ("x", "z")
    assert hash(batch) == hash(("x", "y"))
    assert "y" in batch
    assert batch.count("y") == 1
    assert repr(batch) == "LateBatch(inputs='x', targets='y')"
    with pytest.raises(IndexError):
        batch[2]
    assert source.asked == 1


def test_moving_a_batch_waits_for_nothing() -> None:
    source = Settled({"mask": torch.ones(2), "name": "a"})
    moved = LateBatch(torch.zeros(2), Pending(source, 0)).to(torch.float64, copy=True)
    assert moved.inputs.dtype == torch.float64
    assert source.asked == 0
    assert moved.targets["mask"].dtype == torch.float64
    assert moved.targets["name"] == "a"
    assert moved.targets is moved.targets
    assert source.asked == 1


# -- who cannot have it -----------------------------------------------------------------------------------------


class Own(PairedItems[Any]):
    """Pairs with items of their own."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


class OnlyInputs(Loads):
    load_target = None  # type: ignore[assignment]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "joint transform": (
        PairedDataset(Made(4, page), Made(4, label), joint_transform=lambda x, y: (x, y)),
        {},
        "joint_transform needs both at once",
    ),
    "names": (PairedDataset(a=Made(4, page), b=Made(4, label)), {}, "these pairs have names \\(a, b\\)"),
    "own items": (Own(Made(4, page), Made(4, label)), {}, "go around Own.__getitem__"),
    "streams": (PairedDataset(Stream(), Stream()), {}, "needs a map-style data set"),
    "no pairs": (Rows(4), {}, "inputs can be had without its targets.*got Rows"),
    "one tensor dataset": (TensorDataset(torch.zeros(4), torch.zeros(4)), {}, "got TensorDataset"),
    "three": (StackDataset(*[Made(4, page)] * 3), {}, "StackDataset of two"),
    "one method": (OnlyInputs(4), {}, "OnlyInputs has no load_target"),
    "collate": (pairs(4), {"collate_fn": lambda samples: samples}, "sees whole pairs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_come_in_halves_is_refused_at_construction(case: str) -> None:
    dataset, options, text = REFUSED[case]
    with pytest.raises(TypeError, match=text):
        DataLoader(dataset, late_targets=True, **options)


def test_only_a_bool_says_whether() -> None:
    with pytest.raises(TypeError, match="late_targets must be a bool, got 1"):
        DataLoader(pairs(), late_targets=1)  # type: ignore[arg-type]


def test_torchs_own_collate_functions_have_halves() -> None:
    for collate_fn in (default_collate, default_convert):
        assert len(list(DataLoader(pairs(4), 2, collate_fn=collate_fn, late_targets=True))) == 2


def test_halves_ask_for_whole_batches_where_the_side_can() -> None:
    class AtOnce(Rows):
        asked: list[Any] = []

        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.asked.append(list(indices))
            return [self[index] for index in indices]

    for dataset in (PairedDataset(AtOnce(4), Rows(4)), StackDataset(AtOnce(4), Rows(4))):
        AtOnce.asked.clear()
        inputs, _ = halves_of(Subset(dataset, [3, 1, 2]))
        assert [index for _, index in inputs.__getitems__([0, 2])] == [3, 2]
        assert AtOnce.asked == [[3, 2]]


# -- read-outs --------------------------------------------------------------------------------------------------


def test_waiting_for_targets_is_no_part_of_the_step(gate: Gate) -> None:
    dataset = PairedDataset(Made(6, page), Gated(6, label, {3: gate}))
    loader = DataLoader(dataset, 2, num_workers=1, late_targets=True)
    for number, batch in enumerate(loader):
        if number == 1:
            threading.Timer(0.3, gate.open).start()
        checked(batch)
    stats = loader.stats()
    assert stats.batches == 3
    assert stats.wait_s >= 0.25
    assert stats.step_s < 0.2
