"""Inside a memory control group: past its limit nothing fails, the process is killed, so nothing may go past it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmloader.tuning.machine import cgroup_directories
from tests.programs import Nursery, run

MIB = 1 << 20
LIMIT_BYTES = 600 * MIB

BEYOND = """
    import os
    import sys
    from pathlib import Path

    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))

    import torch
    from shmloader import DataLoader
    from shmloader.tuning import machine
    from tests.faulty import Numbers

    left = machine.available_memory()
    assert left < int(sys.argv[2])
    # Far more than there is, were every batch of the lookahead to have a slot of its own.
    loader = DataLoader(
        Numbers(100, 1 << 20), num_workers=2, prefetch_factor=100, memory_limit=sys.argv[3] or None
    )
    most = 0
    for number, batch in enumerate(loader):
        assert batch.shape == (1, 1 << 20) and (batch == number).all()
        most = max(most, loader.stats().pool_bytes)
    assert number == 99
    print(most, left)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of its own, with a limit."""
    made = None
    reason = "there is no memory control group to make another in"
    for parent in cgroup_directories("memory"):
        made = Path(parent, f"shmloader-test-{os.getpid()}")
        try:
            made.mkdir()
            limit = "memory.max" if Path(parent, "cgroup.controllers").exists() else "memory.limit_in_bytes"
            (made / limit).write_text(str(LIMIT_BYTES))
            break
        except OSError as error:
            reason = f"no memory control group can be made here: {error}"
            with contextlib.suppress(OSError):
                made.rmdir()
            made = None
    if made is None:
        pytest.skip(reason)
    yield made
    deadline = time.monotonic() + 5
    while made.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # its last process may not be quite gone
            made.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("memory_limit", ["", "4GiB"])
def test_the_pool_stays_within_what_the_group_has_left(nursery: Nursery, group: Path, memory_limit: str) -> None:
    outcome = run(BEYOND, str(group), str(LIMIT_BYTES), memory_limit, nursery=nursery)
    assert (outcome.code, outcome.err, outcome.left) == (0, "", ())
    most, left = map(int, outcome.out.split())
    assert 0 < most <= (left if memory_limit else left // 2)
