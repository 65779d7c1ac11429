"""Inside a process of ``shmloader run``: ours in torch's place, and a report at the end."""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import Any

from torch import distributed
from torch.utils.data import RandomSampler, SequentialSampler

from shmloader import loader, patching
from shmloader.cli.run import VARIABLE
from shmloader.loader import OPTIONS
from shmloader.stats import Record
from shmloader.tuning.auto import AutoWorkers


def board() -> None:
    """Do what the environment asks for. Called once torch has been imported."""
    asked = json.loads(os.environ[VARIABLE])
    max_batches = asked.pop("max_batches")
    patching.patch_torch(**asked)
    report = Report()
    patching.end_epochs_after(max_batches)
    loader.watch = report.note
    atexit.register(report.print)


class Report:
    """The loaders that this process has iterated, and how that went."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._rank: str | None = None
        self._seen: dict[int, tuple[Record, str, list[str]]] = {}

    def note(self, iterated: Any, record: Record) -> None:
        """A loader is being iterated."""
        self._rank = rank() or self._rank  # by the end the process group may be gone
        if id(record) not in self._seen:
            self._seen[id(record)] = record, type(iterated.dataset).__name__, lines(iterated)

    def print(self) -> None:
        """Say it on stderr, which leaves the script's own output alone."""
        if not self._seen or os.getpid() != self._pid:
            return  # a child that was forked has its parent's
        text = ["", f"shmloader run: process {self._pid}" + (f", rank {self._rank}" if self._rank else "")]
        for record, dataset, code in self._seen.values():
            stats = record.snapshot(lifetime=True)
            text += [f"  loader over {dataset}: {stats.batches} batches", f"    {stats.verdict}"]
            text += [f"    {row}" for row in code]
        # In one piece: ranks that end at the same time share the terminal.
        sys.stderr.write("\n".join([*text, ""]))
        sys.stderr.flush()


def rank() -> str | None:
    """Which of a job's processes this is, None where nothing tells.

    Not every launcher says it in the environment, and Lightning's names only the rank on this machine.
    """
    if distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK")


def lines(made: Any) -> list[str]:
    """What to write to have such a loader without ``shmloader run``."""
    if isinstance(made, loader.TorchLoader):
        return ["from shmloader import DataLoader", line(made)]
    # As fastai's, which has no more than torch's iterators read, and is made where a user cannot write anything.
    return ["import shmloader", "shmloader.patch_torch()"]


def line(made: Any) -> str:
    """The call that makes such a loader with shmloader, as far as its attributes tell."""
    parts = ["dataset"]
    sampler, batch_sampler = made.sampler, made.batch_sampler
    if batch_sampler is not None and made.batch_size is None:
        parts.append(f"batch_sampler=<{type(batch_sampler).__name__}>")
    else:
        parts.append(f"batch_size={made.batch_size}")
        if type(sampler) is RandomSampler and not sampler.replacement:
            parts.append("shuffle=True")
        elif type(sampler) is not SequentialSampler and made._dataset_kind == 0:
            parts.append(f"sampler=<{type(sampler).__name__}>")
    automatic = isinstance(made.num_workers, AutoWorkers)
    parts.append('num_workers="auto"' if automatic else f"num_workers={made.num_workers}")
    defaults: dict[str, Any] = {"drop_last": False, "pin_memory": False, "timeout": 0, "persistent_workers": False}
    defaults |= {"in_order": True, "worker_init_fn": None, "generator": None}
    defaults |= {"prefetch_factor": 2 if made.num_workers else None}
    for name in (*defaults, *OPTIONS):
        value = getattr(made, name, None)
        if value != defaults.get(name, False) and value is not None:
            parts.append(f"{name}={_text(value)}")
    return f"DataLoader({', '.join(parts)})"


def _text(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
