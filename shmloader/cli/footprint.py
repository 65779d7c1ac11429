"""What this process and its children hold: memory and file descriptors, read from Linux's /proc."""

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


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir(PROC / "self/fd")) - 1  # the listing itself holds one


def _tree(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(entry), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, [])


def _parent(process: Path) -> int:
    """Its parent's pid; 0 when it went meanwhile. The name in the line's brackets may hold spaces and brackets."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _proportional_bytes(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
