"""Private memory that is used again: never while anything can read it."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.memory.recycled import MOST_FREE, Recycler

MIB = 1 << 20


def fill(buffer: Any, value: int, nbytes: int = MIB) -> torch.Tensor:
    """A tensor on the buffer, the only thing that is left of it."""
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).fill_(value)


def test_memory_comes_back_when_nothing_can_read_it_and_not_before() -> None:
    recycler = Recycler()
    tensor = fill(recycler.lend(MIB), 1)
    address, view = tensor.data_ptr(), tensor.numpy()[5:]
    del tensor
    other = fill(recycler.lend(MIB), 2)
    assert other.data_ptr() != address
    assert (view == 1).all()
    del view
    assert fill(recycler.lend(MIB), 3).data_ptr() == address
    assert other.unique().tolist() == [2]


def test_what_is_free_is_bounded_and_the_oldest_goes_first() -> None:
    recycler = Recycler()
    for size in range(1, 30):
        fill(recycler.lend(size * MIB), size)
    assert recycler.summary()["FREE"][0] <= MOST_FREE + 1
    held = [fill(recycler.lend(MIB), n) for n in range(20)]
    assert recycler.summary()["LEASED"] == (20, 20 * MIB)
    assert [int(tensor[0]) for tensor in held] == list(range(20))
    held.clear()
    recycler.lend(MIB)
    assert recycler.summary()["FREE"][0] <= MOST_FREE + 1


def test_a_forked_child_and_its_parent_do_not_see_each_others_writes() -> None:
    recycler = Recycler()
    array = fill(recycler.lend(MIB), 7).numpy()  # torch's threads do not survive a fork
    pid = os.fork()
    if pid == 0:
        right = bool((array == 7).all())
        array[:] = 9
        os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (array == 7).all()


def test_several_threads_never_get_the_same_memory() -> None:
    recycler, wrong = Recycler(), []

    def work(value: int) -> None:
        for _ in range(300):
            tensor = fill(recycler.lend(4096), value, 4096)
            if not (tensor == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("nbytes", [1, MIB + 1, 3 * MIB - 7])
def test_a_piece_holds_what_was_asked_for(nbytes: int) -> None:
    assert np.frombuffer(Recycler().lend(nbytes), np.uint8).size >= nbytes
