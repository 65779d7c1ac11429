"""What this process and its children hold and spend: memory, descriptors, processor time; from Linux's /proc."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def readable() -> bool:
    """Whether this system tells: Linux does."""
    return (PROC / "self/smaps_rollup").exists()


def tree_bytes() -> int:
    """Memory of this process and everything below it; a page that several share counts once (PSS)."""
    return sum(_proportional_bytes(pid) for pid in _tree(os.getpid()))


def tree_cpu_s() -> float:
    """Processor seconds that the living processes of the tree have spent, in steps of a clock tick (10 ms)."""
    ticks = (map(int, _stat(pid)[11:13]) for pid in _tree(os.getpid()))
    return sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK")


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir(PROC / "self/fd")) - 1  # the listing itself holds one


def _tree(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            children.setdefault(int(_stat(pid)[1]), []).append(pid)
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may itself hold spaces and brackets; zeros when it went."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return ["0"] * 50


def _proportional_bytes(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
