"""What keeping batches costs: file descriptors, mappings and memory, for torch's DataLoader and shmloader's.

Each loader runs in a process of its own. It reads small batches through worker processes and keeps them all; then,
while the batches and the loader are still alive, the figures are read from /proc (Linux only):

- file descriptors and mappings of the main process, and how many were added since before the loader was made;
- PSS of the main process and its workers: what they occupy in memory, shared pages divided among those who map them;
- what is left in /dev/shm by name, and what is left of all of it after the batches and the loader are gone.

    python benchmarks/memory.py
    python benchmarks/memory.py --batches 300 --workers 2 --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import shmloader

LOADERS: dict[str, type[DataLoader[Any]]] = {"torch": DataLoader, "shmloader": shmloader.DataLoader}
BATCH_SIZE = 32
FEATURES = 256  # 33 kB a batch


@dataclass(frozen=True)
class Footprint:
    """What this process and its workers hold at one moment."""

    descriptors: int
    mappings: int
    pss_mib: float
    dev_shm_entries: int

    @classmethod
    def now(cls) -> Footprint:
        """Read from /proc."""
        pids = process_tree(os.getpid())
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            pss_mib=round(sum(pss_kib(pid) for pid in pids) / 1024, 1),
            dev_shm_entries=len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
        )

    def __sub__(self, before: Footprint) -> Footprint:
        """What was added since `before`."""
        return Footprint(
            self.descriptors - before.descriptors,
            self.mappings - before.mappings,
            round(self.pss_mib - before.pss_mib, 1),
            self.dev_shm_entries - before.dev_shm_entries,
        )


def process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    try:
        children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _words(file)]
    except OSError:
        children = []
    return [pid, *(descendant for child in children for descendant in process_tree(child))]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # the thread or process ended meanwhile
        return []


def pss_kib(pid: int) -> int:
    """Proportional set size of one process; 0 when it has ended."""
    words = _words(Path(f"/proc/{pid}/smaps_rollup"))
    return int(words[words.index("Pss:") + 1]) if "Pss:" in words else 0


def make_loader(who: str, batches: int, workers: int) -> DataLoader[Any]:
    """The loader under test over a dataset with exactly `batches` batches of an input and a target."""
    samples = batches * BATCH_SIZE
    dataset = TensorDataset(torch.rand(1, FEATURES).expand(samples, -1), torch.arange(samples))
    return LOADERS[who](dataset, BATCH_SIZE, num_workers=workers)


def measure(who: str, batches: int, workers: int) -> dict[str, Footprint]:
    """What is added while a few and while all batches are kept, and what stays when all of it is gone."""
    before = Footprint.now()
    loader = make_loader(who, batches, workers)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(batches // 10)]
    tenth = Footprint.now() - before
    kept += [next(iterator) for _ in range(batches - len(kept))]
    everything = Footprint.now() - before
    del iterator, loader, kept
    gc.collect()
    return {"tenth": tenth, "all": everything, "after": Footprint.now() - before}


def measure_apart(who: str, batches: int, workers: int) -> dict[str, Footprint]:
    """`measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--measure", who, "--batches", str(batches), "--workers", str(workers)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {moment: Footprint(**figures) for moment, figures in json.loads(answer).items()}


def table(figures: dict[str, dict[str, Footprint]], batches: int) -> str:
    """One line per loader and moment."""
    moments = {"tenth": f"{batches // 10} batches kept", "all": f"{batches} batches kept", "after": "all gone"}
    lines = [f"{'added':30} {'descriptors':>12} {'mappings':>10} {'PSS MiB':>9} {'/dev/shm':>9}"]
    for who in figures:
        for moment, label in moments.items():
            it = figures[who][moment]
            lines.append(
                f"{who + ', ' + label:30} {it.descriptors:12} {it.mappings:10} {it.pss_mib:9.1f} {it.dev_shm_entries:9}"
            )
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Descriptors, mappings and memory while batches are kept.")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts and figures here as well")
    parser.add_argument("--measure", choices=tuple(LOADERS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both loaders, or, as its own child, one."""
    args = arguments(argv)
    if args.measure:
        figures = measure(args.measure, args.batches, args.workers)
        print(json.dumps({moment: asdict(figure) for moment, figure in figures.items()}))
        return
    both = {who: measure_apart(who, args.batches, args.workers) for who in LOADERS}
    print(table(both, args.batches))
    if args.json:
        facts = {
            "batches": args.batches,
            "workers": args.workers,
            "batch_bytes": BATCH_SIZE * (FEATURES * 4 + 8),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        results = {who: {moment: asdict(it) for moment, it in figures.items()} for who, figures in both.items()}
        args.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
