"""DataLoader: torch's signature plus our options. Owns the pools' reuse across epochs, the read-outs, and close()."""

from __future__ import annotations

import math
import multiprocessing
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy as shallow_copy
from typing import Any, TypeVar, cast

import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, IterDataPipe, MapDataPipe, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shmloader.asynchronous import AsyncIter
from shmloader.device import accelerator
from shmloader.device.carried import Carried
from shmloader.errors import PlatformWarning, SeedingWarning
from shmloader.inprocess import InProcessIter
from shmloader.iterator import ShmIter, Terms
from shmloader.memory import segment
from shmloader.memory.budget import check_slots, default_budget, parse_memory_limit
from shmloader.memory.pool import Lender
from shmloader.memory.recycled import Recycler
from shmloader.sidecollate import collate_of, half_collates
from shmloader.stats import LoaderStats, Record
from shmloader.tuning import machine
from shmloader.tuning.auto import AutoWorkers, check_max_workers, choose_workers
from shmloader.workers.halves import halves_of
from shmloader.workers.seeding import own_generators

T_co = TypeVar("T_co", covariant=True)

_warned_of_daemon = False

#: Called with every loader whose iterator is made, and its record; for ``shmloader run``.
watch: Callable[[Any, Record], None] | None = None

#: torch's own loader, whatever its name is bound to by the time that somebody asks.
TorchLoader = torch.utils.data.DataLoader

SEEDINGS = ("worker", "batch")
#: The keywords that torch's loader does not have.
OPTIONS = ("memory_limit", "slots", "seeding", "max_workers", "copy", "device", "late_targets")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """Drop-in replacement for :class:`torch.utils.data.DataLoader` on a pool of shared-memory slots.

    Every argument of torch's loader means what it means there; these come on top:

    Args:
        collate_fn: default: what a :class:`PairedDataset` with ``collate`` asks for, also within torch's ``Subset``,
            ``ConcatDataset`` or ``ChainDataset``; else as torch's.
        pin_memory: as torch's, but batches lie in page-locked slots as they are: nothing is copied. Dropping one right
            after ``x.to("cuda", non_blocking=True)``, on any stream, is safe: its slot is used again only behind a
            fence (CUDA's ``cuCtxRecordEvent``; before 12.5, and with HIP, a synchronised device) over all that the
            device had been given. A slot that was leased during a graph's capture is never used again. Not seen are
            captures that other libraries make without torch, and copies in CUDA contexts that are not torch's.
            What cannot be page-locked is pinned by torch, in a copy.
        num_workers: also ``"auto"``: chosen from the CPU affinity, the container's CPU quota and the physical cores,
            shared among the local ranks.
        memory_limit: most bytes that this loader's slots may take in this process: an int, ``"512MiB"``, ``"2GB"``, or
            ``"25%"`` of what is available. Default: half of what the machine and its container have available,
            shared among the local ranks. A batch larger than a limit that was given is an error at its turn.
        slots: exact number of slots in circulation, one per batch. Default: as many as are needed for the lookahead
            and for what the consumer holds, within the limit.
        seeding: ``"worker"`` seeds each worker once, as torch does (the default for a given ``num_workers``);
            ``"batch"`` seeds torch, ``random`` and numpy before every batch from (base seed, epoch, batch index), so
            that data depend neither on the number of workers nor on which one makes a batch (the default for
            ``"auto"``), and gives batches to whichever worker is free.
        max_workers: bound for ``num_workers="auto"``; for an iterable data set it also allows more than one.
        copy: deliver private copies only, never views of the pool.
        device: where batches are delivered: ``"cuda"``, a ``torch.device`` or an index of ``torch.accelerator``'s
            devices, resolved when an epoch begins (without an index: the current device of this process; one that torch
            does not see is a RuntimeError then). Copies are issued ahead of need on one side stream, for which the
            current stream waits at ``next()``; batches are the consumer's own. Default, and for ``"cpu"``: batches stay
            on the CPU. ``pin_memory`` then has nothing to do.
        late_targets: hand over inputs as soon as they are there; each batch is a :class:`LateBatch`, a tuple
            ``(inputs, targets)`` that waits for its targets only when they are used. For a map-style
            :class:`PairedDataset` of inputs and targets, a ``StackDataset`` of two, or a data set with
            ``load_input(index)`` and ``load_target(index)``, also within torch's ``Subset`` and ``ConcatDataset``.
            What a side raises is raised where that side is used. Under ``seeding="batch"``, each half is seeded by
            itself; under ``"worker"``, a worker makes a batch's inputs, then its targets. Each half has slots of its
            own, and ``slots`` is the number for each. Without workers, targets are made when they are first used.
        kwargs: newer torch's own keywords, passed on.

    Batches are views of pool memory that is theirs for as long as anything refers to it; hold as many as you like.

    Raises:
        TypeError, ValueError: as torch's loader, and for options that are out of range; for ``late_targets`` with a
            data set whose inputs cannot be had without its targets (``joint_transform``, pairs by name, iterable
            ones), or with a ``collate_fn`` that sees whole pairs.
    """

    # Subclasses in the wild copy __dict__ or set attributes themselves, and never call __init__.
    memory_limit: int | str | None = None
    slots: int | None = None
    seeding: str | None = None
    max_workers: int | None = None
    copy: bool = False
    device: str | int | torch.device | None = None
    late_targets: bool = False
    # Frameworks delete it to end an epoch's workers; iterating again must not fail over that.
    _iterator: _BaseDataLoaderIter | None = None

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        memory_limit: int | str | None = None,
        slots: int | None = None,
        seeding: str | None = None,
        max_workers: int | None = None,
        copy: bool = False,
        device: str | int | torch.device | None = None,
        late_targets: bool = False,
        **kwargs: Any,
    ) -> None:
        check_options(memory_limit, slots, seeding, max_workers, copy, device, late_targets)
        options: dict[str, Any] = {"memory_limit": memory_limit, "slots": slots, "seeding": seeding}
        options |= {"max_workers": max_workers, "copy": copy, "device": device, "late_targets": late_targets}
        num_workers = self._resolve(dataset, num_workers, options)
        max_workers = options["max_workers"]
        if collate_fn is None:
            collate_fn = collate_of(dataset, batching=batch_size is not None or batch_sampler is not None)
        if num_workers == "auto" or isinstance(num_workers, AutoWorkers):
            num_workers = _count_workers(dataset, batch_size, sampler, batch_sampler, max_workers)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,  # type: ignore[arg-type]
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            **kwargs,
        )
        # Raw, under the keywords' own names: frameworks re-create loaders from these attributes.
        for name, value in options.items():
            setattr(self, name, value)
        if late_targets:
            _collates_of_halves(self)  # an error here rather than in the first epoch
        _home(self)  # known to loaders() from now on

    def _resolve(self, dataset: Any, num_workers: Any, options: dict[str, Any]) -> Any:
        """The number of workers and, in ``options``, what this loader is to have instead of what was asked for."""
        return num_workers

    # -- iterating ---------------------------------------------------------------------------------------------

    def __iter__(self) -> _BaseDataLoaderIter:
        if isinstance(self._iterator, InProcessIter):
            self._iterator = None  # persistent workers that could not be had: nothing persists
        if isinstance(self._iterator, ShmIter) and self._iterator.spent:
            # Closed, broken off in the middle of a step, or a worker died: start afresh.
            self._iterator._shutdown_workers()
            self._iterator = None
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        # Pipes change their own graph while they are iterated; torch's iterator knows how.
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return self._torchs_iterator()
        if self.num_workers and not segment.supported():
            warnings.warn("no anonymous shared files here; torch's own loader does the work", PlatformWarning, 2)
            return self._torchs_iterator()
        if watch is not None:
            watch(self, _home(self).record)
        terms = _home(self).terms(self)
        if terms.seed_batches:
            _warn_of_generators(self.dataset)
        if self.num_workers == 0:
            return InProcessIter(self, terms, _home(self).recycler)
        if multiprocessing.current_process().daemon:
            return InProcessIter(self._without_workers(), terms, _home(self).recycler)
        self.check_worker_number_rationality()
        iterator = ShmIter(self, terms)
        _home(self).iterators.add(iterator)
        return iterator

    def _torchs_iterator(self) -> _BaseDataLoaderIter:
        if self.late_targets:
            raise RuntimeError("late_targets needs shmloader's own workers, which cannot be had here; leave it out")
        there = accelerator.find(self.device)
        iterator = super()._get_iterator()
        return iterator if there is None else cast(_BaseDataLoaderIter, Carried(iterator, there))

    def _without_workers(self) -> DataLoader[T_co]:
        """This loader for a process that may have no children; torch's raises an error there."""
        global _warned_of_daemon
        if not _warned_of_daemon:
            _warned_of_daemon = True
            text = "this process is daemonic (another loader's worker?) and may have no workers of its own; "
            warnings.warn(text + "batches are made in the process itself", PlatformWarning, stacklevel=3)
        alone = shallow_copy(self)
        alone.num_workers, alone.timeout = 0, 0
        return alone

    def __aiter__(self) -> AsyncIter[T_co]:
        """For ``async for``: an epoch as of :func:`iter`, that never blocks the event loop while it waits."""
        return AsyncIter(iter(self))

    # -- reading and closing -----------------------------------------------------------------------------------

    def stats(self, *, lifetime: bool = False) -> LoaderStats:
        """A frozen read-out. Callable from any thread.

        Args:
            lifetime: of all epochs of this loader so far, instead of the current or last one. Slots and memory are
                those of this moment either way.
        """
        return _home(self).record.snapshot(lifetime)

    def poke(self) -> int:
        """Take in what the workers have said, and give them the space that they ask for, without waiting.

        For loops with very long steps, where it keeps workers from waiting for slots until the next ``next()``; call
        it from the thread that iterates. Errors, and the end of a worker, are left to the next ``next()``.

        Returns:
            How many batches are ready to be delivered at once (0 without workers).
        """
        home = _homes.get(id(self))
        return sum(iterator.poke() for iterator in tuple(home.iterators)) if home is not None else 0

    def close(self) -> None:
        """End all workers and give the pool back, but for what held batches lie in: they stay valid.

        Live iterators of this loader end; iterating again starts afresh. Safe to call twice.
        """
        home = _homes.get(id(self))
        if home is not None:
            home.close()
        self._iterator = None

    def __getstate__(self) -> dict[str, Any]:
        # A live iterator stays where it is. torch's own loader cannot be pickled while it has one.
        return {**self.__dict__, "_iterator": None}

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_options(
    memory_limit: Any = None,
    slots: Any = None,
    seeding: Any = None,
    max_workers: Any = None,
    copy: Any = False,
    device: Any = None,
    late_targets: Any = False,
) -> None:
    """Whether the options make sense, whatever the data set.

    Raises:
        TypeError, ValueError: they do not.
    """
    parse_memory_limit(memory_limit, machine.available_memory)
    check_slots(slots)
    check_max_workers(max_workers)
    if seeding is not None and seeding not in SEEDINGS:
        raise ValueError(f"seeding must be 'worker', 'batch' or None, got {seeding!r}")
    if not isinstance(copy, bool):
        raise TypeError(f"copy must be a bool, got {copy!r}")
    if not isinstance(late_targets, bool):
        raise TypeError(f"late_targets must be a bool, got {late_targets!r}")
    accelerator.check(device)


def _collates_of_halves(loader: Any) -> tuple[Callable[[Any], Any], ...]:
    """The collate functions of inputs and of targets.

    Raises:
        TypeError: the data set or the collate function does not allow for late targets.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError("late_targets needs a map-style data set: a stream gives inputs and targets together")
    halves_of(loader.dataset)
    return half_collates(loader.collate_fn)


def _count_workers(dataset: Any, batch_size: Any, sampler: Any, batch_sampler: Any, max_workers: Any) -> AutoWorkers:
    batches = None
    if sampler is None and batch_sampler is None and hasattr(dataset, "__len__") and isinstance(batch_size, int):
        with suppress(TypeError):  # a ChainDataset, or a stream of pairs, of streams without a length
            batches = math.ceil(len(dataset) / batch_size) if batch_size > 0 else None
    count, _ = choose_workers(
        cores=machine.usable_cores(),
        batches=batches,
        max_workers=max_workers,
        iterable=isinstance(dataset, IterableDataset),
    )
    return AutoWorkers(count)


def _warn_of_generators(dataset: Any) -> None:
    names = own_generators(dataset)
    if names:
        warnings.warn(
            f"the data set holds random generators of its own ({', '.join(names)}), which seeding='batch' cannot seed: "
            "their draws depend on the workers; draw from torch, random or numpy.random instead",
            SeedingWarning,
            stacklevel=3,
        )


# -- what belongs to a loader but must not travel with it -------------------------------------------------------


class _Home:
    """A loader's pools, record and live iterators.

    Not in the loader's ``__dict__``: loaders are pickled, deep-copied and re-created from it.
    """

    def __init__(self) -> None:
        self.record = Record(cores=machine.usable_cores, private_bytes=machine.private_bytes)
        self.recycler = Recycler()
        self.iterators: weakref.WeakSet[ShmIter] = weakref.WeakSet()
        self._lender: Lender | None = None
        self._options: tuple[Any, ...] = ()

    def terms(self, loader: Any) -> Terms:
        """The loader's options as they stand now."""
        limit = parse_memory_limit(loader.memory_limit, machine.available_memory)
        seeding = loader.seeding or ("batch" if isinstance(loader.num_workers, AutoWorkers) else "worker")
        return Terms(
            lender=self._lender_for(loader.memory_limit, limit, loader.slots),
            limit_bytes=limit,
            available=machine.available_memory,
            seed_batches=seeding == "batch",
            copy=loader.copy,
            accelerator=accelerator.find(loader.device),
            record=self.record,
            half_collates=_collates_of_halves(loader) if loader.late_targets else (),
        )

    def _lender_for(self, raw_limit: Any, limit: int | None, slots: int | None) -> Lender:
        if self._lender is None or self._options != (raw_limit, slots):
            if self._lender is not None:
                self._lender.close()
            self._options = raw_limit, slots
            budget = _default_budget if limit is None else lambda: limit // segment.PAGE_BYTES * segment.PAGE_BYTES
            self._lender = Lender(budget, machine.available_memory, slots)
        return self._lender

    def close(self) -> None:
        """End the iterators and give the pools back."""
        for iterator in tuple(self.iterators):
            iterator._shutdown_workers()
        self.retire()
        self._lender, self.recycler = None, Recycler()
        if not self.record.workers:
            self.record.slots = dict  # the read-out would keep the memory

    def retire(self) -> None:
        """The loader is gone: iterators that live on keep what they have, what is idle goes."""
        if self._lender is not None:
            self._lender.close()


def _default_budget() -> int:
    return default_budget(machine.available_memory(), machine.local_ranks())


#: By identity, not by equality: a subclass may define ``__eq__``.
_homes: dict[int, _Home] = {}
_watches: dict[int, weakref.ref[Any]] = {}


def _home(loader: Any) -> _Home:
    key = id(loader)
    home = _homes.get(key)
    if home is None:
        home = _homes[key] = _Home()
        _watches[key] = weakref.ref(loader, lambda _: _forget(key))
    return home


def loaders() -> tuple[DataLoader[Any], ...]:
    """The live loaders of this process, in the order in which they were made; held weakly.

    For code inside frameworks, which make loaders of their own or wrap the ones that they are given: whoever runs in
    the same process can still read ``stats()`` or call ``close()``. Callable from any thread.
    """
    known = tuple(watch() for watch in tuple(_watches.values()))
    return tuple(loader for loader in known if isinstance(loader, DataLoader))


def terms_of(loader: Any, options: Any) -> Terms:
    """The terms for a loader that is not ours, with options that it does not have itself."""
    home = _home(loader)
    if watch is not None:
        watch(loader, home.record)
    return home.terms(options)


def _forget(key: int) -> None:
    _watches.pop(key, None)
    home = _homes.pop(key, None)
    if home is not None:
        home.retire()
