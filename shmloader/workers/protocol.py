"""The protocol between the main process and its workers: states, transition tables, messages.

Who owns the bytes. The main process's ledger says which party may touch a slot; ownership moves with a message::

      FREE --ASSIGN--> FILLING --FILLED--> READY --LEASE--> LEASED --RELEASE--> FREE
                          |  \\--FILLED_KEPT--> KEPT --LET_GO--> FREE     |
                          |                                              |--EXPOSE--> EXPOSED --UNEXPOSE--> FREE
            FAILED, LOST, |                   READY --COPY_OUT--> FREE   |--FENCE--> QUARANTINED --FENCED--> FREE
            REPLACED,     '--> FREE           READY --DISCARD---> FREE   '--CAPTURE--> RETIRED (for good)
            EXHAUSTED                          FREE --RECARVE--> DISSOLVED (its range goes back to the pool)

Who sends what to whom. One channel per worker, ordered; every message names its epoch::

      main process                                      worker
        Fill(batch, range | nothing, indices)    -->      fetch, collate into the range
        Grant(range | nothing | drop)            -->    <--  NeedSpace(bytes)       when the range is too small
        Resume(epoch)                            -->    <--  Filled(layout | file)  the range is the main's again
        Stop                                     -->    <--  Failed(error) | Exhausted | LetGo(range)
                                                        <--  Hello                  once, after worker_init_fn
                                                        <--  Dying(why)             an exception ends the process

Where targets may come late, each half of a batch is a Fill of its own, under the number that :func:`number_of` gives.

This module imports nothing of shmloader, because the ledger (memory) and the crew (workers) both apply its tables.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple


class _Named(Enum):
    """Members are told apart by identity: Enum's own hash runs in Python, and every batch looks up several steps."""

    __hash__ = object.__hash__


class SlotState(_Named):
    """Who may touch a slot's bytes."""

    FREE = "nobody; it can be assigned"
    FILLING = "the worker that it was assigned to"
    READY = "nobody; it waits for its turn"
    LEASED = "the consumer, or a copy to a device"
    EXPOSED = "a process that was forked while it was leased"
    KEPT = "the worker, which still holds a reference into it"
    QUARANTINED = "a device that may still read it; a fence is pending"
    RETIRED = "a captured device graph, which reads it at every replay"
    DISSOLVED = "nobody, ever again: its range went back to the pool"


class SlotEvent(_Named):
    """What may happen to a slot."""

    ASSIGN = "a batch is due and gets this slot"
    NEED = "the worker asks for a larger range and keeps this one until it has moved"
    GRANT = "the worker was given another range for this batch"
    FILLED = "the worker's answer was read"
    FILLED_KEPT = "the answer was read, and says that the worker still refers to the bytes"
    FAILED = "fetching, collating or encoding raised"
    REPLACED = "the batch was delivered in another range"
    EXHAUSTED = "the worker's iterable data set ended before this batch"
    LOST = "the worker's exit is confirmed and its channel was read to the end"
    LEASE = "the batch is handed to the consumer"
    COPY_OUT = "the batch was copied to private memory"
    DISCARD = "the epoch ended before the batch's turn"
    RELEASE = "nothing in this process can read the bytes any more"
    EXPOSE = "released, but a forked child may still read them"
    UNEXPOSE = "every process that could read them is gone"
    LET_GO = "the worker no longer refers to the bytes"
    FENCE = "released, but a device may still read them"
    FENCED = "the fence has passed, and nothing else can read them"
    CAPTURE = "released after a device graph was captured over it"
    RECARVE = "the pool takes the range back"


_S, _E = SlotState, SlotEvent

#: (state, event) -> next state; whatever is missing is a ProtocolError. Late targets need no states of their own:
#: each half of such a batch is a slot with its own state and lease.
SLOT_TABLE: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (_S.FREE, _E.ASSIGN): _S.FILLING,
    (_S.FREE, _E.RECARVE): _S.DISSOLVED,
    (_S.FILLING, _E.NEED): _S.FILLING,
    (_S.FILLING, _E.GRANT): _S.FILLING,
    (_S.FILLING, _E.FILLED): _S.READY,
    (_S.FILLING, _E.FILLED_KEPT): _S.KEPT,
    (_S.FILLING, _E.FAILED): _S.FREE,
    (_S.FILLING, _E.REPLACED): _S.FREE,
    (_S.FILLING, _E.EXHAUSTED): _S.FREE,
    (_S.FILLING, _E.LOST): _S.FREE,
    (_S.READY, _E.LEASE): _S.LEASED,
    (_S.READY, _E.COPY_OUT): _S.FREE,
    (_S.READY, _E.DISCARD): _S.FREE,
    (_S.LEASED, _E.RELEASE): _S.FREE,
    (_S.LEASED, _E.EXPOSE): _S.EXPOSED,
    (_S.LEASED, _E.FENCE): _S.QUARANTINED,
    (_S.LEASED, _E.CAPTURE): _S.RETIRED,
    (_S.EXPOSED, _E.UNEXPOSE): _S.FREE,
    (_S.KEPT, _E.LET_GO): _S.FREE,
    (_S.KEPT, _E.LOST): _S.FREE,
    (_S.QUARANTINED, _E.FENCED): _S.FREE,
    (_S.QUARANTINED, _E.EXPOSE): _S.EXPOSED,
}


class WorkerState(_Named):
    """Where a worker stands in its life."""

    STARTING = "importing, unpickling, running worker_init_fn"
    SERVING = "fed up to its depth"
    RETIRING = "finishes what it holds and gets no more"
    STOPPING = "told to stop"
    GONE = "its exit is confirmed"


class WorkerEvent(_Named):
    """What may happen to a worker."""

    HELLO = "it is set up"
    RETIRE = "it gets no more work"
    STOP = "it was told to stop"
    EXIT = "its process has ended and its channel was read to the end"


_W, _V = WorkerState, WorkerEvent

WORKER_TABLE: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_W.STARTING, _V.HELLO): _W.SERVING,
    (_W.STARTING, _V.RETIRE): _W.RETIRING,
    (_W.STARTING, _V.STOP): _W.STOPPING,
    (_W.STARTING, _V.EXIT): _W.GONE,
    (_W.SERVING, _V.RETIRE): _W.RETIRING,
    (_W.SERVING, _V.STOP): _W.STOPPING,
    (_W.SERVING, _V.EXIT): _W.GONE,
    (_W.RETIRING, _V.HELLO): _W.RETIRING,
    (_W.RETIRING, _V.STOP): _W.STOPPING,
    (_W.RETIRING, _V.EXIT): _W.GONE,
    (_W.STOPPING, _V.HELLO): _W.STOPPING,
    (_W.STOPPING, _V.STOP): _W.STOPPING,
    (_W.STOPPING, _V.EXIT): _W.GONE,
}


class Tag:
    """The first byte of every packet. Plain ints: every batch looks up a dozen, and an enum's members take long."""

    FILL = 1  # main: make `batch` in [offset, offset + size); size 0: no range yet; body: the indices
    GRANT = 2  # main: the answer to NEED_SPACE; flags say RANGE, NOTHING or DROP
    RESUME = 3  # main: `epoch` begins
    STOP = 4  # main: end the process
    HELLO = 5  # worker: set up; from now on it answers
    FILLED = 6  # worker: `batch` is in the range; body: its layout, unless the layout's number says it
    NEED_SPACE = 7  # worker: `batch` needs `size` bytes
    FAILED = 8  # worker: `batch` raised; body: the error; an empty body answers a DROP
    EXHAUSTED = 9  # worker: its iterable data set ended before `batch`
    LET_GO = 10  # worker: nothing refers to the range at `offset` any more
    FRAGMENT = 11  # both: the next piece of a body too long for one packet
    DYING = 12  # worker: an exception that is no Exception ends the process; body: its name and text


class Flag:
    """Bits of the second byte of every packet."""

    NONE = 0
    KEPT = 1  # FILLED, FAILED: the worker still refers to the range of its Fill
    DEFINE = 2  # FILLED: from now on `layout` stands for this body
    IN_RANGE = 4  # FILLED: the layout's skeleton lies in the range, `size` bytes at `offset`
    IN_FILE = 8  # FILLED: the batch lies in the file that comes with the packet
    LONG = 16  # any: the body is a length; that many bytes follow in FRAGMENT packets
    NOTHING = 32  # GRANT: no range; send the batch in a file
    DROP = 64  # GRANT: nobody waits for this batch any more


#: tag, flags, layout, epoch, batch, offset, size, worked, idle, held up: the fixed head of every packet but FRAGMENT.
HEAD = struct.Struct("<BBHIQQQddd")
#: The last three of a message that tells nothing of them.
NO_TIME = (0.0, 0.0, 0.0)
#: The number that stands for "the layout is in the body".
NO_LAYOUT = 0xFFFF
#: One packet may hold about 200 KiB (net.core.wmem_default); kept far below it, so that several fit in the buffer.
INLINE_BYTES = 16 * 1024


#: The halves of a batch whose targets may come late.
HALVES = 2


def number_of(batch: int, half: int) -> int:
    """What a half of a batch is called in messages: inputs are half 0, targets half 1."""
    return HALVES * batch + half


class Message(NamedTuple):
    """One message, as read. ``fd`` is an open descriptor that the reader must close, or -1."""

    tag: int
    flags: int = 0
    layout: int = NO_LAYOUT
    epoch: int = 0
    batch: int = 0
    offset: int = 0
    size: int = 0
    #: What the worker has spent its time with so far, in seconds: with batches, waiting for work, waiting for space.
    worked_s: float = 0.0
    idle_s: float = 0.0
    held_up_s: float = 0.0
    body: bytes = b""
    fd: int = -1
