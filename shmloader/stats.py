"""The frozen read-outs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counts:
    """What an iterator counts while it runs; the only live object behind :class:`LoaderStats`."""

    batches: int = 0
    bytes: int = 0
    wait_s: float = 0.0
    private_copies: int = 0
    oversize_batches: int = 0


@dataclass(slots=True)
class Record:
    """Where a loader finds what its current or last iterator counts."""

    counts: Counts = field(default_factory=Counts)
    workers: int = 0
    #: Returns {state: (number of slots, bytes)}.
    slots: Callable[[], dict[str, tuple[int, int]]] = dict

    def snapshot(self) -> LoaderStats:
        """The frozen read-out of this moment."""
        counts, slots = self.counts, self.slots()
        return LoaderStats(
            batches=counts.batches,
            bytes=counts.bytes,
            wait_s=counts.wait_s,
            private_copies=counts.private_copies,
            oversize_batches=counts.oversize_batches,
            workers=self.workers,
            slots={state: number for state, (number, _) in slots.items()},
            slot_bytes={state: nbytes for state, (_, nbytes) in slots.items()},
            pool_bytes=sum(nbytes for _, nbytes in slots.values()),
        )


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """What a loader did in its current or last epoch. A snapshot: it does not change afterwards."""

    #: Batches delivered.
    batches: int = 0
    #: Bytes of the tensors, arrays and buffers in them (0 where there are no workers, which move none).
    bytes: int = 0
    #: Seconds that ``next()`` waited for a batch that was not there.
    wait_s: float = 0.0
    #: Batches that were copied out of the pool into memory of their own.
    private_copies: int = 0
    #: Batches that travelled in a file of their own because the pool had no room.
    oversize_batches: int = 0
    #: Worker processes.
    workers: int = 0
    #: Number of slots by state: ``"FREE"``, ``"FILLING"``, ``"READY"``, ``"LEASED"``, ...
    slots: dict[str, int] = field(default_factory=dict)
    #: Bytes of slots by state; together the pool.
    slot_bytes: dict[str, int] = field(default_factory=dict)
    #: Bytes that the slots take.
    pool_bytes: int = 0

    def as_dict(self) -> dict[str, float]:
        """The figures under flat names, for experiment trackers: ``"slots/FREE"`` and so on."""
        flat: dict[str, float] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, dict):
                flat.update({f"{entry.name}/{key}": number for key, number in value.items()})
            else:
                flat[entry.name] = value
        return flat
