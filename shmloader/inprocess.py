"""``num_workers=0``: torch's own iterator, which counts, uses memory again, and seeds fetches if it is told to."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.counts import Counts
from shmloader.device.carried import Carrier
from shmloader.iterator import Terms
from shmloader.memory.recycled import Recycler
from shmloader.memory.stack import stack_in_process
from shmloader.workers import seeding

#: Smaller batches are left to torch: glibc's allocator keeps their memory warm itself (it gives back to the system only
#: what is larger than 32 MiB), and at 1.6 MB torch's code was measured to be faster, at 19 MB as fast, at 38 MB at a
#: fifth of the speed (benchmarks/transport.py, cases M, U8 and L).
LEAST_RECYCLED_BYTES = 4 << 20


class InProcessIter(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's iterator, whose large batches lie in leased memory.

    Under ``seeding="batch"`` every fetch is seeded, and leaves the process's generators as they were.
    """

    def __init__(self, loader: Any, terms: Terms, recycler: Recycler) -> None:
        super().__init__(loader)
        self._seed_batches = terms.seed_batches
        self._fetched = 0
        self._counts, self._recycler = Counts(), recycler
        self._carrier = self._open_device(terms)
        terms.record.begin(self._counts)
        terms.record.workers, terms.record.slots, terms.record.pids = 0, recycler.summary, list
        if self._collate_fn is default_collate:
            self._dataset_fetcher.collate_fn = self._collate

    def _open_device(self, terms: Terms) -> Carrier | None:
        terms.record.page_locked = int
        if terms.accelerator is None:
            terms.record.staging = int
            return None
        self._pin_memory = False  # the staging memory is page-locked, and nothing else has to be
        carrier = Carrier(terms.accelerator)
        terms.record.staging = lambda: carrier.nbytes
        return carrier

    def _collate(self, samples: Any) -> Any:
        return stack_in_process(samples, self._recycler.lend, LEAST_RECYCLED_BYTES)

    def __next__(self) -> Any:
        self._counts.enter()
        try:
            data = super().__next__()
        except StopIteration:
            if self._carrier is not None:
                self._carrier.finish()
            raise
        self._counts.leave()
        return data

    def _next_data(self) -> Any:
        started = time.perf_counter()
        try:
            data = self._fetch() if self._seed_batches else super()._next_data()  # type: ignore[no-untyped-call]
            if self._carrier is not None:
                data = self._carrier.carry(data)
        finally:
            self._counts.wait_s += time.perf_counter() - started
        self._counts.batches += 1
        return data

    def __del__(self) -> None:
        if (carrier := getattr(self, "_carrier", None)) is not None:
            carrier.finish()

    def _fetch(self) -> Any:
        # The sampler draws from the training process's generators as ever; only the fetch is set apart, or dropout
        # masks would repeat with every batch.
        indices = self._next_index()  # type: ignore[no-untyped-call]
        batch, self._fetched = self._fetched, self._fetched + 1  # one that fails counts, as it does in workers
        with seeding.isolated():
            seeding.seed_batch(int(self._base_seed), 0, batch)
            data = self._dataset_fetcher.fetch(indices)
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data
