"""``num_workers=0``: torch's own iterator, which counts, and under ``seeding="batch"`` seeds every fetch."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.iterator import Terms
from shmloader.stats import Counts
from shmloader.workers import seeding


class InProcessIter(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's iterator, which counts, and under ``seeding="batch"`` seeds every fetch."""

    def __init__(self, loader: Any, terms: Terms) -> None:
        super().__init__(loader)
        self._seed_batches = terms.seed_batches
        self._fetched = 0
        self._counts = terms.record.counts = Counts()
        terms.record.workers, terms.record.slots = 0, dict

    def _next_data(self) -> Any:
        started = time.perf_counter()
        try:
            data = self._fetch() if self._seed_batches else super()._next_data()  # type: ignore[no-untyped-call]
        finally:
            self._counts.wait_s += time.perf_counter() - started
        self._counts.batches += 1
        return data

    def _fetch(self) -> Any:
        # The sampler draws from the training process's generators as ever; only the fetch is set apart, or dropout
        # masks would repeat with every batch.
        indices = self._next_index()  # type: ignore[no-untyped-call]
        batch, self._fetched = self._fetched, self._fetched + 1  # one that fails counts, as it does in workers
        with seeding.isolated():
            seeding.seed_batch(int(self._base_seed), 0, batch)
            data = self._dataset_fetcher.fetch(indices)
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
