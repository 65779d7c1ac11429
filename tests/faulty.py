"""Data sets and functions that go wrong in every way. Light to import: workers of any start method do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

#: Ways to go wrong, and what the error in the main process says about each.
WAYS = {
    "raise": "Caught ValueError in DataLoader worker process",
    "sys.exit(0)": "It ended with SystemExit: 0.",
    "sys.exit(3)": "It ended with SystemExit: 3.",
    "interrupt": "It ended with KeyboardInterrupt.",
    "quit": "It ended with Quit: enough.",
    "os._exit(7)": "exited unexpectedly with exit code 7",
    "SIGKILL": "is killed by signal: Killed",
    "SIGSEGV": "is killed by signal: Segmentation fault",
}
#: Where in a batch's life it goes wrong. "holding": the batch has been collated inside the slot already.
STAGES = ("start", "fetch", "collate", "holding")


class Quit(BaseException):
    """An exception that is no Exception."""


def fail(way: str) -> None:
    """Go wrong."""
    if way == "raise":
        raise ValueError("a broken sample")
    if way.startswith("sys.exit"):
        sys.exit(int(way[9]))
    if way == "os._exit(7)":
        os._exit(7)
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "quit":
        raise Quit("enough")
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "SIGSEGV":
        ctypes.string_at(0)


class Numbers(Dataset[torch.Tensor]):
    """Item i is a tensor full of i."""

    def __init__(self, length: int = 40, width: int = 8) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), index)


class Trap(Numbers):
    """Goes wrong once its item ``at`` is concerned, at the given stage; not at all once it is disarmed.

    It is data set, collate function and worker_init_fn in one: ``DataLoader(trap, **trap.hooks())``.
    """

    def __init__(self, way: str, stage: str, at: int = 21, length: int = 40) -> None:
        super().__init__(length)
        self.way, self.stage, self.at = way, stage, at
        self.armed = True

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """The loader's other arguments."""
        return {"collate_fn": self.collate, "worker_init_fn": self.start}

    def start(self, worker_id: int) -> None:
        """worker_init_fn."""
        if self.armed and self.stage == "start":
            fail(self.way)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.armed and self.stage == "fetch" and index == self.at:
            fail(self.way)
        return super().__getitem__(index)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        """collate_fn."""
        hit = self.armed and any(int(sample[0]) == self.at for sample in samples)
        if hit and self.stage == "collate":
            fail(self.way)
        batch: torch.Tensor = default_collate(samples)
        if hit and self.stage == "holding":
            fail(self.way)
        return batch


class Sleepy(Numbers):
    """Sleeps for an hour at item ``at``."""

    def __init__(self, at: int, length: int = 40) -> None:
        super().__init__(length)
        self.at = at

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            time.sleep(3600)
        return super().__getitem__(index)


class Telling(Numbers):
    """Its forked workers can tell the test a number."""

    def __init__(self) -> None:
        super().__init__()
        self.read_end, self.write_end = os.pipe()

    def tell(self, number: int) -> None:
        """In a worker."""
        os.write(self.write_end, number.to_bytes(8, "little"))

    def hear(self) -> int:
        """In the test: the next number that was told."""
        return int.from_bytes(os.read(self.read_end, 8), "little")

    def __del__(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


class SoundSleeper(Telling):
    """Tells its worker's pid at item 0, and sleeps for an hour."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            self.tell(os.getpid())
            time.sleep(3600)
        return super().__getitem__(index)


class Parent(Telling):
    """Item 0 forks a child that inherits whatever is open and sleeps for an hour, and tells its pid."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            child = os.fork()
            if child == 0:
                time.sleep(3600)
                os._exit(0)
            self.tell(child)
        return super().__getitem__(index)


class Unpicklable(Numbers):
    """Cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda sample: sample


class Faults(Numbers):
    """Every item raises an error with a long message."""

    def __init__(self, length: int, characters: int) -> None:
        super().__init__(length)
        self.characters = characters

    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError(f"{index}:" + "x" * self.characters)
