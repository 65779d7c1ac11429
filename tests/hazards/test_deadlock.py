"""Nothing hangs, nothing is lost: message sizes, sends that would block, batches without a slot, several iterators."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from shmloader import BatchTooLargeError, DataLoader
from tests.equal import assert_same
from tests.faulty import Faults, Numbers
from tests.programs import within

MIB = 1 << 20
HELD = "ignore:the consumer holds so many batches:shmloader.PoolWarning"
OVERSIZE = "ignore:batch .* found no room in the slot pool:shmloader.PoolWarning"


def identity(samples: Any) -> Any:
    """A collate function."""
    return samples


class Echo(Dataset[Any]):
    """Item i is i, whatever that is, and its type's name."""

    def __init__(self, length: int = 100) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return index, type(index).__name__


class Given(Sampler[Any]):
    """Yields what it was given."""

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)


# -- 11: messages of any size -------------------------------------------------------------------------------------


def test_65536_indices_for_one_batch() -> None:
    seen = list(DataLoader(range(200_000), batch_size=65_536, num_workers=2))  # type: ignore[arg-type]
    assert [len(batch) for batch in seen] == [65_536, 65_536, 65_536, 3392]
    assert torch.equal(torch.cat(seen), torch.arange(200_000))


class Blobs(Dataset[Any]):
    """Item i is 100 kB of bytes, of one kind or another."""

    kinds = (bytes, bytearray, lambda text: text.decode("latin-1"))

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        return self.kinds[self.kind](bytes([index]) * 100_000)


@pytest.mark.parametrize("kind", range(3))
def test_8_times_100_kb_of_bytes_or_text_for_one_batch(kind: int) -> None:
    blobs = Blobs(kind)
    for number, batch in enumerate(DataLoader(blobs, 8, num_workers=2, collate_fn=identity)):
        assert_same(batch, [blobs[index] for index in range(8 * number, 8 * number + 8)])


def test_a_text_of_ten_million_letters() -> None:
    text = "ä€😀 " * 2_500_000
    (batch,) = DataLoader([text], None, num_workers=1)  # type: ignore[arg-type]
    assert batch == text


@pytest.mark.parametrize("length", [1000, 1_000_000])
def test_a_sampler_that_yields_elements_of_a_permutation(length: int) -> None:
    """Each element is a view of one large tensor, of which only its own bytes may travel."""
    permutation = torch.randperm(length)[:1000]
    theirs = TorchLoader(Echo(length), sampler=Given(permutation), batch_size=10, collate_fn=identity)
    with within(20):
        ours = list(DataLoader(Echo(length), 10, sampler=Given(permutation), num_workers=2, collate_fn=identity))
    assert_same(ours, list(theirs))
    assert ours[0][0][1] == "Tensor"


INDICES: dict[str, list[Any]] = {
    "pairs": [(index, index + 1) for index in range(6)],
    "texts": ["a", "b", "ä" * 100_000, ""],
    "huge": [2**63 - 1, 2**63, -(2**70), 0],
    "mixed": [1, True, 2.5, None],
    "numpy": list(torch.arange(6).numpy()),
    "slices": [slice(0, 3), slice(3, None, 2)],
    "bools": [True, False, True],
    "tensors": list(torch.arange(6)),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("batched", [False, True])
def test_an_index_arrives_as_it_was_drawn(name: str, batched: bool) -> None:
    sampler = Given(INDICES[name])
    options: dict[str, Any] = {"batch_size": 2} if batched else {"batch_size": None}
    ours = DataLoader(Echo(), sampler=sampler, num_workers=1, collate_fn=identity, **options)
    theirs = TorchLoader(Echo(), sampler=sampler, collate_fn=identity, **options)
    assert_same(list(ours), list(theirs))


# -- 12: sends that would block -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_deep_lookahead_does_not_block() -> None:
    seen = [int(batch[0, 0]) for batch in DataLoader(Numbers(3000), num_workers=2, prefetch_factor=1000)]
    assert seen == list(range(3000))


@pytest.mark.slow
def test_a_deep_lookahead_with_long_indices_and_long_answers_does_not_block() -> None:
    """Both directions are full at once: 10 kB of indices each way, and errors of 20 kB back."""
    iterator = iter(DataLoader(Faults(400_000, 20_000), batch_size=1000, num_workers=2, prefetch_factor=100))
    for number in range(400):
        with pytest.raises(ValueError, match=rf"ValueError: {number * 1000}:xxx"):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_worker_with_answers_that_find_no_room_still_stops() -> None:
    iterator = iter(DataLoader(Faults(100, 300_000), num_workers=2, prefetch_factor=20))
    with pytest.raises(ValueError, match="0:xxx"):
        next(iterator)
    with within(2.0):
        del iterator


# -- 13: no slot for a batch --------------------------------------------------------------------------------------


class Sized(Dataset[torch.Tensor]):
    """Item i has the i-th size in bytes, and is full of i."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)


def check(batch: torch.Tensor, sizes: list[int], index: int) -> None:
    """The batch is item ``index`` alone."""
    assert batch.shape == (1, sizes[index])
    assert bool((batch == index % 251).all()), f"batch {index} is damaged"


@pytest.mark.slow
@pytest.mark.filterwarnings(HELD, OVERSIZE)
@pytest.mark.parametrize(("large", "held"), [(5 * MIB, 1), (10 * MIB, 3), (31 * MIB // 2, 0), (31 * MIB // 2, 100)])
def test_one_large_batch_among_small_ones_under_a_small_budget(large: int, held: int) -> None:
    sizes = [MIB // 4] * 8 + [large] + [MIB // 4] * 15 + [large] + [MIB // 4] * 3
    kept: list[tuple[int, torch.Tensor]] = []
    with within(30):
        for index, batch in enumerate(DataLoader(Sized(sizes), num_workers=2, memory_limit="16MiB")):
            check(batch, sizes, index)
            kept = [*kept, (index, batch)][-held:] if held else []
    for index, batch in kept:
        check(batch, sizes, index)


@pytest.mark.slow
@pytest.mark.filterwarnings(HELD, OVERSIZE)
@pytest.mark.parametrize(("seed", "in_order"), [(1, True), (2, False)])
def test_ragged_sizes_with_a_budget_of_twice_the_largest(seed: int, in_order: bool) -> None:
    draw = random.Random(seed)
    sizes = [int(2 ** draw.uniform(0, 21)) for _ in range(100)]
    kept: list[tuple[int, torch.Tensor]] = []
    source = DataLoader(Sized(sizes), num_workers=3, memory_limit=2 * 2**21, in_order=in_order)
    seen = []
    with within(30):
        for batch in source:
            index = next(i for i, size in enumerate(sizes) if size == batch.shape[1] and batch[0, 0] == i % 251)
            check(batch, sizes, index)
            seen.append(index)
            kept = [*kept, (index, batch)][-draw.randrange(1, 5) :]
            for number, one in kept:
                check(one, sizes, number)
    assert sorted(seen) == list(range(100))


@pytest.mark.filterwarnings(HELD, OVERSIZE)
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_ends_while_workers_wait_for_space(persistent: bool) -> None:
    sizes = [MIB // 4] * 4 + [3 * MIB // 4] * 8
    source = DataLoader(Sized(sizes), num_workers=2, memory_limit="1MiB", persistent_workers=persistent)
    held = []
    for _ in range(4):
        for index, batch in enumerate(source):
            check(batch, sizes, index)
            held.append((index, batch))
            if index == 5:
                break
    for index, batch in held:
        check(batch, sizes, index)
    with within(2.0):
        source.close()


def test_batches_over_the_limit_out_of_order() -> None:
    sizes = [3 * MIB if index % 3 == 0 else 1000 + index for index in range(30)]
    iterator = iter(DataLoader(Sized(sizes), num_workers=3, memory_limit="2MiB", in_order=False))
    seen, errors = [], 0
    for _ in range(30):
        try:
            seen.append(next(iterator).shape[1] - 1000)
        except BatchTooLargeError:
            errors += 1
    assert errors == 10
    assert sorted(seen) == [index for index in range(30) if index % 3]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.filterwarnings(HELD, OVERSIZE)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots_are_enough(slots: int) -> None:
    source = DataLoader(Numbers(60), num_workers=3, slots=slots)
    held = list(source)
    assert [int(batch[0, 0]) for batch in held] == list(range(60))


# -- 14: several iterators ----------------------------------------------------------------------------------------


def numbers(iterator: Any) -> list[int]:
    """First number of every batch."""
    return [int(batch[0, 0]) for batch in iterator]


@pytest.mark.filterwarnings(HELD, OVERSIZE)
@pytest.mark.parametrize("options", [{}, {"slots": 2}, {"memory_limit": MIB}])
def test_a_loader_zipped_with_itself(options: dict[str, Any]) -> None:
    source = DataLoader(Numbers(60), num_workers=2, **options)
    with within(20):
        pairs = list(zip(source, source, strict=True))
    assert [(int(one[0, 0]), int(other[0, 0])) for one, other in pairs] == [(index, index) for index in range(60)]


def test_a_persistent_loader_has_one_iterator_as_torchs_has() -> None:
    source = DataLoader(Numbers(20), num_workers=2, persistent_workers=True)
    assert iter(source) is iter(source)
    pairs = [(int(one[0, 0]), int(other[0, 0])) for one, other in zip(source, source, strict=True)]
    assert pairs == [(index, index + 1) for index in range(0, 20, 2)]
    source.close()


def test_five_iterators_of_one_loader_at_different_paces() -> None:
    source = DataLoader(Numbers(30), num_workers=1)
    iterators = [iter(source) for _ in range(5)]
    seen: list[list[int]] = [[] for _ in iterators]
    for step in itertools.count():
        if all(len(one) == 30 for one in seen):
            break
        for pace, (iterator, one) in enumerate(zip(iterators, seen, strict=True)):
            if step % (pace + 1) == 0 and len(one) < 30:
                one.append(int(next(iterator)[0, 0]))
    assert seen == [list(range(30))] * 5


def test_an_iterator_that_is_made_before_the_old_one_is_dropped() -> None:
    source = DataLoader(Numbers(20), num_workers=2)
    iterator = iter(source)
    for _ in range(5):
        next(iterator)
        iterator = iter(source)
    assert numbers(iterator) == list(range(20))


@pytest.mark.slow
def test_two_threads_with_a_loader_each() -> None:
    seen: dict[int, list[int]] = {}
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            source = DataLoader(Numbers(200), num_workers=2)
            for _ in range(3):
                seen[name] = numbers(source)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive(), "a thread hangs"
    assert not errors
    assert seen == {0: list(range(200)), 1: list(range(200))}


def test_a_loader_inside_the_loop_of_another() -> None:
    outer, inner = DataLoader(Numbers(6), num_workers=1), DataLoader(Numbers(5), num_workers=1)
    assert [(int(batch[0, 0]), numbers(inner)) for batch in outer] == [(index, list(range(5))) for index in range(6)]


class Shards(IterableDataset[torch.Tensor]):
    """As many items as it is told, none for the second worker."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return iter([torch.tensor([index]) for index in range(0 if info.id == 1 else 7)])


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterable_data_set_whose_second_shard_is_empty(persistent: bool) -> None:
    ours = DataLoader(Shards(), batch_size=2, num_workers=3, persistent_workers=persistent)
    theirs = TorchLoader(Shards(), batch_size=2, num_workers=3, persistent_workers=persistent)
    for _ in range(3):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]
    ours.close()
    del theirs
