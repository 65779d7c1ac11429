"""A task: one batch, or one half of it, on its way through the main process."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from shmloader.device.transfer import Flight
from shmloader.memory.layout import Layout
from shmloader.memory.slots import Slot
from shmloader.workers.crew import Worker

#: Messages quote a batch's indices up to this many characters.
MOST_NAMED = 200
#: What the halves of a batch are called.
INPUTS, TARGETS = "inputs", "targets"


@dataclass(slots=True, eq=False)
class Task:
    """One batch, or one half of it, on its way."""

    batch: int
    epoch: int
    worker: Worker
    indices: Any
    slot: Slot | None
    #: What it is called in messages, and among all that is to be done in what order.
    number: int
    #: Which half it is; empty: the whole batch.
    part: str = ""
    #: The lane of its slots.
    lane: int = 0
    #: Targets whose inputs were handed over: who they are for.
    reader: weakref.ref[Any] | None = None
    #: The range of its Fill, while the worker moves the batch into a larger one.
    moved_from: Slot | None = None
    #: Bytes that the worker asked for and waits for; 0: it does not wait.
    needs: int = 0
    layout: Layout | None = None
    #: Pickled values of a plain nest.
    values: bytes = b""
    #: Private memory that holds the batch, where it does not lie in the slot.
    buffer: Any = None
    error: BaseException | None = None
    #: Its way to the device, if it has begun; the slot is then the flight's lease.
    flight: Flight | None = None

    @property
    def answered(self) -> bool:
        """Whether the batch, or its error, is there."""
        return self.layout is not None or self.error is not None

    def read_by(self) -> Any:
        """Who is to have these targets; None before their inputs were handed over, and when that one is gone."""
        return self.reader() if self.reader is not None else None

    def title(self) -> str:
        """The batch, or which half of which, for messages."""
        return f"the {self.part} of batch {self.batch}" if self.part else f"batch {self.batch}"

    def name(self) -> str:
        """The batch, or its half, and its indices, for messages."""
        try:
            text = f"{self.title()}, indices {self.indices}"
        except Exception:  # whatever the sampler's own objects make of it
            text = f"{self.title()}, indices of {type(self.indices).__name__} that cannot be printed"
        return text if len(text) <= MOST_NAMED else text[:MOST_NAMED] + " ..."
