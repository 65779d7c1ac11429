"""Whose turn it is: which worker gets the next batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shmloader.workers.crew import Worker


class Turns:
    """One epoch's dispatch.

    Args:
        workers: all of them.
        prefetch_factor: batches per worker that may be under way.
        in_order: whether batches are delivered in order.
        anybody: whether any worker may make any batch; else torch's rule decides, since a batch's random draws, or an
            iterable data set's position, belong to its worker.
    """

    def __init__(self, workers: Sequence[Worker], prefetch_factor: int, in_order: bool, anybody: bool) -> None:
        self._workers = workers
        self._most = prefetch_factor * len(workers)
        self._in_order = in_order
        self._anybody = anybody
        self._has_data = [True] * len(workers)
        self._undelivered = [0] * len(workers)
        self._cycle = itertools.cycle(range(len(workers)))

    def next(self) -> Worker | None:
        """The worker for the next batch; None if no worker has data, or capacity, left. A worker returned has it."""
        worker_id = self._least_busy() if self._anybody else self._next_in_turn()
        if worker_id is None:
            return None
        self._undelivered[worker_id] += 1
        return self._workers[worker_id]

    def delivered(self, worker: Worker) -> None:
        """One of the worker's batches was handed on."""
        self._undelivered[worker.id] -= 1

    def exhausted(self, worker: Worker) -> None:
        """The worker's iterable data set has no more for this epoch."""
        self._has_data[worker.id] = False

    def _next_in_turn(self) -> int | None:
        """Round robin over the workers that still have data; out of order only those with capacity."""
        for _ in self._workers:
            worker_id = next(self._cycle)
            if self._has_data[worker_id] and (self._in_order or self._has_capacity(worker_id)):
                return worker_id
        return None

    def _has_capacity(self, worker_id: int) -> bool:
        return self._undelivered[worker_id] < self._most // sum(self._has_data)

    def _least_busy(self) -> int:
        return min(self._workers, key=lambda worker: worker.owes).id
