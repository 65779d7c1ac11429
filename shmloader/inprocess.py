"""``num_workers=0``: torch's own iterator, which counts, uses memory again, and seeds fetches if it is told to."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any

from torch.utils.data import _DatasetKind, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from shmloader.counts import Counts
from shmloader.device.carried import Carrier, for_thread
from shmloader.iterator import Terms
from shmloader.late import LateBatch, Pending
from shmloader.memory.recycled import Recycler
from shmloader.memory.stack import stack_in_process
from shmloader.workers import seeding
from shmloader.workers.halves import fetched_by

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
        #: Held while anything is made: who awaits batches and targets has both made in threads.
        self.making = threading.RLock()
        self._counts, self._recycler = Counts(), recycler
        self._carrier = self._open_device(terms)
        terms.record.begin(self._counts)
        terms.record.workers, terms.record.slots, terms.record.pids = 0, recycler.summary, list
        # One for whole batches, or one for each half.
        self._fetchers = self._half_fetchers(terms) or [self._dataset_fetcher]
        for fetcher in self._fetchers:
            if fetcher.collate_fn is default_collate:
                fetcher.collate_fn = self._collate

    def _half_fetchers(self, terms: Terms) -> list[Any]:
        if not terms.half_collates:
            return []
        halves = fetched_by(self._dataset, terms.half_collates)
        auto_collation, drop_last = self._auto_collation, self._drop_last
        return [
            _DatasetKind.create_fetcher(self._dataset_kind, half, auto_collation, collate_fn, drop_last)
            for half, collate_fn in halves
        ]

    def _open_device(self, terms: Terms) -> Carrier | None:
        terms.record.page_locked = int
        if terms.accelerator is None:
            terms.record.staging = int
            return None
        self._pin_memory = False  # the staging memory is page-locked, and nothing else has to be
        carrier = Carrier(terms.accelerator)
        staging = weakref.ref(carrier)
        terms.record.staging = lambda: found.nbytes if (found := staging()) is not None else 0
        return carrier

    def _collate(self, samples: Any) -> Any:
        return stack_in_process(samples, self._recycler.lend, LEAST_RECYCLED_BYTES)

    def __next__(self) -> Any:
        if self._carrier is not None:
            self._carrier.warn()
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
            with self.making:
                data = self._made()
        finally:
            self._counts.wait_s += time.perf_counter() - started
        self._counts.batches += 1
        if self._carrier is not None:
            self._counts.copy_wait_s += self._carrier.take_exposed_s()
        return data

    def _made(self) -> Any:
        if self._seed_batches or len(self._fetchers) > 1:
            return self._fetch()
        data = super()._next_data()  # type: ignore[no-untyped-call]
        return self._carrier.carry(data) if self._carrier is not None else data

    def __del__(self) -> None:
        if (carrier := getattr(self, "_carrier", None)) is not None:
            carrier.finish()

    def _fetch(self) -> Any:
        # The sampler draws from the training process's generators as ever; only the fetch is set apart, or dropout
        # masks would repeat with every batch.
        indices = self._next_index()  # type: ignore[no-untyped-call]
        batch, self._fetched = self._fetched, self._fetched + 1  # one that fails counts, as it does in workers
        if len(self._fetchers) == 1:
            return self.make(indices, batch)
        return LateBatch(self.make(indices, batch, 0), Pending(_Unmade(self, indices), batch))

    def make(self, indices: Any, batch: int, half: int | None = None) -> Any:
        """A batch, or a half of it, where it is to be delivered."""
        fetcher = self._fetchers[half or 0]
        if self._seed_batches:
            with seeding.isolated():
                seeding.seed_batch(int(self._base_seed), 0, batch, half)
                data = fetcher.fetch(indices)
        else:
            data = fetcher.fetch(indices)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)
        return self._carrier.carry(data) if self._carrier is not None else data

    def ready(self) -> bool:
        """No answer: nobody makes anything meanwhile, so who waits for a yes would wait for ever.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("ready() is for loaders with workers; with num_workers=0, next() makes the batch itself")

    def waited(self, seconds: float) -> None:
        """So long were targets made within the step."""
        self._counts.wait_s += seconds
        self._counts.waited_amid(seconds)


class _Unmade:
    """Targets that are made when they are first asked for."""

    def __init__(self, iterator: InProcessIter, indices: Any) -> None:
        self._iterator, self._indices = iterator, indices

    def bring(self, pending: Pending) -> None:
        started = time.perf_counter()
        try:
            with self._iterator.making:
                self._make(pending)
        finally:
            self._iterator.waited(time.perf_counter() - started)

    def _make(self, pending: Pending) -> None:
        if pending.settled:  # by another thread, meanwhile
            return
        try:
            pending.put(self._iterator.make(self._indices, pending.batch, 1))
        except Exception as error:
            pending.fail(error)

    def has(self, _pending: Pending) -> bool:
        return False

    async def until(self, pending: Pending) -> None:
        await asyncio.to_thread(for_thread(self._iterator._carrier, self.bring), pending)
