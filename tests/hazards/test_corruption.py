"""Memory that anything can still read is not reused: children, workers, views, layouts, and what stands in for them."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader
from shmloader.memory import lease
from shmloader.memory.pool import DEBUG_PATTERN
from tests.datasets import Items
from tests.faulty import Numbers
from tests.programs import Forked, Teller

WIDTH = 1024
COUNT = 40


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """Batches of one item that is full of its index."""
    options = {"batch_size": 1, "num_workers": 2, **options}
    return DataLoader(dataset or Numbers(COUNT, WIDTH), **options)


def constant(batch: torch.Tensor) -> int:
    """The number that a batch is full of, or -1 if it is not."""
    first = int(batch.reshape(-1)[0])
    return first if bool((batch == first).all()) else -1


class Gate:
    """Lets a forked child go on."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()

    def open(self) -> None:
        os.write(self._write_end, b"x")

    def wait(self) -> None:
        os.read(self._read_end, 1)

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


# -- 1: forked children -------------------------------------------------------------------------------------------


def test_a_forked_child_reads_its_batch_whatever_the_parent_does_next(gate: Gate) -> None:
    iterator = iter(loader())
    batch = next(iterator)

    def read(teller: Teller, batch: torch.Tensor) -> None:
        gate.wait()
        teller.tell(constant(batch))

    with Forked(read, batch) as child:
        del batch
        rest = [constant(batch) for batch in iterator]
        gate.open()
        assert child.hear() == 0
    assert rest == list(range(1, COUNT))


def test_a_forked_childs_writes_do_not_reach_later_batches(gate: Gate) -> None:
    """Not even when it writes after the parent has dropped the batch, and goes on writing."""
    iterator = iter(loader())
    batch = next(iterator)

    def scribble(teller: Teller, batch: torch.Tensor) -> None:
        gate.wait()
        batch.fill_(-7)
        teller.tell("written")
        while True:
            batch.add_(1)

    with Forked(scribble, batch) as child:
        del batch
        held = [next(iterator) for _ in range(10)]
        gate.open()
        child.hear()
        seen = [constant(batch) for batch in [*held, *iterator]]
    assert seen == list(range(1, COUNT))


def test_a_process_that_is_given_a_batch_under_fork_gets_that_batch(gate: Gate) -> None:
    iterator = iter(loader())
    batch = next(iterator)
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def log(images: torch.Tensor) -> None:
        gate.wait()
        answers.put(constant(images))

    process = multiprocessing.get_context("fork").Process(target=log, args=(batch,))
    process.start()
    del batch
    assert [constant(batch) for batch in iterator] == list(range(1, COUNT))
    gate.open()
    assert answers.get() == 0
    process.join()
    process.close()
    answers.close()


def test_the_place_of_an_exposed_slot_is_made_good(gate: Gate) -> None:
    """Every batch is held by a child, one after the other: the loader neither stops nor copies."""
    source = loader(num_workers=1)
    iterator = iter(source)

    def read(teller: Teller, batch: torch.Tensor) -> None:
        gate.wait()
        teller.tell(constant(batch))

    children = [Forked(read, next(iterator)) for _ in range(8)]
    rest = [constant(batch) for batch in iterator]
    assert rest == list(range(8, COUNT))
    assert source.stats().private_copies == 0
    for _ in children:
        gate.open()  # for whichever of them comes first
    for number, child in enumerate(children):
        with child:
            assert child.hear() == number


def test_our_own_workers_give_slots_back_when_they_are_gone() -> None:
    first, second = loader(), loader(num_workers=1)
    iterator = iter(first)
    batch = next(iterator)
    other = iter(second)  # forks a worker that could read the batch
    del batch
    next(iterator)
    assert first.stats().slots["EXPOSED"] == 1
    del other
    assert constant(next(iterator)) == 2  # ends are noted in the pump
    assert "EXPOSED" not in first.stats().slots
    assert [constant(batch) for batch in iterator] == list(range(3, COUNT))


def test_a_batch_held_over_its_own_epoch_does_not_cost_the_next_one_its_slot() -> None:
    """The next epoch's workers are forked while the batch is leased; the slot comes back with their end."""
    source = loader(num_workers=1)
    for _ in range(5):
        for batch in source:
            held = batch
        assert constant(held) == COUNT - 1
    assert sum(source.stats().slots.values()) <= 6


def test_a_child_that_inherits_a_loader_fills_no_slot_of_its_parent(gate: Gate) -> None:
    """The pool that lies idle between two epochs is the parent's."""
    dataset = Shifted()
    source = loader(dataset)
    for batch in source:
        del batch  # so that nothing is leased at the fork, which would make the pool unfit for another epoch anyway

    def iterate(teller: Teller) -> None:
        gate.wait()
        dataset.shift = 1000
        teller.tell([constant(batch) for batch in list(source)])

    with Forked(iterate) as child:
        held = list(source)
        gate.open()
        assert child.hear() == list(range(1000, 1000 + COUNT))
        assert [constant(batch) for batch in held] == list(range(COUNT))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_child_that_inherits_a_loader_in_mid_epoch_iterates_afresh(persistent: bool) -> None:
    source = loader(persistent_workers=persistent)
    iterator = iter(source)
    batch = next(iterator)

    def iterate(teller: Teller) -> None:
        try:
            next(iterator)
        except RuntimeError as error:
            teller.tell(str(error))
        teller.tell([constant(batch) for batch in source])
        source.close()

    with Forked(iterate) as child:
        assert "belongs to the process that made it" in child.hear()
        assert child.hear() == list(range(COUNT))
        child.reap()
    assert constant(batch) == 0
    assert [constant(batch) for batch in iterator] == list(range(1, COUNT))
    source.close()


class Shifted(Numbers):
    """Item i is full of i + shift."""

    def __init__(self) -> None:
        super().__init__(COUNT, WIDTH)
        self.shift = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index + self.shift)


# -- 2: memory that the worker still refers to --------------------------------------------------------------------


class Caching(Numbers):
    """Caches what default_collate made of two items, and hands out parts of it for a long time."""

    def __init__(self) -> None:
        super().__init__(400, WIDTH)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        key = index // 20 * 20
        if key not in self.cache:
            self.cache[key] = default_collate([super(Caching, self).__getitem__(key + offset) for offset in range(20)])
        return self.cache[key][index - key]


class KeepsLast:
    """Returns the previous batch beside the new one."""

    def __init__(self) -> None:
        self.last: torch.Tensor | None = None

    def __call__(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor]:
        previous, self.last = self.last, default_collate(samples)
        assert self.last is not None
        return previous, self.last


class KeepsAll:
    """Keeps every batch, and complains if one of them changes."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, torch.Tensor]] = []

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        assert all(constant(batch) == number for number, batch in self.kept), "a kept batch has changed"
        batch: torch.Tensor = default_collate(samples)
        self.kept.append((constant(batch), batch))
        return batch


class KeepsSome(KeepsAll):
    """Lets go of what it kept every now and then."""

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if len(self.kept) == 3:
            self.kept.clear()
        return super().__call__(samples)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_data_set_that_caches_collated_batches_stays_right(batch_size: int) -> None:
    seen = [int(row[0]) for batch in loader(Caching(), batch_size=batch_size) for row in batch]
    assert seen == list(range(400))


@pytest.mark.parametrize("drop", [False, True])
def test_a_collate_function_that_keeps_the_previous_batch_stays_right(drop: bool) -> None:
    source = loader(num_workers=1, collate_fn=KeepsLast())
    pairs = [(previous, batch) for previous, batch in source] if not drop else list(numbers_of_pairs(source))
    for number, (previous, batch) in enumerate(pairs):
        assert (batch if drop else constant(batch)) == number
        if number:
            assert (previous if drop else constant(previous)) == number - 1


def numbers_of_pairs(source: Any) -> Iterator[tuple[int, int]]:
    """Reads the batches one by one, keeping none."""
    for previous, batch in source:
        yield -1 if previous is None else constant(previous), constant(batch)


@pytest.mark.parametrize("keeper", [KeepsAll, KeepsSome])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_collate_function_that_keeps_batches_stays_right(keeper: type[KeepsAll], workers: int) -> None:
    source = loader(num_workers=workers, collate_fn=keeper())
    batches = []
    for number, batch in enumerate(source):
        assert constant(batch) == number
        batch.fill_(-5)  # the consumer's own copy: the worker must not see this
        if number % 3 == 0:
            batches.append(batch)
    assert all(constant(batch) == -5 for batch in batches)


def test_slots_that_a_worker_kept_come_back() -> None:
    source = loader(num_workers=1, collate_fn=KeepsSome(), persistent_workers=True)
    for _ in range(3):
        assert [constant(batch) for batch in source] == list(range(COUNT))
    assert source.stats().slots.get("KEPT", 0) <= 1
    source.close()
    assert source.stats().pool_bytes == 0


# -- 7: views that outlive the tensor -----------------------------------------------------------------------------


DERIVED: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda batch: batch[0],
    "numpy": lambda batch: batch.numpy(),
    "numpy part": lambda batch: batch[:, 5:9].numpy()[::-1],
    "detached": lambda batch: batch.detach(),
    "storage": lambda batch: batch.untyped_storage(),
    "memoryview": lambda batch: memoryview(batch.numpy()),
    "dlpack": lambda batch: np.from_dlpack(batch),
    "autograd": lambda batch: Product(batch),
}


class Floats(Numbers):
    """What autograd can save."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).float()


class Product:
    """A product whose graph keeps the batch for the backward pass."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.loss = (self.weight * batch).mean()

    def number(self) -> int:
        (gradient,) = torch.autograd.grad(self.loss, self.weight, retain_graph=True)
        return int(gradient) if float(gradient).is_integer() else -1


def as_number(thing: Any) -> int:
    """The number that the memory behind the thing is full of."""
    if isinstance(thing, Product):
        return thing.number()
    if isinstance(thing, torch.UntypedStorage):
        return constant(torch.tensor([]).set_(thing))
    return constant(torch.as_tensor(thing if isinstance(thing, torch.Tensor) else np.array(thing)))


@pytest.mark.filterwarnings("ignore:the consumer holds so many batches")
@pytest.mark.parametrize("kind", DERIVED)
def test_what_is_derived_from_a_batch_keeps_its_memory(kind: str) -> None:
    source = loader(Floats(COUNT, WIDTH), slots=4)
    held = [DERIVED[kind](batch) for batch in source]
    assert [as_number(thing) for thing in held] == list(range(COUNT))
    source.close()
    del source
    gc.collect()
    assert [as_number(thing) for thing in held] == list(range(COUNT))


def test_copy_hands_out_private_memory_only() -> None:
    source = loader(copy=True)
    held = []
    for batch in source:
        assert "LEASED" not in source.stats().slots
        held.append(batch)
    assert [constant(batch) for batch in held] == list(range(COUNT))
    assert source.stats().private_copies == COUNT


def test_debug_mode_makes_a_reader_of_freed_memory_see_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    source = loader(Numbers(4, WIDTH), num_workers=1)
    iterator = iter(source)
    for _ in range(2):
        next(iterator)
    batch = next(iterator)  # its slot is nobody's afterwards: everything has been assigned
    view = batch.numpy()
    batch.share_memory_()
    assert view[0, 0] == 2
    next(iterator)
    assert set(view.tobytes()) == {DEBUG_PATTERN}


def test_debug_mode_delivers_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    held = list(loader(collate_fn=KeepsSome()))
    assert [constant(batch) for batch in held] == list(range(COUNT))


def test_without_debug_mode_freed_memory_is_not_touched() -> None:
    iterator = iter(loader(Numbers(4, WIDTH), num_workers=1))
    for _ in range(2):
        next(iterator)
    batch = next(iterator)
    address = batch.data_ptr()
    del batch
    next(iterator)
    assert ctypes.c_int64.from_address(address).value == 2


# -- 9: what is handed out is a tensor like any other ---------------------------------------------------------------


Pair = namedtuple("Pair", ["x", "y"])


def pairs(samples: list[int]) -> Any:
    """Tensors of all sorts."""
    start = samples[0]
    plain = torch.arange(start, start + 12)
    strided = torch.arange(12.0).reshape(3, 4).t()
    return {
        "plain": plain,
        "pair": Pair(strided, torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "0": start,
    }


def test_a_batch_has_no_base_and_can_be_detached_in_place() -> None:
    for batch in loader(Items(list(range(6))), collate_fn=pairs):
        for tensor in (batch["plain"], batch["pair"].x, batch["pair"].y):
            assert tensor._base is None
            assert tensor.is_leaf
            assert not tensor.requires_grad
            tensor.detach_()
            assert tensor.storage_offset() == 0
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.is_inference()


def test_writing_into_one_field_leaves_the_others_version_alone() -> None:
    for batch in loader(Items(list(range(6))), collate_fn=pairs):
        weight = torch.ones((), requires_grad=True)
        loss = (weight * batch["pair"].x).sum()
        batch["plain"].add_(1)
        loss.backward()  # would raise if the fields shared a version counter
        assert weight.grad is not None
        assert float(weight.grad) == float(batch["pair"].x.sum())


def test_writing_into_a_batch_shows_in_no_other() -> None:
    source = loader()
    held = []
    for number, batch in enumerate(source):
        assert constant(batch) == number
        batch.mul_(0).sub_(number)
        held.append(batch)
    assert [int(batch[0, 0]) for batch in held] == [-number for number in range(COUNT)]


def test_resizing_is_refused_as_torch_refuses_it() -> None:
    batch = next(iter(loader()))
    with pytest.raises(RuntimeError, match="not resizable"):
        batch.resize_(WIDTH * 100)
    assert constant(next(iter(loader()))) == 0


def test_batches_made_in_inference_mode_can_be_trained_on() -> None:
    source = loader(persistent_workers=True)
    with torch.inference_mode():
        for batch in source:
            assert not batch.is_inference()
    weight = torch.ones((), requires_grad=True)
    for batch in source:
        (weight * batch).sum().backward()
    source.close()


# -- 20: layouts ----------------------------------------------------------------------------------------------------


class Shapes(Dataset[torch.Tensor]):
    """Item i has a shape of its own out of ``kinds``."""

    def __init__(self, length: int, kinds: int) -> None:
        self.length, self.kinds = length, kinds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index % self.kinds, 3), index)


@pytest.mark.parametrize("kinds", [1, 5, 100])
@pytest.mark.parametrize("workers", [1, 2])
def test_layouts_stay_known_over_persistent_epochs(kinds: int, workers: int) -> None:
    dataset = Shapes(300, kinds)
    source = loader(dataset, num_workers=workers, persistent_workers=True)
    for _ in range(3):
        for number, batch in enumerate(source):
            assert batch.shape == (1, 1 + number % kinds, 3)
            assert constant(batch) == number
    source.close()


@pytest.mark.slow
def test_three_hundred_persistent_epochs() -> None:
    """Epoch and batch numbers of every width pass by."""
    source = loader(Numbers(3), num_workers=1, persistent_workers=True)
    for _ in range(300):
        assert [constant(batch) for batch in source] == [0, 1, 2]
    source.close()


def test_texts_in_a_batch_do_not_push_out_the_layouts_that_come_again() -> None:
    def named(samples: list[int]) -> Any:
        number = samples[0]
        return (torch.full((4,), number), f"file-{number}.png") if number % 2 else torch.full((4,), number)

    for number, batch in enumerate(loader(Items(list(range(400))), collate_fn=named, num_workers=1)):
        if number % 2:
            assert (constant(batch[0]), batch[1]) == (number, f"file-{number}.png")
        else:
            assert constant(batch) == number


def test_every_batch_has_containers_of_its_own() -> None:
    def nested(samples: list[int]) -> Any:
        return {"a": [torch.tensor(samples), {"b": []}]}

    seen = []
    for batch in loader(Items(list(range(20))), collate_fn=nested, num_workers=1):
        assert batch["a"][1] == {"b": []}
        batch["a"][1]["b"].append("mine")
        batch["new"] = 1
        seen.append(batch)
    assert [batch["a"][0].item() for batch in seen] == list(range(20))
    assert len({id(batch["a"]) for batch in seen}) == 20


@pytest.mark.slow
def test_ragged_batches_do_not_make_a_type_each() -> None:
    class Grows(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2000

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((1 + index,), index)

    before = len(lease._types)
    for number, batch in enumerate(loader(Grows(), num_workers=1)):
        assert batch.shape == (1, 1 + number)
    assert len(lease._types) - before < 60
