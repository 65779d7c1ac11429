"""Gates that a forked worker waits at until a test opens them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset


class Gate:
    """Closed until somebody opens it, then open for all.

    Over a bare descriptor: ``multiprocessing.Event`` hangs the one who sets it when a waiter was killed.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0)

    def open(self) -> None:
        """Let everybody through."""
        os.eventfd_write(self._fd, 1)

    def wait(self) -> None:
        """Wait until it is open."""
        os.eventfd_read(self._fd)
        os.eventfd_write(self._fd, 1)  # for the next one

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


class Gated(Dataset[Any]):
    """Item *i* is ``make(i)``, at whose index in ``gates`` it waits first."""

    def __init__(self, count: int, make: Callable[[int], Any], gates: dict[int, Gate]) -> None:
        self.count, self.make, self.gates = count, make, gates

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index in self.gates:
            self.gates[index].wait()
        return self.make(index)
