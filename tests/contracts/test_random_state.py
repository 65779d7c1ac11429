"""Random states: every generator that can be reached, after every step of every kind of epoch, as with torch's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.beside import KINDS, both, close
from tests.datasets import Made, Rows, Shards, worker_id
from tests.equal import assert_same

COUNT = 9


class Drawing:
    """A sampler that draws from torch, ``random`` and numpy: at ``iter()`` if it is eager, else at every element."""

    def __init__(self, eager: bool, generator: torch.Generator | None = None) -> None:
        self.eager, self.generator = eager, generator

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter([self.draw() for _ in range(COUNT)]) if self.eager else (self.draw() for _ in range(COUNT))

    def draw(self) -> int:
        torch_draw = int(torch.randint(COUNT, (), generator=self.generator))
        return (torch_draw + random.randrange(COUNT) + int(np.random.randint(COUNT))) % COUNT


class DrawingBatches(Drawing):
    """The same in batches of two."""

    def draw(self) -> Any:
        return [super(DrawingBatches, self).draw() for _ in range(2)]


Options = Callable[[torch.Generator], dict[str, Any]]

#: What is given to the loader beside the data set; the argument is a generator of the test's own.
SOURCES: dict[str, Options] = {
    "in order": lambda own: {},
    "in order, with a generator": lambda own: {"generator": own},
    "shuffled": lambda own: {"shuffle": True},
    "shuffled, with a generator": lambda own: {"shuffle": True, "generator": own},
    "not batched, shuffled, with a generator": lambda own: {"shuffle": True, "batch_size": None, "generator": own},
    "a generator of the sampler's": lambda own: {"sampler": RandomSampler(range(COUNT), generator=own)},
    "one generator of both": lambda own: {"sampler": RandomSampler(range(COUNT), generator=own), "generator": own},
    "replacement": lambda own: {"sampler": RandomSampler(range(COUNT), True, 20)},
    "subset": lambda own: {"sampler": SubsetRandomSampler(range(0, COUNT, 2), own)},
    "weighted": lambda own: {"sampler": WeightedRandomSampler([*range(1, 1 + COUNT)], 7, generator=own)},
    "eager": lambda own: {"sampler": Drawing(eager=True)},
    "eager, not batched": lambda own: {"sampler": Drawing(eager=True, generator=own), "batch_size": None},
    "eager batches": lambda own: {"batch_sampler": DrawingBatches(eager=True), "batch_size": 1},
    "lazy": lambda own: {"sampler": Drawing(eager=False, generator=own), "generator": own},
    "lazy, not batched": lambda own: {"sampler": Drawing(eager=False), "batch_size": None},
    "lazy batches": lambda own: {"batch_sampler": DrawingBatches(eager=False), "batch_size": 1, "generator": own},
    "batches of a random sampler": lambda own: {
        "batch_sampler": BatchSampler(RandomSampler(range(COUNT)), 4, True),
        "batch_size": 1,
    },
}


def states(own: torch.Generator) -> list[Any]:
    """Of every generator; digests, since thousands of numbers each would take long to compare."""
    of_numpy = np.random.get_state(legacy=False)
    return [
        digest(torch.get_rng_state()),
        digest(own.get_state()),
        hash(random.getstate()),
        [of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"]],
    ]


def digest(state: torch.Tensor) -> str:
    """A short name of a generator's state."""
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def trace(kind: Any, source: Options, stops: tuple[int, ...], dataset: Any = None, **options: Any) -> list[Any]:
    """States and batches after every step of epochs that are left after so many batches."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    own = torch.Generator().manual_seed(14)
    found = [states(own)]
    loader = kind(dataset or Rows(COUNT), **{"batch_size": 2, **source(own), **options})
    found.append(states(own))
    for stop in stops:
        iterator = iter(loader)
        found.append(states(own))
        found += [[next(iterator, "end"), states(own)] for _ in range(stop)]
    del iterator
    close(loader)
    return [*found, states(own)]


WHOLE = 12  # more than any of them has, at least by one


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_every_state_after_every_step_is_what_it_is_with_torch(source: str, workers: int, persistent: bool) -> None:
    """Whole epochs and one that is broken off, after which its generators stand in the middle."""

    def run(kind: Any) -> list[Any]:
        return trace(kind, SOURCES[source], (WHOLE, 1, WHOLE), num_workers=workers, persistent_workers=persistent)

    both(run)


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_move_the_generators_as_with_torch(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        dataset = Shards([0, 1, 2, 3, 4], [10, 11])
        return trace(kind, SOURCES["in order, with a generator"], (WHOLE, 2, WHOLE), dataset, num_workers=workers)

    both(run)


def fails_at_three(index: Any) -> Any:
    if index == 3:
        raise ValueError("three")
    return index


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_data_set_move_the_generators_as_with_torch(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Made(COUNT, fails_at_three), 2, shuffle=True, num_workers=workers)
        found: list[Any] = []
        for _ in range(2):
            iterator = iter(loader)
            while found[-1:] != ["end"]:
                try:
                    found.append(next(iterator, "end"))
                except ValueError:
                    found.append("error")
            found.append(digest(torch.get_rng_state()))
        assert found.count("error") == 2
        return found

    both(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterators_at_a_time_draw_as_with_torch(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Rows(COUNT), 2, shuffle=True, num_workers=workers)
        one, other = iter(loader), iter(loader)
        found = [[next(iterator), digest(torch.get_rng_state())] for iterator in (one, other, other, one)]
        return [found, list(one), list(other), digest(torch.get_rng_state())]

    both(run)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_under_every_start_method_the_generators_are_moved_alike(method: str) -> None:
    """By torch's too, so that torch's own forked workers can be what ours are measured by."""
    source = SOURCES["shuffled, with a generator"]
    mine = trace(KINDS[0], source, (WHOLE,), num_workers=1, multiprocessing_context=method)
    assert_same(mine, trace(KINDS[1], source, (WHOLE,), num_workers=1))


def drawn(index: Any) -> Any:
    return index, worker_id(), float(torch.rand(())), random.random(), float(np.random.rand())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_the_loaders_own_seeds_the_workers_as_with_torch(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        generator = torch.Generator().manual_seed(99)
        loader = kind(Made(COUNT, drawn), 2, shuffle=True, num_workers=workers, generator=generator)
        return [list(loader), list(loader), digest(generator.get_state()), states(generator)]

    both(run)


@pytest.mark.slow
def test_an_epoch_can_be_had_again_from_the_state_before_it() -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Made(COUNT, drawn), 2, shuffle=True, num_workers=2)
        before = torch.get_rng_state()
        found = [list(loader)]
        torch.set_rng_state(before)
        found.append(list(loader))
        assert_same(found[0], found[1])
        return found

    torch.manual_seed(3)
    mine = run(KINDS[0])
    torch.manual_seed(3)
    assert_same(mine, run(KINDS[1]))
