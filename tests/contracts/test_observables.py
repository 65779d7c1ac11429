"""What else can be seen: pinning, warnings, errors over epochs and start methods, and what is left of ended epochs."""

from __future__ import annotations

import collections
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import IterableDataset

from shmloader import DataLoader
from tests.beside import KINDS, Stock, both, close, epochs, gist, of_forking
from tests.datasets import Made, Rows, Shards, as_is, first
from tests.equal import assert_same
from tests.nests import Point

# -- pinning ----------------------------------------------------------------------------------------------------


class Pinnable:
    """A batch type with a ``pin_memory`` of its own."""

    def __init__(self, number: int) -> None:
        self.number, self.pinned_by = number, ""

    def pin_memory(self) -> Pinnable:
        made = Pinnable(self.number)
        made.pinned_by = "the main process" if torch.utils.data.get_worker_info() is None else "a worker"
        return made


class Plain(dict[str, Any]):
    """A mapping without one."""


BATCHES: dict[str, Callable[[int], Any]] = {
    "itself": Pinnable,
    "in a list": lambda n: [Pinnable(n), "text", b"bytes", 1, None],
    "in a tuple": lambda n: (Pinnable(n), (Pinnable(n),)),
    "in a namedtuple": lambda n: Point(Pinnable(n), {"y": Pinnable(n)}),
    "in a dict": lambda n: Plain(x=Pinnable(n)),
    "in an OrderedDict": lambda n: collections.OrderedDict(b=Pinnable(n)),
    "in a set, where it is not found": lambda n: {"only text"},
}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The belief that there is one, which is enough for batches that hold no tensor."""

    class Device(NamedTuple):
        type: str = "cuda"

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: Device())


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_can_pin_itself_is_asked_to_in_the_main_process(name: str) -> None:
    """As without workers by torch, whose pinning thread needs a real accelerator."""
    mine, its = (
        list(kind(Made(4, BATCHES[name]), collate_fn=first, pin_memory=True, num_workers=workers))
        for kind, workers in ((DataLoader, 1), (Stock, 0))
    )
    assert_same(mine, its)
    assert_same(list(DataLoader(Made(4, BATCHES[name]), collate_fn=first, pin_memory=True)), its)
    if name == "itself":
        assert [(batch.number, batch.pinned_by) for batch in mine] == [(n, "the main process") for n in range(4)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_not_asked_to_pin_itself_where_there_is_no_accelerator_or_no_wish(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        return list(kind(Made(3, Pinnable), collate_fn=first, num_workers=workers))

    assert [batch.pinned_by for batch in both(run)] == [""] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory for an accelerator that is not there")
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_batches_are_pinned_as_torchs_and_custom_ones_are_asked(workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(
            Made(4, lambda n: [torch.full((3,), n), Pinnable(n)]), collate_fn=first, pin_memory=True,
            num_workers=workers,
        )  # fmt: skip
        return [[x.is_pinned(), x.tolist(), custom.number, custom.pinned_by] for x, custom in loader]

    assert both(run) == [[True, [n] * 3, n, "the main process"] for n in range(4)]


def warned(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [f"{one.category.__name__}: {one.message}" for one in caught if not of_forking(one)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="warns of an accelerator that is missing")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_missing_accelerator_is_warned_of_once_for_each_iterator(workers: int, persistent: bool) -> None:
    def run(kind: Any) -> list[str]:
        def use() -> None:
            loader = kind(Rows(2), num_workers=workers, persistent_workers=persistent, pin_memory=True)
            for _ in range(3):
                list(loader)
            close(loader)

        return warned(use)

    mine = both(run)
    assert len(mine) == (1 if persistent else 3)
    assert "no accelerator is found" in mine[0]


# -- lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_length_that_was_asked_for_between_epochs_counts_from_the_next_on(
    workers: int, persistent: bool, batch_size: int | None
) -> None:
    dataset = Shards([0, 1, 2, 3, 4], [10, 11, 12, 13], length=3)

    def run(kind: Any) -> list[Any]:
        loader = kind(dataset, batch_size, num_workers=workers, persistent_workers=persistent)

        def epoch() -> None:
            for _ in loader:  # list() would ask for the length
                pass

        found: list[Any] = [warned(epoch)]
        found += [len(loader), warned(epoch), warned(epoch)]
        dataset.length = 100
        found += [len(loader), warned(epoch)]
        dataset.length = 3
        close(loader)
        return found

    mine = both(run)
    assert mine[0] == mine[5] == []
    assert mine[2] == mine[3] != []


# -- order ------------------------------------------------------------------------------------------------------


def test_out_of_order_persistent_epochs_lose_and_repeat_nothing_and_neither_do_torchs() -> None:
    for kind in KINDS:
        loader = kind(Made(15, int), 2, num_workers=3, in_order=False, persistent_workers=True)
        for stop in (99, 3, 99, 1, 99):
            found = [index for _, batch in zip(range(stop), loader) for index in batch.tolist()]
            assert sorted(set(found)) == sorted(found)
            if stop == 99:
                assert sorted(found) == list(range(15))
        close(loader)


# -- errors -----------------------------------------------------------------------------------------------------


def fails_at_three(index: int) -> int:
    if index == 3:
        raise KeyError("a key", index)
    return index


def outcomes(iterator: Any, calls: int) -> list[Any]:
    """What so many calls of ``next`` come to."""
    found: list[Any] = []
    for _ in range(calls):
        try:
            found.append(next(iterator).tolist())
        except Exception as error:
            found.append(gist(error))
    return found


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_errors_come_again_in_every_epoch_at_the_same_place_in_the_same_words(
    workers: int, persistent: bool, batch_size: int | None
) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(
            Made(6, fails_at_three), batch_size, num_workers=workers, persistent_workers=persistent,
            collate_fn=torch.tensor,
        )  # fmt: skip
        found = [outcomes(iter(loader), 8) for _ in range(2)]
        close(loader)
        return found

    first_epoch, second = both(run)
    assert first_epoch == second
    assert sum("KeyError" in str(item) for item in first_epoch) == 1


class Stops(IterableDataset[Any]):
    """A stream that raises in its first epoch after two items."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield 1
        yield 2
        if self.epoch == 1:
            raise OSError(28, "No space left on device")
        yield 3


@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_a_stream_that_broke_begins_again_in_the_next_epoch(batch_size: int | None) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Stops(), batch_size, num_workers=1, persistent_workers=True, collate_fn=torch.tensor)
        found = [outcomes(iter(loader), 5) for _ in range(2)]
        close(loader)
        return found

    both(run)


def fails_with_a_cause(index: int) -> int:
    try:
        return {}[index]  # type: ignore[no-any-return, var-annotated]
    except KeyError as error:
        raise LookupError(f"sample {index}") from error


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_original_traceback_is_told_with_its_cause(method: str) -> None:
    def error(kind: Any, method: str) -> LookupError:
        iterator = iter(kind(Made(2, fails_with_a_cause), num_workers=1, multiprocessing_context=method))
        with pytest.raises(LookupError) as caught:
            next(iterator)
        iterator._shutdown_workers()
        return caught.value

    mine, its = error(DataLoader, method), error(Stock, "fork")
    assert type(mine) is type(its) is LookupError
    for text in (str(mine), str(its)):
        assert text.startswith("Caught LookupError in DataLoader worker process 0.\nOriginal Traceback (most recent")
        assert "in fails_with_a_cause" in text
        assert "KeyError: 0" in text
        assert "The above exception was the direct cause" in text
        assert "LookupError: sample 0" in text


# -- ends -------------------------------------------------------------------------------------------------------


def loops(kind: Any, found: list[Any]) -> None:
    loader = kind(Rows(6), 2, num_workers=2)
    found += [[y.tolist() for _, y in loader] for _ in range(2)]


def test_a_loader_works_in_a_thread_as_torchs_does() -> None:
    def run(kind: Any) -> list[Any]:
        found: list[Any] = []
        thread = threading.Thread(target=loops, args=(kind, found))
        thread.start()
        thread.join()
        return found

    assert both(run) == [[[0, 1], [2, 3], [4, 5]]] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_whose_workers_were_shut_down_may_be_shut_down_and_finalized_again(persistent: bool) -> None:
    for kind in KINDS:
        loader = kind(Rows(8), num_workers=2, persistent_workers=persistent)
        iterator = iter(loader)
        next(iterator)
        workers = list(iterator._workers)
        for _ in range(2):
            iterator._shutdown_workers()
            iterator.__del__()
        assert not any(worker.is_alive() for worker in workers)
        loader._iterator = None
        assert len(list(loader)) == 8
        close(loader)


@pytest.mark.slow
def test_a_storm_of_epochs_that_are_only_begun_leaves_nothing() -> None:
    """What is left would be found after the test, by its descriptors, children and mappings."""
    for persistent in (False, True):
        loader = DataLoader(Rows(40, 1000), 2, num_workers=2, persistent_workers=persistent, prefetch_factor=4)
        for _ in range(30 if persistent else 8):
            for _, y in loader:
                assert y.tolist() == [0, 1]
                break
        loader.close()
    gc.collect()


def test_the_items_of_a_batch_that_is_a_generators_are_refused_and_the_epoch_goes_on() -> None:
    """Torch's loader waits for such a batch for ever; with ours it is an error at its turn."""

    def collate(items: Any) -> Any:
        return (item for item in items) if items[0] == 1 else as_is(items)

    iterator = iter(DataLoader(Made(3, int), num_workers=1, collate_fn=collate))
    assert next(iterator) == [0]
    with pytest.raises(Exception, match="cannot be sent"):
        next(iterator)
    assert next(iterator) == [2]
    assert next(iterator, "end") == "end"


def test_whole_epochs_are_the_same_with_every_option_at_once() -> None:
    def run(kind: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(4)
        return epochs(
            kind, Rows(23), 3, num_workers=2, shuffle=True, drop_last=True, persistent_workers=True, prefetch_factor=3,
            timeout=60, generator=generator, count=3, multiprocessing_context="fork", worker_init_fn=torch.manual_seed,
        )  # fmt: skip

    assert [len(epoch) for epoch in both(run)] == [7] * 3
