"""The shared mapping: sparse, anonymous, reserved before it is written to, and gone without a trace."""

from __future__ import annotations

import mmap
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from shmloader.errors import PoolMemoryError
from shmloader.memory import segment as segments
from shmloader.memory.segment import LEAST_BYTES, MARGIN_BYTES, PAGE_BYTES, STEP_BYTES, Segment, address_of
from tests.programs import Teller, told_by

GIB = 1 << 30
BLOCK_BYTES = 512  # the unit of st_blocks


def segment_of(nbytes: int = 64 << 20, available: Callable[[], int] = lambda: 8 * GIB) -> Segment:
    return Segment(nbytes, available)


def resident_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * BLOCK_BYTES


def test_a_large_mapping_costs_nothing_until_a_range_is_reserved() -> None:
    segment = segment_of(16 * GIB)
    assert segment.nbytes == len(segment.map) == 16 * GIB
    assert resident_bytes(segment) == 0
    segment.reserve(GIB, 3 * PAGE_BYTES)
    assert resident_bytes(segment) == 3 * PAGE_BYTES
    segment.punch(GIB, 3 * PAGE_BYTES)
    assert resident_bytes(segment) == 0


def test_a_punched_range_reads_as_zeros_and_its_neighbours_as_before() -> None:
    segment = segment_of()
    segment.reserve(0, 3 * PAGE_BYTES)
    segment.map[: 3 * PAGE_BYTES] = b"x" * (3 * PAGE_BYTES)
    segment.punch(PAGE_BYTES, PAGE_BYTES)
    assert segment.map[:PAGE_BYTES] == segment.map[2 * PAGE_BYTES : 3 * PAGE_BYTES] == b"x" * PAGE_BYTES
    assert segment.map[PAGE_BYTES : 2 * PAGE_BYTES] == bytes(PAGE_BYTES)


def test_what_one_mapping_writes_another_reads() -> None:
    here = segment_of()
    there = Segment.attach(os.dup(here.fd), here.nbytes)
    here.map[5:8] = b"abc"
    assert there.map[5:8] == b"abc"
    assert there.address != here.address
    there.close()


def test_nothing_appears_in_dev_shm_and_the_file_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    segment = segment_of()
    segment.reserve(0, PAGE_BYTES)
    assert set(os.listdir("/dev/shm")) <= before
    assert os.fstat(segment.fd).st_nlink == 0
    assert not os.get_inheritable(segment.fd)


def test_the_address_is_that_of_the_first_byte() -> None:
    data = bytearray(b"abc")
    assert address_of(data) != 0
    segment = segment_of()
    assert segment.address == address_of(segment.map)
    assert segment.address % PAGE_BYTES == 0


# -- too little memory ------------------------------------------------------------------------------------------


def test_a_reservation_that_would_leave_too_little_is_refused_with_the_numbers_and_the_remedy() -> None:
    segment = segment_of(available=lambda: MARGIN_BYTES + PAGE_BYTES)
    with pytest.raises(PoolMemoryError) as caught:
        segment.reserve(0, 2 * PAGE_BYTES)
    for part in (2 * PAGE_BYTES, MARGIN_BYTES, "memory_limit", "prefetch_factor", "num_workers"):
        assert str(part) in str(caught.value)
    assert resident_bytes(segment) == 0


def test_memory_is_looked_at_before_every_step_and_a_later_refusal_gives_the_first_steps_back() -> None:
    left = iter([8 * GIB, 8 * GIB, MARGIN_BYTES])
    segment = segment_of(4 * STEP_BYTES, lambda: next(left))
    with pytest.raises(PoolMemoryError):
        segment.reserve(0, 3 * STEP_BYTES)
    assert resident_bytes(segment) == 0


def test_many_small_ranges_look_at_the_memory_once_a_step() -> None:
    looks: list[int] = []
    segment = segment_of(2 * STEP_BYTES, lambda: looks.append(1) or 8 * GIB)  # type: ignore[func-returns-value]
    for start in range(0, STEP_BYTES, STEP_BYTES // 64):
        segment.reserve(start, STEP_BYTES // 64)
    assert len(looks) == 1
    segment.reserve(STEP_BYTES, PAGE_BYTES)
    assert len(looks) == 2


def test_a_reservation_that_the_kernel_refuses_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    segment = segment_of()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(PoolMemoryError, match=r"could not reserve 4096 bytes for the slot pool: .*No space left"):
        segment.reserve(0, 4096)


def test_the_mapping_shrinks_until_the_address_space_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(fd: int, nbytes: int, *_: int) -> object:
        if nbytes > 5 * LEAST_BYTES:
            raise OSError(12, "Cannot allocate memory")
        return real(fd, nbytes, mmap.MAP_SHARED)

    real = mmap.mmap
    monkeypatch.setattr(segments.mmap, "mmap", scarce)
    segment = segment_of(16 * LEAST_BYTES)
    # Half of the 4 that would have fitted: something has to be left for the process itself.
    assert segment.nbytes == 2 * LEAST_BYTES == os.fstat(segment.fd).st_size


def test_without_any_address_space_there_is_an_error_and_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(segments.mmap, "mmap", none)
    with pytest.raises(PoolMemoryError, match="no address space for a slot pool of"):
        segment_of(16 * LEAST_BYTES)


@pytest.mark.slow
def test_under_a_limit_of_address_space_there_is_still_a_pool() -> None:
    def make(teller: Teller) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        teller.tell(Segment(1 << 40, lambda: 1 << 40).nbytes)

    assert 16 << 20 <= told_by(make) <= 32 << 20


# -- ending -----------------------------------------------------------------------------------------------------


def test_closing_twice_closes_once_and_what_is_mapped_stays_readable() -> None:
    segment = segment_of()
    segment.reserve(0, PAGE_BYTES)
    segment.map[0:1] = b"x"
    fd = segment.fd
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    reused = os.open(os.devnull, os.O_RDONLY)
    segment.close()
    del segment
    os.close(reused)


def test_the_mapping_goes_with_the_last_reader() -> None:
    segment = segment_of()
    segment.reserve(0, PAGE_BYTES)
    segment.map[0:3] = b"abc"
    view = memoryview(segment.map)[0:3]
    segment.close()
    del segment
    assert bytes(view) == b"abc"


def test_a_segment_refuses_to_be_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be pickled; pass its descriptor and size"):
        pickle.dumps(segment_of())
