"""Page-locked memory beside the pool."""

from __future__ import annotations

import pytest
import torch

from shmloader.device.staging import LEAST_SCARCE_BYTES, MOST_SMALL, RING, Staging
from shmloader.errors import PlatformWarning
from tests.fakes import FakeAccelerator

SMALL, LARGE = 1000, 3 * LEAST_SCARCE_BYTES


def take(staging: Staging, nbytes: int) -> torch.Tensor:
    block = staging.take(nbytes)
    assert block is not None
    return block


def test_a_block_is_page_locked_large_enough_and_used_again() -> None:
    with FakeAccelerator() as fake:
        staging = Staging(fake, [])
        block = take(staging, SMALL)
        assert block.nbytes >= SMALL
        assert fake.is_locked(block.data_ptr(), block.nbytes)
        staging.give([block])
        assert take(staging, SMALL + 1).data_ptr() == block.data_ptr()
        assert staging.nbytes == block.nbytes


def test_no_block_is_given_out_twice() -> None:
    staging = Staging(FakeAccelerator(), [])
    assert take(staging, SMALL).data_ptr() != take(staging, SMALL).data_ptr()


@pytest.mark.parametrize(("nbytes", "most"), [(SMALL, MOST_SMALL), (LARGE, RING)])
def test_so_many_blocks_of_a_size_are_in_use_and_no_more(nbytes: int, most: int) -> None:
    staging = Staging(FakeAccelerator(), [])
    blocks = []
    for _ in range(most):
        assert not staging.used_up(nbytes)
        blocks.append(take(staging, nbytes))
    assert staging.used_up(nbytes)
    assert not staging.used_up(9 * nbytes)
    staging.give(blocks[:1])
    assert not staging.used_up(nbytes)


def test_blocks_beyond_the_ring_are_let_go() -> None:
    staging = Staging(FakeAccelerator(), [])
    blocks = [take(staging, LARGE) for _ in range(RING + 3)]
    staging.give(blocks)
    assert staging.nbytes == RING * blocks[0].nbytes


@pytest.mark.parametrize("in_use", [1, RING + 1, MOST_SMALL])
def test_as_many_small_blocks_as_are_in_use_at_a_time_are_kept(in_use: int) -> None:
    with FakeAccelerator() as fake:
        staging = Staging(fake, [])
        for _ in range(5):
            staging.give([take(staging, SMALL) for _ in range(in_use)])
        assert len(fake.locked_blocks) == in_use


def test_a_refusal_is_told_once_and_blocks_that_there_are_go_on() -> None:
    with FakeAccelerator() as fake:
        notices: list[Warning] = []
        staging = Staging(fake, notices)
        block = take(staging, SMALL)
        fake.refuses_memory = True
        assert staging.take(LARGE) is None
        assert staging.take(SMALL) is None
        (notice,) = notices
        assert isinstance(notice, PlatformWarning)
        assert "page-locked" in str(notice)
        staging.give([block])
        assert take(staging, SMALL) is block
        assert staging.nbytes == block.nbytes
