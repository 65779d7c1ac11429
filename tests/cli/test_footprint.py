"""What the process tree holds."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shmloader.cli import footprint

pytestmark = pytest.mark.skipif(not footprint.readable(), reason="needs Linux's /proc")

BLOCK = 64 * 2**20  # bytes


def test_memory_that_two_processes_share_counts_once() -> None:
    before = footprint.tree_bytes()
    with mmap.mmap(-1, BLOCK) as shared:
        for _ in range(0, BLOCK, 2**20):  # in pieces: an allocator may keep a block of that size
            shared.write(b"x" * 2**20)
        alone = footprint.tree_bytes() - before
        with reader_of(shared):
            together = footprint.tree_bytes() - before
    assert 0.9 * BLOCK < alone < 1.2 * BLOCK
    assert 0.9 * BLOCK < together < 1.5 * BLOCK


@contextmanager
def reader_of(shared: mmap.mmap) -> Iterator[None]:
    """A child process that has read all of it."""
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        shared.seek(0)
        for _ in range(0, BLOCK, 2**20):
            shared.read(2**20)
        os.write(tell, b"x")
        signal.pause()
    os.read(told, 1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


def test_descriptors_count_what_is_open() -> None:
    before = footprint.descriptors()
    with open(os.devnull), open(os.devnull):
        assert footprint.descriptors() == before + 2
    assert footprint.descriptors() == before


@pytest.mark.slow
def test_processor_time_counts_the_children() -> None:
    before = footprint.tree_cpu_s()
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        while time.process_time() < 0.2:  # starts at 0 in a child
            pass
        os.write(tell, b"x")
        signal.pause()
    os.read(told, 1)
    spent = footprint.tree_cpu_s() - before
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)
    assert spent >= 0.17  # the clock ticks every 10 ms, one count for each process
