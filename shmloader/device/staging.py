"""Page-locked memory beside the pool: for what lies in memory that the device cannot read asynchronously."""

from __future__ import annotations

import torch

from shmloader.device.accelerator import Accelerator
from shmloader.errors import PlatformWarning
from shmloader.memory.budget import size_class

#: So many blocks of one size are in use at a time, then the oldest copy is waited for: one is filled while the other
#: is read.
RING = 2
#: Smaller blocks are worth no waiting.
LEAST_SCARCE_BYTES = 1 << 20
MOST_SMALL = 16


class Staging:
    """Blocks of page-locked memory, used again and again.

    Args:
        accelerator: has the memory.
        notices: gets a warning of the first refusal.
    """

    def __init__(self, accelerator: Accelerator, notices: list[Warning]) -> None:
        self._accelerator, self._notices = accelerator, notices
        self._free: dict[int, list[torch.Tensor]] = {}
        self._used: dict[int, int] = {}
        self._refused = False
        #: Bytes in all blocks.
        self.nbytes = 0

    def used_up(self, nbytes: int) -> bool:
        """Whether as many blocks of this size are in use as there should be."""
        capacity = size_class(nbytes)
        return self._used.get(capacity, 0) >= _most(capacity)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A block of at least ``nbytes``; None where the system refuses."""
        capacity = size_class(nbytes)
        free = self._free.get(capacity)
        block = free.pop() if free else self._made(capacity)
        if block is not None:
            self._used[capacity] = self._used.get(capacity, 0) + 1
        return block

    def _made(self, capacity: int) -> torch.Tensor | None:
        if self._refused:
            return None
        try:
            block = self._accelerator.locked_memory(capacity)
        except RuntimeError as error:
            self._refused = True
            text = (
                f"the system refuses {capacity} bytes of page-locked memory ({error}); copies to the device are "
                "slower, and the training step waits for them"
            )
            self._notices.append(PlatformWarning(text))
            return None
        self.nbytes += capacity
        return block

    def give(self, blocks: list[torch.Tensor]) -> None:
        """These blocks have been read."""
        for block in blocks:
            capacity = block.nbytes
            self._used[capacity] -= 1
            free = self._free.setdefault(capacity, [])
            if len(free) < _most(capacity):
                free.append(block)
            else:
                self.nbytes -= capacity


def _most(capacity: int) -> int:
    """So many blocks of one size there should be."""
    return RING if capacity >= LEAST_SCARCE_BYTES else MOST_SMALL
