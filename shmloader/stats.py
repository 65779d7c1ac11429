"""The read-outs: a loader's frozen record of what its iterators count."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from shmloader.counts import SUMS, Alive, Counts
from shmloader.verdict import Verdict, judge

#: Asking the system what a worker holds takes milliseconds: the answer is used again for so many seconds.
FRESH_S = 1.0
#: So many epochs of one loader may still be going on; what an older one counts is not looked at again.
MOST_RECENT = 64


@dataclass(slots=True)
class Record:
    """Where a loader finds what its iterators count."""

    counts: Counts = field(default_factory=Counts)
    #: Epochs that have ended, added up, and those that may still be counting: iterators can overlap.
    past: Counts = field(default_factory=Counts)
    recent: deque[Counts] = field(default_factory=deque)
    workers: int = 0
    private_copies: Alive = field(default_factory=Alive)
    oversize: Alive = field(default_factory=Alive)
    #: Returns how many cores this process may use.
    cores: Callable[[], int] = int
    #: Returns {state: (number of slots, bytes)}.
    slots: Callable[[], dict[str, tuple[int, int]]] = dict
    #: Return bytes of page-locked memory: beside the pool, and in it.
    staging: Callable[[], int] = int
    page_locked: Callable[[], int] = int
    #: Returns the process ids of the workers.
    pids: Callable[[], list[int]] = list
    #: Returns how many bytes a process shares with no other.
    private_bytes: Callable[[int], int] = int
    #: When the workers' private bytes were last asked for, and how many there were.
    _workers_private: tuple[float, int] = (-math.inf, 0)

    def begin(self, counts: Counts) -> None:
        """An epoch begins."""
        self.counts = counts
        self.recent.append(counts)
        if len(self.recent) > MOST_RECENT:
            self.past.add(self.recent.popleft())

    def snapshot(self, lifetime: bool = False) -> LoaderStats:
        """The frozen read-out of this moment."""
        counts, slots = self.counts, self.slots()
        if lifetime:
            counts = Counts()
            for epoch in (self.past, *self.recent):
                counts.add(epoch)
        return LoaderStats(
            **{name: getattr(counts, name) for name in SUMS},
            copies=dict(counts.copies),
            waits=counts.waits.percentiles(max(counts.batches - 1, 0)),
            workers=self.workers,
            slots={state: number for state, (number, _) in slots.items()},
            slot_bytes={state: nbytes for state, (_, nbytes) in slots.items()},
            memory=Memory(
                pool=sum(nbytes for _, nbytes in slots.values()),
                private_copies=self.private_copies.nbytes,
                oversize=self.oversize.nbytes,
                staging=self.staging(),
                page_locked=self.page_locked(),
                workers_private=self._ask_workers_private(),
            ),
            cores=self.cores(),
        )

    def _ask_workers_private(self) -> int:
        now = time.monotonic()
        if now - self._workers_private[0] > FRESH_S:
            self._workers_private = now, sum(map(self.private_bytes, self.pids()))
        return self._workers_private[1]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a loader holds now, by what they are for."""

    #: Slots of the pool, whatever their state.
    pool: int = 0
    #: Copies that were handed out instead of views of the pool, and are still referred to.
    private_copies: int = 0
    #: Batches that found no room in the pool, and are still referred to.
    oversize: int = 0
    #: Page-locked memory for copies to a device, beside the pool.
    staging: int = 0
    #: Bytes of the pool's slots that are page-locked, so that a device reads them as they lie.
    page_locked: int = 0
    #: What the workers do not share with any other process, all together (0 where the system does not tell); may be a
    #: second old.
    workers_private: int = 0


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader did in its current or last epoch, or in all. A snapshot: it does not change afterwards."""

    #: Batches delivered.
    batches: int = 0
    #: Bytes of the tensors, arrays and buffers in them (0 where there are no workers, which move none).
    bytes: int = 0
    #: Seconds from ``iter()`` to the first batch; it counts nowhere else.
    start_s: float = 0.0
    #: Seconds that ``next()`` waited for a batch that was not there.
    wait_s: float = 0.0
    #: Seconds between a batch and the next call: the consumer's own step.
    step_s: float = 0.0
    #: Seconds that ``next()`` took beside waiting: taking in, copying and building batches, handing out work.
    hand_over_s: float = 0.0
    #: How long single batches were waited for, in seconds: ``"p50"``, ``"p90"``, ``"p99"``, ``"max"``.
    waits: dict[str, float] = field(default_factory=dict)
    #: Worker processes.
    workers: int = 0
    #: Seconds that workers, all together, worked on batches.
    worked_s: float = 0.0
    #: Seconds that they waited for work, because the consumer was busy.
    idle_s: float = 0.0
    #: Seconds that they waited for a slot with a finished batch.
    held_up_s: float = 0.0
    #: Private copies that were handed out, by reason: ``"held"`` (the consumer holds so many batches that the pool is
    #: used up), ``"kept"`` (the collate function keeps what it returned), ``"asked"`` (``copy=True``), ``"room"`` (the
    #: space was needed for a batch that comes first).
    copies: dict[str, int] = field(default_factory=dict)
    #: Batches that travelled in memory of their own because the pool had no room.
    oversize_batches: int = 0
    #: Batches, or halves of those with late targets, whose copy to the device began only when they were asked for.
    late_copies: int = 0
    #: Seconds that the stream of the step waited on the device for copies to it that were not through (0 where the
    #: device's events do not tell). Each is known once its copy is through, so the last ones may be missing.
    copy_wait_s: float = 0.0
    #: Workers that were replaced.
    restarts: int = 0
    #: Number of slots by state: ``"FREE"``, ``"FILLING"``, ``"READY"``, ``"LEASED"``, ...
    slots: dict[str, int] = field(default_factory=dict)
    #: Bytes of slots by state; together the pool.
    slot_bytes: dict[str, int] = field(default_factory=dict)
    #: Bytes that the loader holds now.
    memory: Memory = field(default_factory=Memory)
    #: Processor cores that this process may use.
    cores: int = 0

    @property
    def private_copies(self) -> int:
        """Batches that were handed out as private copies."""
        return sum(self.copies.values())

    @property
    def pool_bytes(self) -> int:
        """Bytes that the slots take."""
        return self.memory.pool

    @property
    def verdict(self) -> Verdict:
        """What limits the job, and what to change."""
        return judge(self)

    def as_dict(self) -> dict[str, float]:
        """The figures under flat names, for experiment trackers: ``"slots/FREE"``, ``"memory/pool"`` and so on."""
        flat: dict[str, float] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Memory):
                value = {part.name: getattr(value, part.name) for part in fields(value)}
            if isinstance(value, dict):
                flat.update({f"{entry.name}/{key}": number for key, number in value.items()})
            else:
                flat[entry.name] = value
        return flat
