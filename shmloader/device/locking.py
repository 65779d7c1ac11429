"""Page-locks a pool for a device, and guards it where its slots are handed out page-locked."""

from __future__ import annotations

import torch

from shmloader.device import captures
from shmloader.device.driver import find_driver
from shmloader.device.fence import Driver, Quarantine
from shmloader.device.pinning import PageLock, find_runtime
from shmloader.memory.pool import Pool


class SlotGuard(Quarantine):
    """Until when a device may read slots: until a fence passes, and for good once a graph was captured over one."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._from = captures.mark()

    def mark(self) -> int:
        """What is to be noted when a lease begins."""
        return captures.mark()

    def captured(self, mark: object) -> bool:
        """Whether a graph may have been captured over what was leased at ``mark``; None if that was before us."""
        return captures.since(mark if isinstance(mark, int) else self._from)


def lock(pool: Pool, device: torch.device | None = None) -> None:
    """Page-lock the pool's slots, where the system can do that. Once per pool; safe to call again.

    From then on they are guarded: what is handed out of them (a batch; under ``device=``, its numpy arrays) may be
    copied to any device at any time, by calls that return before anything has been read. Where captures of graphs
    cannot be seen there is no guard, and so nothing is locked: batches then cross by way of memory that torch locks.

    Args:
        device: who is to read them; default: the current accelerator, if there is any.
    """
    if device is None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    runtime = find_runtime(device) if device is not None else None
    if runtime is None or not captures.watch():
        return
    pool.guard(SlotGuard(find_driver()))  # first: what is page-locked must not come back unguarded
    pool.page_lock(PageLock(runtime, pool.notices))
