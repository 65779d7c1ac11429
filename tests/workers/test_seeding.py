"""Seeds: torch's under "worker"; under "batch" the same data whoever makes it, and no trace in the training process."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data._utils import worker as torch_worker

from shmloader import DataLoader, PairedDataset, SeedingWarning
from shmloader.workers.seeding import batch_seed, isolated, own_generators, seed_batch, seed_worker
from tests.datasets import Made, Rows, draws, worker_id

PATIENCE_S = 30


def states() -> tuple[Any, ...]:
    """The states of the three global generators, comparable."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, np.asarray(keys).tolist(), *rest)


@pytest.fixture(autouse=True)
def _generators_restored() -> Iterator[None]:
    with isolated():
        yield


# -- one process ------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_a_worker_is_seeded_exactly_as_torch_seeds_it(base_seed: int, worker: int) -> None:
    with isolated():
        assert seed_worker(base_seed, worker) == base_seed + worker
        ours = states()
        seed = base_seed + worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(base_seed, worker))
        assert ours == states()


def test_seeds_of_batches_are_what_they_always_were() -> None:
    """They are a promise: a run that is resumed with a later version goes on with the same data."""
    assert [batch_seed(0, 0, 0), batch_seed(0, 0, 1), batch_seed(0, 1, 0), batch_seed(2**63 - 1, 7, 2**40)] == [
        12035550249420947055,
        12935080325729570654,
        5095610196844313600,
        4224799801299219912,
    ]


def test_seeds_of_batches_do_not_repeat() -> None:
    seeds = {batch_seed(base, epoch, batch) for base in (0, 1, 2**62) for epoch in range(20) for batch in range(200)}
    assert len(seeds) == 3 * 20 * 200
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_batch_seeds_all_three_generators_whatever_their_states_were() -> None:
    seed_batch(5, 1, 2)
    first = states()
    draws(None)
    seed_batch(5, 1, 2)
    assert states() == first
    seed_batch(5, 1, 3)
    assert all(mine != its for mine, its in zip(states(), first))
    assert random.random() != np.random.rand()


def test_isolation_puts_the_states_back_even_after_an_error() -> None:
    def fail() -> None:
        with isolated():
            draws(None)
            seed_batch(0, 0, 0)
            raise KeyError

    before = states()
    with pytest.raises(KeyError):
        fail()
    assert states() == before


def test_generator_objects_of_a_data_set_are_found_also_in_what_it_wraps() -> None:
    plain, drawing = Rows(4), Rows(4)
    drawing.rng, drawing.python, drawing.legacy = np.random.default_rng(), random.Random(), np.random.RandomState()
    drawing.torchs = torch.Generator()
    names = ["rng", "python", "legacy", "torchs"]
    assert own_generators(plain) == []
    assert own_generators(drawing) == names
    assert own_generators(Subset(drawing, [0])) == [f"dataset.{name}" for name in names]
    assert own_generators(PairedDataset(plain, drawing)) == [f"datasets.{name}" for name in names]
    assert own_generators(PairedDataset(a=plain, b=drawing)) == [f"datasets.{name}" for name in names]
    assert own_generators(ConcatDataset([plain, Subset(drawing, [1])])) == [
        f"datasets.dataset.{name}" for name in names
    ]
    drawing.itself = drawing
    assert own_generators(drawing) == names


# -- seeding="batch" --------------------------------------------------------------------------------------------


def drawn(workers: int, seed: int = 3, epochs: int = 1, **options: Any) -> list[list[Any]]:
    """The draws of each sample, epoch by epoch."""
    torch.manual_seed(seed)
    options = {"batch_size": 2, "seeding": "batch", **options}
    loader = DataLoader(Made(11, draws), num_workers=workers, **options)
    found = [[tuple(map(tuple, torch.stack(batch).T.tolist())) for batch in loader] for _ in range(epochs)]
    loader.close()
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_data_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    assert drawn(workers) == drawn(0)


def test_data_do_depend_on_seed_epoch_and_batch() -> None:
    (first, second), (other,) = drawn(0, epochs=2), drawn(0, seed=4)
    samples = [sample for epoch in (first, second, other) for batch in epoch for sample in batch]
    assert len(set(samples)) == len(samples) == 33


@pytest.mark.parametrize("workers", [1, 2])
def test_a_later_epoch_has_new_draws_with_persistent_workers_too(workers: int) -> None:
    first, second, third = drawn(workers, epochs=3, persistent_workers=True)
    assert first == drawn(0)[0]
    assert first != second != third != first


def test_every_epoch_of_a_loader_without_persistent_workers_is_as_without_workers() -> None:
    assert drawn(2, epochs=3) == drawn(0, epochs=3)


class Drawing(IterableDataset[Any]):
    """A stream that draws for every element."""

    def __iter__(self) -> Iterator[Any]:
        return map(draws, range(7))


def test_a_stream_draws_the_same_in_the_training_process_and_in_one_worker() -> None:
    def run(workers: int) -> list[Any]:
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), 2, num_workers=workers, seeding="batch")
        return [torch.stack(batch).tolist() for _ in range(2) for batch in loader]

    assert run(1) == run(0)


def test_shuffling_and_completion_order_change_nothing_about_what_a_batch_draws() -> None:
    assert drawn(2, shuffle=True) == drawn(0, shuffle=True)
    assert sorted(drawn(2, in_order=False)[0]) == sorted(drawn(0)[0])


@pytest.mark.slow
def test_data_do_not_depend_on_whether_workers_are_forked_or_given_a_pickled_job() -> None:
    assert drawn(2, multiprocessing_context="forkserver") == drawn(0)


def fails_at_four(index: int) -> Any:
    if index == 4:
        raise ValueError("four")
    return draws(index)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_that_fails_changes_nothing_about_later_ones(workers: int) -> None:
    def rest(workers: int) -> list[Any]:
        torch.manual_seed(0)
        iterator = iter(DataLoader(Made(12, fails_at_four), batch_size=2, num_workers=workers, seeding="batch"))
        found = [next(iterator) for _ in range(2)]
        with pytest.raises(ValueError, match="four"):
            next(iterator)
        return [torch.stack(batch).tolist() for batch in [*found, *iterator]]

    assert rest(workers) == rest(0)


def test_an_automatic_number_of_workers_seeds_by_batch_and_a_given_one_by_worker() -> None:
    by_batch = drawn(0)
    assert drawn("auto", seeding=None) == by_batch  # type: ignore[arg-type]
    assert drawn(1, seeding=None) == drawn(1, seeding="worker") != by_batch


# -- the training process ---------------------------------------------------------------------------------------


def train(batches: Any) -> list[Any]:
    """A training loop that draws from all three generators."""
    return [(torch.nn.functional.dropout(torch.ones(8)).tolist(), draws(None)) for _ in batches]


def test_without_workers_the_training_process_draws_as_if_there_were_no_loader() -> None:
    def run(batches: Any) -> tuple[Any, ...]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return train(batches), states()

    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Made(10, draws), batch_size=2, seeding="batch", generator=generator, shuffle=True)
    alone = run(range(5))
    assert run(loader) == alone
    assert run(iter(loader)) == alone
    masks = [tuple(mask) for mask, _ in alone[0]]
    assert len(set(masks)) > 1


def test_without_workers_an_error_in_the_data_set_leaves_the_generators_alone_too() -> None:
    iterator = iter(DataLoader(Made(12, fails_at_four), batch_size=6, seeding="batch"))
    before = states()
    with pytest.raises(ValueError, match="four"):
        next(iterator)
    assert states() == before


def test_the_sampler_goes_on_drawing_from_the_training_process() -> None:
    class DrawingSampler:
        def __iter__(self) -> Iterator[int]:
            for _ in range(4):
                yield int(torch.randint(100, ()))

    def orders(seeding: str) -> list[Any]:
        torch.manual_seed(2)
        loader = DataLoader(Made(100, int), batch_size=2, sampler=DrawingSampler(), seeding=seeding)
        return [batch.tolist() for batch in loader]

    assert orders("batch") == orders("worker")


# -- generators that cannot be seeded ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_of_the_data_sets_own_is_warned_of(workers: int) -> None:
    dataset = Rows(4)
    dataset.rng = np.random.default_rng(0)
    with pytest.warns(SeedingWarning, match=r"random generators of its own \(rng\)"):
        list(DataLoader(dataset, num_workers=workers, seeding="batch"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader(dataset, num_workers=workers))
        list(DataLoader(Rows(4), num_workers=workers, seeding="batch"))


# -- dispatch ---------------------------------------------------------------------------------------------------


class Gated(Made):
    """An index waits until work on another one has begun; items say which worker made them."""

    def __init__(self, count: int, waits_for: dict[int, int]) -> None:
        super().__init__(count, worker_id)
        self.waits_for = waits_for
        self.begun = [multiprocessing.Event() for _ in range(count)]

    def __getitem__(self, index: int) -> Any:
        self.begun[index].set()
        if index in self.waits_for and not self.begun[self.waits_for[index]].wait(PATIENCE_S):
            raise TimeoutError(f"{self.waits_for[index]} was not begun while {index} waited")
        return index, worker_id()


def test_one_slow_sample_does_not_idle_the_other_worker() -> None:
    # Worker 0 gets 0, 2 and 4, worker 1 gets 1, 3 and 5. When 0 is there, 1 and 3 are, too: so 6 goes to worker 1,
    # though it would be worker 0's by turns, and is made while 2 takes its time.
    dataset = Gated(9, {0: 5, 2: 6})
    loader = DataLoader(dataset, num_workers=2, seeding="batch", prefetch_factor=3)
    made = {int(index): int(worker) for index, worker in loader}
    assert list(made) == list(range(9))
    assert (made[2], made[6]) == (0, 1)


def test_out_of_order_everything_but_the_slow_sample_goes_to_the_other_worker() -> None:
    dataset = Gated(10, {0: 9})
    loader = DataLoader(dataset, num_workers=2, seeding="batch", in_order=False)
    order = [(int(index), int(worker)) for index, worker in loader]
    assert order[0] == (1, 1)
    assert {index for index, worker in order if worker == 0} == {0, 2}
    assert sorted(index for index, _ in order) == list(range(10))
