"""Where something is scarce: descriptors, /dev/shm, address space, the memory limit, slots, memory altogether."""

from __future__ import annotations

import functools
import gc
import random
import re
import subprocess
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader import BatchTooLargeError, DataLoader, PairedDataset, PoolMemoryError, PoolWarning
from shmloader.memory.budget import MIB, PAGE_BYTES
from shmloader.tuning import machine
from tests.conftest import children
from tests.datasets import Batchwise, Made, Rows
from tests.programs import Nursery, descriptors, mappings, private_bytes, run

ignoring_pool_warnings = pytest.mark.filterwarnings("ignore::shmloader.PoolWarning")
KIB = 1024


# -- batches of given sizes ---------------------------------------------------------------------------------------


def row(sizes: Sequence[int], index: int) -> Any:
    """Sample ``index``: so many bytes that say which one it is, and the index."""
    return torch.full((sizes[index],), index % 251, dtype=torch.uint8), index


def sized(sizes: Sequence[int], **options: Any) -> DataLoader[Any]:
    """A loader whose batch *i* has ``sizes[i]`` bytes and a little."""
    return DataLoader(Made(len(sizes), functools.partial(row, sizes)), batch_size=1, **options)


def check(batch: Any, sizes: Sequence[int]) -> int:
    """Fails unless the batch is as its index says; the index."""
    data, number = batch
    index = int(number)
    assert data.shape == (1, sizes[index])
    assert bool((data == index % 251).all()), f"batch {index} has other bytes"
    return index


def drain(iterator: Iterator[Any], loader: DataLoader[Any], sizes: Sequence[int], held: int, limit: int) -> list[Any]:
    """What comes, in the order in which it comes: indices of batches, or errors.

    The consumer holds exactly ``held`` batches while it asks for the next, all of which stay right, and the pool stays
    within ``limit`` at every step.
    """
    kept: deque[tuple[int, Any]] = deque(maxlen=held)
    came: list[Any] = []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except (BatchTooLargeError, PoolMemoryError) as error:
            came.append(error.with_traceback(None))
            continue
        assert loader.stats().pool_bytes <= limit
        came.append(check(batch, sizes))
        kept.append((came[-1], batch))
        del batch
        for index, other in kept:
            assert check(other, sizes) == index
    assert loader.stats().pool_bytes <= limit
    return came


def everything(loader: DataLoader[Any], sizes: Sequence[int], held: int = 0, limit: int = 1 << 62) -> list[Any]:
    """:func:`drain` over a fresh iterator."""
    return drain(iter(loader), loader, sizes, held, limit)


def pool_files_mapped() -> int:
    """Mappings of anonymous shared files, but for the one that libffi may have."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:shmloader" in line for line in lines)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


# -- descriptors and mappings -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_three_hundred_kept_batches_take_no_descriptor_and_no_mapping_and_outlive_the_loader(ragged: bool) -> None:
    sizes = [16 * KIB + (index * 293 if ragged else 0) for index in range(300)]
    before, kept = descriptors(), []
    loader = sized(sizes, num_workers=2)
    iterator = iter(loader)
    kept += [next(iterator) for _ in range(20)]
    at_first = descriptors(), pool_files_mapped()
    mapped = mappings()
    for batch in iterator:
        kept.append(batch)
        assert (descriptors(), pool_files_mapped()) == at_first or len(kept) == len(sizes)
    assert loader.stats().private_copies == loader.stats().oversize_batches == 0
    assert mappings() - mapped < 16  # the heap's own; torch's loader needs two per batch
    del batch, iterator, loader
    gc.collect()
    assert (descriptors(), pool_files_mapped()) == (before + 1, 1)  # a mapping keeps a descriptor of its own
    assert [check(batch, sizes) for batch in kept] == list(range(300))
    kept.clear()
    assert (descriptors(), pool_files_mapped()) == (before, 0)


FEW_DESCRIPTORS = """
    import resource
    import torch
    from shmloader import DataLoader
    from tests.datasets import Made, as_is
    from tests.equal import assert_same

    def sample(index):
        return {f"key{k}": torch.full((k + 1, 5), index * 10 + k) for k in range(7)}

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    dataset, options = Made(1280, sample), {"batch_size": 16, "collate_fn": as_is}
    kept = []
    ours = iter(DataLoader(dataset, num_workers=2, **options))
    for theirs in torch.utils.data.DataLoader(dataset, **options):
        kept.append(next(ours))
        assert_same(kept[-1], theirs)
    assert next(ours, None) is None and len(kept) == 80
    print("done")
"""


@pytest.mark.slow
def test_batches_of_a_hundred_tensors_do_with_64_descriptors(nursery: Nursery) -> None:
    outcome = run(FEW_DESCRIPTORS, nursery=nursery)
    assert (outcome.code, outcome.out, outcome.err, outcome.left) == (0, "done\n", "", ())


# -- a tiny /dev/shm ----------------------------------------------------------------------------------------------

MOUNT = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def in_tiny_shm() -> tuple[str, ...]:
    """What a command is started with so that it sees a /dev/shm of 64 KiB."""
    for flags in ("-m", "-rm"):
        before = ("unshare", flags, "sh", "-c", MOUNT, "sh")
        try:
            tried = subprocess.run([*before, "true"], capture_output=True, timeout=10, check=False)
        except FileNotFoundError:
            pytest.skip("there is no unshare on this machine")
        if tried.returncode == 0:
            return before
    pytest.skip(f"mount namespaces are not permitted here: {tried.stderr.decode().strip()}")


TINY_SHM = """
    import os
    import sys
    import torch
    from torch.utils.data import default_collate
    from shmloader import DataLoader
    from tests.datasets import Made

    def plain(index):
        return torch.full((1 << 17,), index % 251, dtype=torch.uint8), index

    def collated(index):
        return default_collate([torch.full((1 << 16,), index % 251, dtype=torch.uint8)] * 2), index

    def batches(sample, method, workers):
        kept = []
        for data, indices in DataLoader(Made(160, sample), 8, num_workers=workers, multiprocessing_context=method):
            kept = [*kept[-4:], (data, indices)]
            assert os.listdir("/dev/shm") == [] and data.nbytes == 1 << 20
            for data, indices in kept:
                assert (data.reshape(8, -1) == (indices % 251)[:, None]).all()
        return int(indices[-1])

    def main():
        shm = os.statvfs("/dev/shm")
        assert shm.f_blocks * shm.f_frsize == 64 * 1024
        # What of a worker's start lies in /dev/shm shows with one worker, and a spawned one imports torch for seconds.
        ways = (plain, "fork", 2), (collated, "fork", 2), (collated, "forkserver", 2), (plain, "spawn", 1)
        print([batches(*way) for way in ways])

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_needs_room_in_dev_shm_under_any_start_method(in_tiny_shm: tuple[str, ...]) -> None:
    outcome = run(TINY_SHM, before=in_tiny_shm, timeout_s=100)
    assert (outcome.code, outcome.out, outcome.err, outcome.left) == (0, f"{[159] * 4}\n", "", ())


# -- a limit of few batches ---------------------------------------------------------------------------------------

LARGEST = MIB
RAGGED = {
    "growing": [4 * KIB + index * (LARGEST - 4 * KIB) // 39 for index in range(40)],
    "shrinking": [4 * KIB + index * (LARGEST - 4 * KIB) // 39 for index in reversed(range(40))],
    "random": [*random.Random(0).sample(range(1, LARGEST), 39), LARGEST],
}


@pytest.mark.slow
@ignoring_pool_warnings
@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_sizes_under_a_limit_of_twice_the_largest_batch(name: str, held: int) -> None:
    sizes, limit = RAGGED[name], 2 * LARGEST
    loader = sized(sizes, num_workers=2, memory_limit=limit)
    assert everything(loader, sizes, held, limit) == list(range(40))
    assert loader.stats().batches == 40


@ignoring_pool_warnings
@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("held", [1, 2, 9])
@pytest.mark.parametrize("in_order", [True, False])
def test_any_number_of_held_batches_and_workers_get_by_with_six_slots(held: int, workers: int, in_order: bool) -> None:
    sizes = [8 * KIB] * 60
    loader = sized(sizes, num_workers=workers, slots=6, in_order=in_order)
    came = everything(loader, sizes, held)
    assert (came if in_order else sorted(came)) == list(range(60))
    assert sum(loader.stats().slots.values()) <= 6


@pytest.mark.slow
@ignoring_pool_warnings
def test_two_iterators_at_a_time_share_one_limit() -> None:
    sizes, limit = [200 * KIB + index * 1000 for index in range(40)], MIB
    loader = sized(sizes, num_workers=2, memory_limit=limit)
    one, two = iter(loader), iter(loader)
    count = 0
    for a, b in zip(one, two):
        assert check(a, sizes) == check(b, sizes) == count
        assert one._pool.ledger.carved_bytes + two._pool.ledger.carved_bytes <= limit
        count += 1
    assert count == 40


class Blocks:
    """A batch sampler: ``count`` times so many consecutive indices."""

    def __init__(self, count: int, each: int) -> None:
        self.count, self.each = count, each

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(n * self.each, (n + 1) * self.each)) for n in range(self.count))


OUTLIER = 60


def one_huge(indices: list[int]) -> torch.Tensor:
    """The indices, which are 256 KiB in each batch but for one of 10 MiB."""
    number = indices[0] // len(indices)
    width = 40 if number == OUTLIER else 1
    return torch.tensor(indices, dtype=torch.int64)[:, None].expand(-1, width).clone()


def identity(batch: Any) -> Any:
    """A collate function."""
    return batch


@pytest.mark.slow
@ignoring_pool_warnings
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_long_lookahead_and_large_batches_and_an_outlier_and_a_held_batch_keep_to_the_limit(seeding: str) -> None:
    each, limit = 32768, 32 * MIB
    loader = DataLoader(
        Batchwise(160 * each, one_huge),
        batch_sampler=Blocks(160, each),
        collate_fn=identity,
        num_workers=2,
        prefetch_factor=1000,
        memory_limit=limit,
        seeding=seeding,
    )
    held = None
    for number, batch in enumerate(loader):
        assert loader.stats().pool_bytes <= limit
        assert batch.shape == (each, 40 if number == OUTLIER else 1)
        assert batch[0, -1] == number * each
        assert batch[-1, 0] == (number + 1) * each - 1
        if number in (3, OUTLIER):
            held = batch
        assert held is None or held[1, 0] == held[0, 0] + 1
    assert number == 159


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "in_order"), [(1, True), (2, False), (3, True), (4, True), (4, False)])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_list_of_ten_times_as_many_batches_as_fit_is_right_and_warns_once(
    seeding: str, workers: int, in_order: bool
) -> None:
    sizes, limit = [255 * KIB] * 40, 4 * 288 * KIB
    loader = sized(sizes, num_workers=workers, memory_limit=limit, seeding=seeding, in_order=in_order)
    batches = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        for batch in loader:
            batches.append(batch)
            assert loader.stats().pool_bytes <= limit
    came = [check(batch, sizes) for batch in batches]
    assert (came if in_order else sorted(came)) == list(range(40))
    assert [warning.category for warning in caught] == [PoolWarning], [str(warning.message) for warning in caught]
    stats = loader.stats()
    assert 36 <= stats.private_copies + stats.oversize_batches <= 40
    assert stats.private_copies > 0


# -- a limit of less than one batch -------------------------------------------------------------------------------

TOO_LARGE: dict[str, set[int]] = {
    "in the middle": {4},
    "first": {0},
    "last": {9},
    "several": {2, 3, 7},
    "all": set(range(10)),
}


def needed(error: Any, number: int, limit: int) -> int:
    """The bytes that the error names, if it is about that batch and names the limit and the option."""
    assert isinstance(error, BatchTooLargeError)
    match = re.match(rf"batch {number} needs (\d+) bytes, more than memory_limit allows \({limit} bytes\)", str(error))
    assert match, error
    remedy = re.search(r"raise memory_limit to at least (\d+),", str(error))
    assert remedy, error
    assert int(remedy[1]) >= int(match[1])
    return int(remedy[1])


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"in_order": False}], ids=str)
@pytest.mark.parametrize("where", TOO_LARGE)
def test_a_batch_over_the_limit_is_an_error_at_its_turn_and_all_others_arrive(
    where: str, options: dict[str, Any]
) -> None:
    large, limit = TOO_LARGE[where], MIB
    sizes = [2 * MIB if index in large else 16 * KIB for index in range(10)]
    loader = sized(sizes, num_workers=2, memory_limit=limit, **options)
    for _ in range(2):
        came = everything(loader, sizes, 1, limit)
        assert len(came) == 10
        if options.get("in_order", True):
            errors = {turn: error for turn, error in enumerate(came) if not isinstance(error, int)}
            assert set(errors) == large
            assert all(2 * MIB <= needed(error, turn, limit) <= 9 / 8 * 2 * MIB for turn, error in errors.items())
        numbers = [index for index in came if isinstance(index, int)]
        assert sorted(numbers) == [index for index in range(10) if index not in large]
        assert loader.stats().oversize_batches == 0
    loader.close()


@ignoring_pool_warnings
@pytest.mark.parametrize("held", [0, 1, 3])
def test_a_limit_of_what_the_error_asks_for_is_enough(held: int) -> None:
    sizes = [2 * MIB - 5 if index % 3 == 1 else 16 * KIB for index in range(20)]
    errors = [e for e in everything(sized(sizes, num_workers=2, memory_limit=MIB), sizes) if not isinstance(e, int)]
    limit = needed(errors[0], 1, MIB)
    loader = sized(sizes, num_workers=2, memory_limit=limit)
    assert everything(loader, sizes, held, limit) == list(range(20))


# -- the default budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("large", "in_order"),
    [((0,), True), ((20,), True), ((20, 21), True), ((10, 14, 18, 22), True), ((10, 14, 18, 22), False)],
    ids=str,
)
def test_a_batch_over_the_default_budget_travels_alone_and_leaves_the_pool_to_the_others(
    monkeypatch: pytest.MonkeyPatch, large: tuple[int, ...], in_order: bool
) -> None:
    monkeypatch.setattr("shmloader.loader._default_budget", lambda: 4 * MIB)
    sizes = [8 * MIB if index in large else 64 * KIB for index in range(60)]
    loader = sized(sizes, num_workers=2, in_order=in_order)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        came = everything(loader, sizes, 1, 4 * MIB)
    assert (came if in_order else sorted(came)) == list(range(60))
    assert [warning.category for warning in caught] == [PoolWarning]
    assert f"batch {large[0]} " in str(caught[0].message) or not in_order
    stats = loader.stats()
    assert (stats.oversize_batches, stats.private_copies) == (len(large), 0)
    assert stats.pool_bytes <= 10 * 72 * KIB


# -- memory of the workers' own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_what_the_first_batches_took_before_there_was_a_slot_is_given_back(late: bool) -> None:
    assert _heap_of_a_worker(MIB, late) < _heap_of_a_worker(16, late) + 4 * MIB  # of 8 MiB that a batch has


def _heap_of_a_worker(item_bytes: int, late: bool) -> int:
    """Bytes that are a worker's alone, after some batches of eight items that lie in memory already."""
    items = [torch.full((item_bytes,), number, dtype=torch.uint8) for number in range(8)] * 8
    pairs = PairedDataset(items, items)
    with DataLoader(pairs, 8, num_workers=1, persistent_workers=True, late_targets=late) as loader:
        for inputs, targets in loader:
            assert torch.equal(inputs, targets)
        (worker,) = loader._iterator._workers
        return private_bytes(worker.pid)


# -- no memory at all ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"memory_limit": "4MiB"}, {"in_order": False}, {"slots": 2}], ids=str)
def test_where_no_memory_is_left_every_batch_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    sizes = [16 * KIB] * 12
    loader = sized(sizes, num_workers=2, **options)
    came = everything(loader, sizes)
    assert [type(error) for error in came] == [PoolMemoryError] * 12
    for part in (
        "batch 0 needs 16448 bytes",
        "only 0 are left on this machine or in its container",
        "make batches smaller",
    ):
        assert part in str(came[0])
    assert loader.stats().pool_bytes == 0


@ignoring_pool_warnings
@pytest.mark.slow
@pytest.mark.parametrize("held", [0, 2])
def test_memory_that_runs_out_in_mid_epoch_is_made_do_with_and_used_again_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    left = [1 << 40]
    monkeypatch.setattr(machine, "available_memory", lambda: left[0])
    monkeypatch.setattr("shmloader.memory.segment.STEP_BYTES", 64 * KIB)  # how far one look at the memory is good for
    sizes = [256 * KIB if index < 10 else 2 * MIB for index in range(40)]
    loader = sized(sizes, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    kept = deque([next(iterator) for _ in range(5)], maxlen=held)
    left[0] = 0
    came = [check(batch, sizes) for batch in (next(iterator) for _ in range(3))]
    with pytest.raises(PoolMemoryError, match="only 0 are left"):
        drain_to_error(iterator, sizes)
    left[0] = 1 << 40
    rest = drain(iterator, loader, sizes, held, 1 << 62)
    assert came == [5, 6, 7]
    assert rest[-20:] == list(range(20, 40))
    del kept


def drain_to_error(iterator: Iterator[Any], sizes: Sequence[int]) -> None:
    """Take batches until one is an error, which is raised."""
    for batch in iterator:
        check(batch, sizes)


# -- address space ------------------------------------------------------------------------------------------------

LITTLE_ADDRESS_SPACE = """
    import resource
    import sys
    import warnings
    import torch
    from shmloader import DataLoader
    from tests.datasets import Rows

    def address_space():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()

    def main(method, limit):
        list(DataLoader(Rows(4), num_workers=1))  # whatever is mapped once and for all
        room = address_space() + 512 * (1 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        loader = DataLoader(Rows(4000, 1000), 100, num_workers=2, memory_limit=limit, multiprocessing_context=method)
        iterator, kept = iter(loader), []
        for number, (rows, indices) in enumerate(iterator):
            assert indices.tolist() == list(range(100 * number, 100 * number + 100))
            assert (rows == indices[:, None]).all()
            kept = [*kept[-3:], rows]
        assert number == 39 and loader.stats().private_copies == 0
        print(iterator._pool.segment.nbytes >> 20)

    if __name__ == "__main__":
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [(), ("64GiB",)], ids=["default", "64GiB"])
def test_under_a_limit_of_address_space_the_pool_shrinks_and_works(nursery: Nursery, limit: tuple[str, ...]) -> None:
    outcome = run(LITTLE_ADDRESS_SPACE, "fork", *limit, nursery=nursery)
    assert (outcome.code, outcome.err, outcome.left) == (0, "", ())
    assert 1 <= int(outcome.out) < 512


# -- a large data set under a warm fork server --------------------------------------------------------------------

LARGE_DATASET = """
    import json
    import multiprocessing
    import multiprocessing.reduction
    import time

    sent, dump = [], multiprocessing.reduction.dump

    def measured(obj, file, protocol=None):
        before = file.tell()
        dump(obj, file, protocol)
        sent.append(file.tell() - before)

    def main():
        # In here: a main module that imports torch costs each child some 50 MB, whatever the fork server has imported.
        import torch
        from shmloader import DataLoader
        from tests.datasets import Items, Rows
        from tests.programs import private_bytes

        context = multiprocessing.get_context("forkserver")
        list(DataLoader(Rows(4), num_workers=1, multiprocessing_context=context))
        multiprocessing.reduction.dump = measured
        items = [torch.full((62500,), float(index)) for index in range(200)]
        loader = DataLoader(Items(items), num_workers=2, multiprocessing_context=context)
        started = time.perf_counter()
        iterator = iter(loader)
        took = (time.perf_counter() - started) / 2
        assert [float(next(iterator)[0, 0]) for _ in range(2)] == [0, 1]
        private = [private_bytes(process.pid) for process in iterator._workers]
        print(json.dumps([sum(sent), took, max(private), len(sent)]))

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
def test_a_large_data_set_reaches_workers_of_a_warm_fork_server_through_no_pipe_and_no_copy(
    nursery: Nursery, record_property: Callable[[str, object], None]
) -> None:
    outcome = run(LARGE_DATASET, nursery=nursery)
    assert (outcome.code, outcome.err, outcome.left) == (0, "", ())
    sent, start_s, private, pieces = outcome.out.strip("[]\n").split(", ")
    record_property("start_s", start_s)
    assert int(pieces) == 4  # for each worker what multiprocessing prepares, and the process itself
    assert int(sent) < 64 * KIB
    assert int(private) < 20 * MIB


# -- many beginnings ----------------------------------------------------------------------------------------------


def take_one(loader: DataLoader[Any]) -> None:
    """Only the first batch of each worker: one that nobody waits for might lag behind by ever more epochs."""
    iterator = iter(loader)
    rows, _ = next(iterator)
    assert rows[1, 0] == 1
    next(iterator)


def break_early(loader: DataLoader[Any]) -> None:
    """A few batches, and what is under way is left."""
    for number, (_, indices) in enumerate(loader):
        assert indices.tolist() == [4 * number, 4 * number + 1, 4 * number + 2, 4 * number + 3]
        if number == 3:
            break


@pytest.mark.slow
@pytest.mark.parametrize(("times", "begin"), [(30, take_one), (20, break_early)])
@pytest.mark.parametrize("persistent", [False, True])
def test_beginning_again_and_again_leaves_nothing_behind(
    times: int, begin: Callable[[DataLoader[Any]], None], persistent: bool
) -> None:
    loader = DataLoader(Rows(400, 16 * KIB), 4, num_workers=2, persistent_workers=persistent)

    def held() -> tuple[int, ...]:
        gc.collect()
        return len(list(children())), descriptors(), pool_files_mapped()

    for _ in range(5):
        begin(loader)
    at_first, mapped, resident = held(), mappings(), resident_bytes()
    for _ in range(times):
        begin(loader)
    assert held() == at_first
    assert mappings() - mapped < 8
    assert resident_bytes() - resident < 4 * MIB
    assert loader.stats().pool_bytes <= 20 * 288 * KIB
