"""Random numbers: every generator moves, and every worker is seeded, as with torch's loader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    get_worker_info,
)

from tests.beside import (
    assert_same_epochs,
    both,
    close,
)
from tests.datasets import (
    Made,
    Rows,
    seed_and_draws,
)


def generator_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), hash(random.getstate()), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_global_generators_are_moved_exactly_as_torch_moves_them(
    workers: int, shuffle: bool, persistent: bool
) -> None:
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        loader = kind(Rows(9), 2, shuffle=shuffle, num_workers=workers, persistent_workers=persistent and workers > 0)
        seen = [generator_states()]
        for _ in range(3):
            iterator = iter(loader)
            seen.append(generator_states())
            next(iterator)
            seen.append(generator_states())
            seen.append([y.tolist() for _, y in iterator])
            seen.append(generator_states())
        del iterator
        close(loader)
        return seen

    both(run)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_the_loaders_own_is_moved_as_torchs_and_the_global_ones_not_at_all(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        generator, before = torch.Generator().manual_seed(3), generator_states()
        loader = kind(Made(9, worker_seed), 2, shuffle=True, num_workers=workers, generator=generator)
        found = [list(loader) for _ in range(2)]
        assert generator_states() == before
        return [found, generator.get_state().tolist()]

    both(run)


def worker_seed(index: Any) -> Any:
    info = get_worker_info()
    return index, info.seed if info else 0


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_seeded_and_draw_as_torchs(workers: int, persistent: bool) -> None:
    mine = assert_same_epochs(
        lambda: Made(11, seed_and_draws), 2, num_workers=workers, persistent_workers=persistent, count=3
    )
    assert len({float(draw) for epoch in mine for batch in epoch for draw in batch[2]}) == 33


def test_an_early_break_moves_the_random_streams_of_persistent_workers_as_torchs() -> None:
    # Torch's workers carry out what they were given, and it is thrown away: their streams go on from there.
    def run(kind: Any) -> list[Any]:
        torch.manual_seed(0)
        loader = kind(Made(12, seed_and_draws), 2, num_workers=2, persistent_workers=True)
        next(iter(loader))
        found = list(loader)
        close(loader)
        return found

    both(run)
