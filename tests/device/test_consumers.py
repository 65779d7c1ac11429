"""Whatever a consumer does with batches on a late device, it reads what it was given, and nothing stays page-locked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shmloader import DataLoader, PairedDataset
from shmloader.device import accelerator, locking
from shmloader.memory.pool import Pool, sweep
from tests.datasets import Made
from tests.device.test_delivery import BATCH_SIZE, COUNT, WholePool
from tests.fakes import FakeAccelerator, Reading

SLOTS = 6  # each is filled several times
WIDTH = 5_000  # 80 kB a batch of either side: it crosses by itself, from where it lies


def page(index: int) -> torch.Tensor:
    return torch.full((WIDTH,), float(index))


@pytest.fixture(params=[(1, False), (2, True)], ids=["seed 1, by hand", "seed 2, late"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAccelerator]:
    """The accelerator that every loader finds; it page-locks whatever slots it is asked to."""
    with FakeAccelerator(*request.param) as made:
        monkeypatch.setattr(accelerator, "find", lambda device: None if device is None else made)
        monkeypatch.setattr(locking, "lock", lambda pool, device: page_lock(pool, made))
        yield made
        made.run_all()


def page_lock(pool: Pool, fake: FakeAccelerator) -> None:
    pool.page_lock(WholePool(fake))


class Consumer:
    """Reads on the device, late, what a loader gives it."""

    def __init__(self, loader: DataLoader[Any], fake: FakeAccelerator) -> None:
        self.loader, self.fake = loader, fake
        self.readings: list[tuple[int, Reading, Reading]] = []

    def take(self, most: int = COUNT) -> Iterator[Any]:
        """The batches of an epoch, at most so many, each of which the device is to read."""
        for number, batch in zip(range(most), self.loader):
            inputs, targets = batch
            self.readings.append((number, self.fake.read(inputs), self.fake.read(targets)))
            yield batch
            del batch, inputs, targets
            self.fake.step()

    def check(self, epochs: list[int]) -> None:
        """Epochs of so many batches each were read, every element of them."""
        assert [number for number, *_ in self.readings] == [n for count in epochs for n in range(count)]
        for number, inputs, targets in self.readings:
            first = number * BATCH_SIZE
            expected = torch.arange(first, first + BATCH_SIZE).float()[:, None].expand(-1, WIDTH)
            assert torch.equal(inputs.value, expected), f"the inputs of batch {number} are wrong"
            assert torch.equal(targets.value, expected), f"the targets of batch {number} are wrong"


ALL = COUNT // BATCH_SIZE


def drops(consumer: Consumer) -> list[int]:
    for _ in consumer.take():
        pass
    return [ALL]


def keeps(consumer: Consumer) -> list[int]:
    assert len(list(consumer.take())) == ALL
    return [ALL]


def breaks_off(consumer: Consumer) -> list[int]:
    for count in (1, 4):
        for _ in consumer.take(count):
            pass
    return [1, 4, *drops(consumer)]


def closes(consumer: Consumer) -> list[int]:
    for _ in consumer.take(3):
        pass
    consumer.loader.close()
    return [3, *drops(consumer)]


def raises(consumer: Consumer) -> list[int]:
    def step_by_step() -> None:
        for number, _ in enumerate(consumer.take()):
            if number == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step_by_step()
    return [3, *drops(consumer)]


@pytest.mark.parametrize(
    ("late_targets", "persistent"), [(False, False), (True, False), (True, True)], ids=["whole", "late", "persistent"]
)
@pytest.mark.parametrize("does", [drops, keeps, breaks_off, closes, raises])
def test_the_device_reads_what_it_was_given_whatever_the_consumer_does(
    fake: FakeAccelerator, does: Callable[[Consumer], list[int]], late_targets: bool, persistent: bool
) -> None:
    pairs = PairedDataset(Made(COUNT, page), Made(COUNT, page))
    options: dict[str, Any] = {"slots": SLOTS, "persistent_workers": persistent, "late_targets": late_targets}
    with DataLoader(pairs, BATCH_SIZE, num_workers=2, device="cuda", **options) as loader:
        consumer = Consumer(loader, fake)
        epochs = does(consumer)
        fake.run_all()
        fake.synchronize()
        consumer.check(epochs)
        assert fake.copies
        assert all(copied.locked for copied in fake.copies)
    gc.collect()
    sweep()
    assert fake.runtime.ranges == {}
