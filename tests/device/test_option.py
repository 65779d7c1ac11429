"""``device=``: what it takes, and where it leads without workers and under torch's own iterators."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.datapipes.iter import IterableWrapper

import shmloader
from shmloader import DataLoader, PairedDataset
from shmloader.device import accelerator
from shmloader.errors import PlatformWarning
from tests.datasets import Made, Rows
from tests.device.test_delivery import BATCH_SIZE, COUNT, WIDTH, mixed, rows
from tests.equal import assert_same
from tests.fakes import FakeAccelerator

WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["no workers", "workers"])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The accelerator that every loader with a ``device`` finds."""
    with FakeAccelerator(7) as made:
        monkeypatch.setattr(accelerator, "find", lambda device: None if device is None else made)
        yield made
        made.run_all()


@pytest.mark.parametrize(
    ("device", "kind", "text"),
    [
        (True, TypeError, "device must be"),
        (1.0, TypeError, "device must be"),
        ("number one", ValueError, "is no device"),
        ("meta", ValueError, "holds no data"),
        (-1, ValueError, "is no index"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_device_is_an_error_at_once(device: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DataLoader(Rows(4), device=device)
    with pytest.raises(kind, match=text):
        shmloader.patch_torch(device=device)


@WORKERS
@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda")], ids=repr)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there_is_an_error_when_an_epoch_begins(device: Any, workers: int) -> None:
    loader = DataLoader(Rows(4), num_workers=workers, device=device)
    with pytest.raises(RuntimeError, match="torch sees no such accelerator in this process"):
        iter(loader)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two devices, of which the current one is as it says."""
    mine = {"current": 0}
    answers = {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": 2}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: mine["current"], raising=False)
    return mine


def test_a_device_without_an_index_is_each_ranks_own(rank: dict[str, int]) -> None:
    for index in (0, 1):
        rank["current"] = index
        for device in ("cuda", torch.device("cuda")):
            found = accelerator.find(device)
            assert found is not None
            assert found.device == torch.device("cuda", index)


def test_so_it_is_under_the_name_that_torch_had_for_it_at_first(
    rank: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.accelerator, "current_device_index")
    monkeypatch.setattr(torch.accelerator, "current_device_idx", lambda: 1, raising=False)
    found = accelerator.find("cuda")
    assert found is not None
    assert found.device == torch.device("cuda", 1)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)], ids=repr)
def test_an_index_says_which_device(device: Any) -> None:
    found = accelerator.find(device)
    assert found is not None
    assert found.device == torch.device("cuda", 1)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("device", "text"), [(2, "only 2"), ("cuda:2", "only 2"), ("xpu", "only 'cuda'")], ids=repr)
def test_a_device_beside_those_that_there_are_is_an_error_that_names_them(device: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        accelerator.find(device)


@WORKERS
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None], ids=repr)
def test_batches_for_the_cpu_stay_there(device: Any, workers: int) -> None:
    with DataLoader(Rows(8), 4, num_workers=workers, device=device) as loader:
        assert_same(list(loader), list(TorchLoader(Rows(8), 4)))


@WORKERS
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_epochs_are_those_on_the_cpu(fake: FakeAccelerator, workers: int, persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
    with DataLoader(Rows(COUNT, WIDTH), BATCH_SIZE, collate_fn=mixed, device="cuda", **options) as loader:
        for _ in range(2):
            kept = list(loader)
            fake.synchronize()
            for ours, theirs in zip(kept, TorchLoader(Rows(COUNT, WIDTH), BATCH_SIZE, collate_fn=mixed), strict=True):
                assert torch.equal(ours.pop("graph").x, theirs.pop("graph").x)
                assert_same(ours, theirs)
    assert all(copied.locked for copied in fake.copies if copied.nbytes > 4 * BATCH_SIZE * WIDTH)


def test_without_workers_memory_that_is_used_again_was_read_before(fake: FakeAccelerator) -> None:
    readings = []
    with DataLoader(Rows(COUNT, 300_000), BATCH_SIZE, device="cuda") as loader:
        for x, _ in loader:  # 4.8 MB a batch: collated into memory that is used again
            readings.append(fake.read(x))
            del x
        assert loader.stats().memory.staging > 0
    fake.run_all()
    for number, reading in enumerate(readings):
        assert torch.equal(reading.value, rows(number)[:, :1].expand(-1, 300_000))


def test_data_pipes_arrive_too(fake: FakeAccelerator) -> None:
    pipe = IterableWrapper([torch.full((3,), float(number)) for number in range(8)])
    loader = DataLoader(pipe, 2, device="cuda")
    found = [fake.fetch(batch) for batch in loader]
    assert fake.copies
    assert_same(found, list(TorchLoader(pipe, 2)))
    iterator: Any = iter(loader)
    assert fake.fetch(next(iterator)).tolist() == [[0.0] * 3, [1.0] * 3]
    assert iterator._num_workers == 0  # all else is the iterator's own


@pytest.mark.parametrize(
    "make",
    [lambda data: data, lambda data: IterableWrapper([data[index] for index in range(COUNT)])],
    ids=["data set", "pipe"],
)
def test_without_workers_a_warning_that_is_an_error_costs_no_batch(fake: FakeAccelerator, make: Any) -> None:
    fake.refuses_memory = True
    batches = iter(DataLoader(make(Rows(COUNT, WIDTH)), BATCH_SIZE, device="cuda"))
    found = [int(fake.fetch(next(batches)[1])[0])]
    with pytest.raises(PlatformWarning, match="page-locked memory"):
        next(batches)
    found += [int(fake.fetch(y)[0]) for _, y in batches]
    assert found == [*range(0, COUNT, BATCH_SIZE)]


@pytest.mark.parametrize("late_targets", [False, True], ids=["whole", "late targets"])
@WORKERS
def test_whoever_awaits_batches_has_them_in_the_stream_that_is_current(
    fake: FakeAccelerator, workers: int, late_targets: bool
) -> None:
    pairs = PairedDataset(Made(COUNT, float_of), Made(COUNT, float_of))
    found: list[float] = []

    async def main() -> None:
        with fake.on(fake.new_stream()):
            async for batch in DataLoader(
                pairs, BATCH_SIZE, num_workers=workers, device="cuda", late_targets=late_targets
            ):
                inputs = fake.fetch(batch[0])
                targets = fake.fetch(await batch.wait_targets() if late_targets else batch[1])
                assert torch.equal(inputs, targets)
                found.extend(inputs.tolist())

    asyncio.run(main())
    assert found == [*range(COUNT)]


def test_whoever_awaits_what_a_pipe_gives_has_it_in_the_stream_that_is_current(fake: FakeAccelerator) -> None:
    async def main() -> list[Any]:
        with fake.on(fake.new_stream()):
            pipe = IterableWrapper([float_of(number) for number in range(8)])
            return [fake.fetch(batch).tolist() async for batch in DataLoader(pipe, 2, device="cuda")]

    assert asyncio.run(main()) == [[n, n + 1.0] for n in range(0, 8, 2)]


def float_of(number: int) -> torch.Tensor:
    return torch.tensor(float(number))


@WORKERS
def test_patching_gives_a_device_to_every_loader(fake: FakeAccelerator, workers: int) -> None:
    with shmloader.patched_torch(device="cuda"):
        loader = torch.utils.data.DataLoader(Rows(8), 4, num_workers=workers)
        assert loader.device == "cuda"  # type: ignore[attr-defined]
        found = [fake.fetch(x) for x, _ in loader]
    assert fake.copies
    assert_same(found, [x for x, _ in TorchLoader(Rows(8), 4)])


def test_frameworks_that_make_a_loader_anew_from_its_attributes_keep_the_device() -> None:
    loader = DataLoader(Rows(8), 4, device=torch.device("cuda", 1))
    again = DataLoader(Rows(8), **{name: getattr(loader, name) for name in ("batch_size", "device")})
    assert again.device == torch.device("cuda", 1)


@WORKERS
def test_arrays_stay_on_the_cpu(fake: FakeAccelerator, workers: int) -> None:
    with DataLoader(Rows(8), 4, num_workers=workers, collate_fn=array, device="cuda") as loader:
        for number, batch in enumerate(loader):
            assert isinstance(batch["array"], np.ndarray)
            assert batch["array"].tolist() == [float(number)] * 1000
            assert fake.fetch(batch["x"]).tolist() == [number * 4.0]


def array(samples: list[Any]) -> Any:
    first = float(samples[0][1])
    return {"x": torch.tensor([first]), "array": np.full(1000, first / 4)}


class Timeless:
    """A stream of a device whose events do not tell the time."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def record_event(self, event: Any = None) -> Any:
        self.asked.append(event is not None)
        if event is not None:
            raise RuntimeError("no times here")
        return object()


def test_where_events_do_not_tell_the_time_they_are_events_all_the_same() -> None:
    there, stream = accelerator.TorchAccelerator(torch.device("cpu")), Timeless()
    events = [there.record(stream) for _ in range(3)]
    assert stream.asked == [True, False, False, False]
    assert there.seconds_between(events[0], events[1]) == 0


def test_two_events_one_of_which_does_not_tell_are_no_time_apart() -> None:
    there = accelerator.TorchAccelerator(torch.device("cpu"))
    assert there.seconds_between(torch.Event("cpu"), torch.Event("cpu")) == 0
