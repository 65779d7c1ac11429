"""Every test leaves the process as it found it: no child, thread, descriptor, mapping or /dev/shm entry more."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from torch.utils.data._utils.collate import default_collate_fn_map

from tests.programs import Nursery

PATIENCE_S = 2.0  # for workers told to stop, feeder threads and finalizers
PAUSE_S = 0.02  # between two looks
FAILED = pytest.StashKey[bool]()
HELPERS = ("multiprocessing.forkserver import main", "multiprocessing.resource_tracker import main")
READS_PROC = sys.platform.startswith("linux")

# The same examples at every run, and no verdict that depends on how fast the machine is just now.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with other people's frameworks are left out unless ``-m`` names them, whatever else it asks for.

    The command line's tests come last: photographs and an optimiser double what every later fork has to copy.
    """
    if "frameworks" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("frameworks")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.parent.name == "cli")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where programs are born that need no fresh interpreter."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def what_was_imported_is_not_searched() -> None:
    """Takes all that lives between two modules out of collections, each of which would walk through it for long.

    Forked workers gain as well: a collection there would copy every page that it walks through.
    """
    gc.collect()  # or a dead cycle would never be found
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remembers a failed test: its traceback keeps loaders alive, which is no leak of its own."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def restored_map() -> Iterator[None]:
    """What a test registers with torch's collate is forgotten after it."""
    before = dict(default_collate_fn_map)
    yield
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which something is left that was not there before."""
    before = holdings()
    yield
    if request.node.stash.get(FAILED, False):
        return
    leaked = holdings() - before
    deadline = time.monotonic() + PATIENCE_S
    while leaked and time.monotonic() < deadline:
        gc.collect()
        stop_resource_sharer()
        time.sleep(PAUSE_S)
        leaked &= holdings() - before  # what comes and goes in /dev/shm belongs to other processes
    if request.node.get_closest_marker("gpu"):  # a driver opens devices, sockets and pipes at its first use
        leaked = Counter({what: n for what, n in leaked.items() if not what.startswith("descriptor")})
    if leaked:
        things = (f"{n} x {what}{details(what)}" for what, n in sorted(leaked.items()))
        pytest.fail(f"the test leaves behind: {'; '.join(things)}", pytrace=False)


def stop_resource_sharer() -> None:
    """Ends the thread that multiprocessing keeps once a tensor went through a queue, as torch's own loader makes it."""
    if sharer := sys.modules.get("multiprocessing.resource_sharer"):
        sharer.stop(timeout=PATIENCE_S)


def holdings() -> Counter[str]:
    """What the process holds at this moment, as countable lines of text."""
    held: Counter[str] = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    if READS_PROC:
        held.update(children())
        held.update(descriptors())
        held.update(memory_files_mapped())
    if os.path.isdir("/dev/shm"):
        # Semaphores belong to torch's own loader, here or in another process: this project makes none.
        names = (name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
        held.update(f"/dev/shm entry {name}" for name in names)
    return held


def children() -> Iterator[str]:
    """Child processes and the helpers' children (workers under forkserver), but not multiprocessing's helpers."""
    for pid in children_of(os.getpid()):
        if any(helper in command_of(pid) for helper in HELPERS):
            yield from (f"child of the fork server {worker}" for worker in children_of(pid))
        else:
            yield f"child {pid}"


def details(what: str) -> str:
    """For a child its command line, which a zombie has no more."""
    return f" ({command_of(int(what.split()[-1])) or 'a zombie'})" if what.startswith("child") else ""


def children_of(pid: int) -> list[int]:
    """The pids of a process's children."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:  # the thread ended meanwhile
            continue
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def descriptors() -> Iterator[str]:
    """Open descriptors by kind, those of multiprocessing's helpers left out."""
    helpers = {
        multiprocessing.forkserver._forkserver._forkserver_alive_fd,
        multiprocessing.resource_tracker._resource_tracker._fd,
    }
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in helpers:
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # the listing's own descriptor
                continue
            yield f"descriptor of kind {kind_of(target)}"


def kind_of(target: str) -> str:
    """A descriptor's target without what differs between two of a kind."""
    if target.startswith("/memfd:"):
        return "memfd"
    if match := re.match(r"anon_inode:\[?(\w+)", target):
        return match[1]  # pidfd, eventpoll, eventfd, ...
    if match := re.match(r"(socket|pipe):", target):
        return match[1]
    return f"file {target}"


def memory_files_mapped() -> set[str]:
    """Anonymous shared files that are mapped, whether or not a descriptor is left; libffi keeps one of its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    fields = [line.split(maxsplit=5) for line in lines if "/memfd:" in line and "/memfd:libffi" not in line]
    return {f"mapping of {path} (inode {inode})" for *_, inode, path in fields}
