"""The job's way into workers that are not forked: one anonymous file, mapped by all of them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import context, get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch

from shmloader import DataLoader
from shmloader.workers.payload import FdParcel, Job, Payload, Unopened
from tests.datasets import Items, Made
from tests.equal import assert_same


class Popen:
    """Plays the child's popen: descriptors are duplicated for it, and arrive by number."""

    def duplicate_for_child(self, fd: int) -> int:
        return os.dup(fd)

    @staticmethod
    def DupFd(fd: int) -> Arriving:  # multiprocessing looks for this name
        return Arriving(fd)


class Arriving:
    """A descriptor inside a pickle for a child."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return self.fd


def job_of(dataset: Any, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "dataset_kind": 0,
        "dataset": dataset,
        "auto_collation": True,
        "collate_fns": (len,),
        "drop_last": False,
        "worker_init_fn": None,
        "base_seed": 2**62,
        "num_workers": 2,
        "seed_batches": False,
    }
    return Job(**{**fields, **changes})


@contextmanager
def starting_a_child() -> Iterator[None]:
    context.set_spawning_popen(Popen())
    try:
        yield
    finally:
        context.set_spawning_popen(None)


def sent(payload: Payload) -> bytes:
    """What goes through the start pipe of one child."""
    with starting_a_child():
        return bytes(ForkingPickler.dumps(payload))


def arrive(payload: Payload) -> Job:
    """The job as one child opens it."""
    unopened = pickle.loads(sent(payload))
    assert isinstance(unopened, Unopened)
    return unopened.open()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_job_arrives_whole() -> None:
    items = [torch.arange(3), np.ones((2, 2), order="F"), {"a": (1, "b", None)}, b"bytes"]
    job = job_of(Items(items), worker_init_fn=print)
    payload = Payload(job)
    arrived = arrive(payload)
    payload.close()
    assert_same(arrived.dataset.items, items)
    assert arrived.worker_init_fn is print
    assert (arrived.base_seed, arrived.num_workers, arrived.auto_collation) == (2**62, 2, True)


def test_nothing_large_goes_through_the_start_pipe() -> None:
    payload = Payload(job_of(Items([torch.zeros(1_000_000), np.zeros(1_000_000), b"x" * 1_000_000])))
    assert len(sent(payload)) < 4096
    # Whoever does not open it has to close what came with it.
    for parcel in leftover_descriptors():
        os.close(parcel)
    payload.close()


def leftover_descriptors() -> list[int]:
    """Copies of payload files that a pickle which nobody loads has left open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "shmloader-job" in target:
            found.append(int(name))
    return sorted(found)[1:]


def test_each_child_may_write_to_what_arrives_and_nobody_else_sees_it() -> None:
    payload = Payload(job_of(Items([torch.zeros(1000), np.zeros(1000)])))
    first, second = arrive(payload), arrive(payload)
    for item in first.dataset.items:
        item += 1
    assert [float(item.sum()) for item in second.dataset.items] == [0, 0]
    assert [float(item.sum()) for item in arrive(payload).dataset.items] == [0, 0]
    payload.close()


def test_what_arrives_outlives_the_payload() -> None:
    payload = Payload(job_of(Items([torch.arange(1000)])))
    arrived = arrive(payload)
    payload.close()
    assert torch.equal(arrived.dataset.items[0], torch.arange(1000))


def test_tensors_in_shared_memory_stay_shared() -> None:
    epoch = torch.zeros(3).share_memory_()
    payload = Payload(job_of(Items([epoch, epoch[1:]])))
    arrived = arrive(payload)
    epoch += 5
    assert [item.tolist() for item in arrived.dataset.items] == [[5, 5, 5], [5, 5]]
    arrived.dataset.items[1][0] = 7
    assert epoch.tolist() == [5, 7, 5]
    payload.close()


def test_locks_and_queues_travel_as_they_do_to_any_child() -> None:
    spawn = get_context("spawn")
    dataset = Items([spawn.Lock(), spawn.Event()])
    payload = Payload(job_of(dataset))
    lock, event = arrive(payload).dataset.items
    with lock:
        event.set()
    assert dataset.items[1].is_set()
    payload.close()


def test_closing_leaves_no_descriptor_however_many_children_there_were() -> None:
    before = open_descriptors()
    payload = Payload(job_of(Items([torch.zeros(3).share_memory_(), torch.zeros(5)])))
    for _ in range(3):
        arrive(payload)
    payload.close()
    payload.close()
    assert open_descriptors() <= before + 1, "the shared tensor's own file may be open"


def unpicklable() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("make", [lambda: lambda: 0, unpicklable, lambda: torch.ones(1, requires_grad=True) * 2])
def test_a_job_that_cannot_be_pickled_says_so_and_leaves_nothing(make: Callable[[], Any]) -> None:
    before = open_descriptors()
    with pytest.raises(Exception, match=r"pickle|serialize|local object") as caught:
        Payload(job_of(Items([torch.zeros(3).share_memory_(), make()])))
    del caught
    assert context.get_spawning_popen() is None
    assert open_descriptors() <= before + 1, "the shared tensor's own file may be open"


class FailsToArrive:
    """Pickles well, and raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_job_that_cannot_be_opened_raises_where_it_is_opened_and_leaves_nothing() -> None:
    payload = Payload(job_of(Items([FailsToArrive()])))
    before = open_descriptors()
    with pytest.raises(ValueError, match="not a number"):
        arrive(payload)
    assert open_descriptors() == before
    payload.close()


def test_a_descriptor_travels_to_a_child() -> None:
    read, write = os.pipe()
    with starting_a_child():
        data = ForkingPickler.dumps(FdParcel(write))
    arrived = pickle.loads(data)
    os.write(arrived.fd, b"x")
    assert os.read(read, 1) == b"x"
    for fd in (read, write, arrived.fd):
        os.close(fd)


# -- real children ----------------------------------------------------------------------------------------------


class ReadsEpoch(Made):
    """Each item is the epoch that the main process has written into shared memory."""

    def __init__(self) -> None:
        super().__init__(4, int)
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self.table = torch.arange(100_000)

    def __getitem__(self, index: int) -> Any:
        return int(self.epoch), self.table[-index - 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_persistent_workers_see_what_is_written_into_a_shared_tensor_of_the_data_set(method: str) -> None:
    dataset = ReadsEpoch()
    workers = 1 if method == "spawn" else 2  # each of which would import torch for seconds
    options = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": True}
    loader = DataLoader(dataset, batch_size=2, **options)
    for epoch in range(3):
        dataset.epoch.fill_(epoch)
        batches = list(loader)
        assert torch.cat([seen for seen, _ in batches]).tolist() == [epoch] * 4
        assert torch.cat([rows for _, rows in batches]).tolist() == [99_999, 99_998, 99_997, 99_996]
    loader.close()


@pytest.mark.slow
def test_a_data_set_that_cannot_be_unpickled_in_the_worker_is_an_error_of_the_first_batch() -> None:
    loader = DataLoader(Items([1, FailsToArrive()]), num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in DataLoader worker process 0.*not a number"):
        next(iter(loader))
