"""Private memory that is used again: what batches made in the training process lie in.

A large batch in fresh memory costs a page fault for every page, several times what copying the bytes costs. Here its
memory is leased, as a slot is, and the next batch of that size gets it once nothing can read it any more. It is private
to the process: a forked child has a copy of its own, as of anything else.
"""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress
from typing import Any

from shmloader.memory.budget import size_class
from shmloader.memory.lease import lease

#: So many pieces at most wait to be used again; more are for sizes that are not asked for any longer.
MOST_FREE = 4


class Recycler:
    """Pieces of private memory for one loader. Any thread may lend; leases may end in any thread."""

    def __init__(self) -> None:
        #: What came back: appended by whoever drops the last reference.
        self._returned: deque[mmap.mmap] = deque()
        self._lent: dict[int, int] = {}  # bytes by the identity of the piece

    def lend(self, nbytes: int) -> Any:
        """A buffer of at least ``nbytes``, uninitialised, page-aligned, leased until nothing can read it.

        Raises:
            OSError: no memory is left.
        """
        capacity = size_class(nbytes)
        piece = self._take(capacity) or _map(capacity)
        self._lent[id(piece)] = capacity
        return lease(piece, 0, capacity, piece, self._returned)

    def _take(self, capacity: int) -> mmap.mmap | None:
        """A piece of just this capacity that has come back, the last one first: it is the likeliest to be in a cache.

        Others are kept for later, but the oldest are forgotten.
        """
        others, found = [], None
        with suppress(IndexError):  # nothing left, or another thread took it
            while found is None:
                piece = self._returned.pop()
                if len(piece) == capacity:
                    found = piece
                else:
                    others.append(piece)
        self._returned.extend(reversed(others))
        while len(self._returned) > MOST_FREE:
            with suppress(IndexError):
                self._lent.pop(id(self._returned.popleft()), None)
        return found

    def summary(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of what is free and what is leased, as of a pool's slots."""
        free = {id(piece): len(piece) for piece in tuple(self._returned)}
        leased = {key: nbytes for key, nbytes in tuple(self._lent.items()) if key not in free}
        states = {"FREE": free, "LEASED": leased}
        return {name: (len(pieces), sum(pieces.values())) for name, pieces in states.items() if pieces}


def _map(nbytes: int) -> mmap.mmap:
    # Without MADV_HUGEPAGE: stacking into huge pages was a third slower where it was tried (L, U8).
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
