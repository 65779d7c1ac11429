"""A whole loader with ``pin_memory=True``, on a device that reads late what it is asked to copy, as real ones do."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shmloader import DataLoader, PairedDataset, iterator
from shmloader.device import captures, locking
from shmloader.device.pinning import LockRefused
from shmloader.memory.pool import sweep

ROWS, WIDTH, BATCH = 320, 512, 8


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index, dtype=torch.int64)


class LateDevice:
    """Copies by address, in order, whenever it gets to it; plays the runtime and the driver, too.

    Args:
        seed: decides when it gets to what.
        refused: the number of the range that it refuses to page-lock.
    """

    def __init__(self, seed: int, refused: int = -1) -> None:
        self.chance = random.Random(seed)
        self.queue: deque[tuple[int, int, int]] = deque()
        self.read: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self.given = self.done = 0
        self.ranges: dict[int, int] = {}
        self.refused = refused

    # -- the user's side ---------------------------------------------------------------------------------------

    def copy(self, number: int, batch: torch.Tensor) -> None:
        """What ``batch.to(device, non_blocking=True)`` does: late, if the memory is page-locked, else at once."""
        self.given += 1
        self.queue.append((number, batch.data_ptr(), batch.nbytes))
        if not self.has_locked(batch):
            self.work(len(self.queue))
        self.work(self.chance.choice([0, 0, 1, 1, 2]))

    def has_locked(self, batch: torch.Tensor) -> bool:
        """Whether it lies in page-locked memory."""
        return any(start <= batch.data_ptr() < start + length for start, length in self.ranges.items())

    def work(self, copies: int) -> None:
        """Get through so many copies."""
        for _ in range(min(copies, len(self.queue))):
            number, address, nbytes = self.queue.popleft()
            self.read[number] = np.frombuffer(ctypes.string_at(address, nbytes), np.int64)
            self.done += 1

    # -- the runtime -------------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        if len(self.ranges) == self.refused:
            raise LockRefused("no more")
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.ranges[address]

    # -- the driver --------------------------------------------------------------------------------------------

    def record(self) -> list[LateEvent]:
        return [LateEvent(self, self.given)]


class LateEvent:
    """Behind the copies that had been asked for."""

    def __init__(self, device: LateDevice, given: int) -> None:
        self.device, self.given = device, given

    def query(self) -> bool:
        return self.given <= self.device.done

    def synchronize(self) -> None:
        self.device.work(self.given - self.device.done)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An accelerator, whose torch pins nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(captures, "watch", lambda: True)
    monkeypatch.setattr(iterator, "pin_memory", lambda data, device=None: data)
    yield
    sweep()


def run(monkeypatch: pytest.MonkeyPatch, device: LateDevice, late_targets: bool, slots: int | None, held: int) -> None:
    """Two epochs of pairs whose consumer drops each half of a batch when ``held`` others have come."""
    monkeypatch.setattr(locking, "find_runtime", lambda kind: device)
    monkeypatch.setattr(locking, "find_driver", lambda: device)
    pairs, options = PairedDataset(Samples(), Samples()), {"late_targets": late_targets, "slots": slots}
    with DataLoader(pairs, batch_size=BATCH, num_workers=2, pin_memory=True, **options) as loader:
        number = 0
        for _ in range(2):
            keep: deque[torch.Tensor] = deque(maxlen=held)
            for batch in loader:
                for half in batch:
                    device.copy(number, half)
                    if held:
                        keep.append(half)
                    number += 1
                del batch, half
            keep.clear()
        device.work(len(device.queue))
        lot = loader.stats(lifetime=True)
    assert len(device.read) == number == 4 * ROWS // BATCH
    for at, read in device.read.items():
        first = at // 2 * BATCH % ROWS
        assert read.tolist() == np.repeat(np.arange(first, first + BATCH), WIDTH).tolist()
    assert lot.batches == number // 2
    sweep()
    assert device.ranges == {}


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("late_targets", [False, True], ids=["whole", "late targets"])
@pytest.mark.parametrize(("slots", "held"), [(None, 0), (None, 3), (6, 1)])
@pytest.mark.parametrize("seed", range(2))
def test_what_a_device_reads_late_is_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, seed: int, slots: int | None, held: int, late_targets: bool
) -> None:
    run(monkeypatch, LateDevice(seed), late_targets, slots, held)


@pytest.mark.usefixtures("pretended")
def test_so_it_is_where_only_some_of_the_memory_can_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="refuses to page-lock"):
        run(monkeypatch, LateDevice(0, refused=2), True, None, 0)


@pytest.mark.usefixtures("pretended")
@pytest.mark.filterwarnings("ignore:the consumer holds so many batches")
@pytest.mark.parametrize("late_targets", [False, True], ids=["whole", "late targets"])
@pytest.mark.parametrize("options", [{"copy": True}, {"slots": 2}], ids=repr)
def test_what_is_not_page_locked_is_pinned_by_torch(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], late_targets: bool
) -> None:
    device, pinned = LateDevice(0), []

    def pin(data: Any, _device: Any = None) -> Any:
        pinned.extend(data if isinstance(data, list) else [data])
        return data

    monkeypatch.setattr(locking, "find_runtime", lambda kind: device)
    monkeypatch.setattr(locking, "find_driver", lambda: device)
    monkeypatch.setattr(iterator, "pin_memory", pin)
    options = options | {"num_workers": 2, "pin_memory": True, "late_targets": late_targets}
    with DataLoader(PairedDataset(Samples(), Samples()), BATCH, **options) as loader:
        halves = [half for batch in list(loader) for half in batch]
        assert not all(device.has_locked(half) for half in halves)
    asked = {half.data_ptr() for half in pinned}  # and torch gives back as it is what is page-locked
    assert all(half.data_ptr() in asked for half in halves)
    pinned.clear()
