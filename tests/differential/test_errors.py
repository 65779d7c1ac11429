"""Errors: the same ones at the same turns in the same words as from torch's loader, and the epoch goes on."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    Dataset,
    IterableDataset,
)

from shmloader import DataLoader, UnpicklableBatchError
from tests.beside import (
    KINDS,
    PATIENCE_S,
    Stock,
    both,
    gist,
    one_epoch,
)
from tests.datasets import (
    Made,
)
from tests.nests import (
    Point,
    Record,
)


class TwoArguments(Exception):
    """Cannot be built from one text."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one, two)


class Described(Exception):
    """Has a ``message``, and is built with it."""

    message = "truthy"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class OddlyDescribed(Exception):
    """Has a ``message``, and cannot be built with it."""

    message = "truthy"


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("some text"),
    "KeyError": lambda: KeyError("a key"),
    "IndexError": lambda: IndexError(3),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "there.jpg"),
    "AssertionError": lambda: AssertionError(),
    "NotImplementedError": lambda: NotImplementedError("later"),
    "MemoryError": lambda: MemoryError("much"),
    "RuntimeError": lambda: RuntimeError("CUDA error: nobody home"),
    "two arguments": lambda: TwoArguments(1, 2),
    "described": lambda: Described("text"),
    "Unicode": lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "reason"),
    "a group": lambda: ZeroDivisionError("zero"),
}


class Raises(Dataset[Any]):
    """Item 3 of eight raises."""

    def __init__(self, make: Callable[[], BaseException], at: int = 3) -> None:
        self.make, self.at = make, at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise self.make()
        return index


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_the_data_set_arrives_as_torchs_and_the_epoch_goes_on(name: str, workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Raises(ERRORS[name]), num_workers=workers))
        return [gist(item) for item in one_epoch(iterator)]

    seen = both(run)
    assert [item for item in seen if not isinstance(item, list)] == [0, 1, 2, 4, 5, 6, 7, "end", "end"]
    if workers:
        assert seen[3][1][0] == f"Caught {type(ERRORS[name]()).__name__} in DataLoader worker process 1."
        assert seen[3][1][1] == "Original Traceback (most recent call last):"


def test_a_class_that_torch_cannot_rebuild_arrives_as_a_runtime_error_with_the_cause_in_it() -> None:
    error = one_epoch(iter(DataLoader(Raises(OddlyDescribed), num_workers=1)))[3]
    assert "Caught OddlyDescribed in DataLoader worker process 0." in str(error)


def test_a_class_that_cannot_be_sent_arrives_as_a_runtime_error_with_the_cause_in_it() -> None:
    class Local(Exception):
        pass

    error = one_epoch(iter(DataLoader(Raises(lambda: Local("hidden")), num_workers=1)))[3]
    assert type(error) is RuntimeError
    assert str(error).startswith("Caught Local in DataLoader worker process 0.\nOriginal Traceback")
    assert "hidden" in str(error)


def test_a_map_style_data_set_that_stops_the_iteration_is_an_error_not_a_silent_end() -> None:
    """Torch's loader ends the epoch there without a word."""
    assert one_epoch(iter(Stock(Raises(StopIteration), num_workers=1)))[3] == "end"
    seen = one_epoch(iter(DataLoader(Raises(StopIteration), num_workers=1)))
    assert "StopIteration" in str(seen[3])
    assert seen[4:] == [4, 5, 6, 7, "end", "end"]


def test_no_slot_is_lost_to_errors() -> None:
    loader = DataLoader(Raises(lambda: ValueError("text")), num_workers=2, persistent_workers=True)
    for _ in range(5):
        one_epoch(iter(loader))
    assert set(loader.stats().slots) <= {"FREE"}
    loader.close()


def fails_in_collate(items: Any) -> Any:
    if items[0] == 3:
        raise ValueError("in collate")
    return torch.tensor(items)


def test_an_error_in_the_collate_function_arrives_as_torchs() -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Made(8, int), num_workers=2, collate_fn=fails_in_collate))
        return [gist(item) for item in one_epoch(iterator)]

    assert both(run)[3][1][0] == "Caught ValueError in DataLoader worker process 1."


def wraps_three(items: Any) -> Any:
    if items[0] != 3:
        return torch.tensor(items)
    try:
        raise ValueError("wrapped by hand")
    except ValueError:
        return ExceptionWrapper(where="in a collate function")


def test_an_error_that_a_collate_function_returns_is_raised_as_by_torch() -> None:
    def run(kind: Any) -> list[Any]:
        iterator = iter(kind(Made(8, int), num_workers=2, collate_fn=wraps_three))
        return [gist(item) for item in one_epoch(iterator)]

    assert both(run)[3][1][0] == "Caught ValueError in a collate function."


def fail_in_worker_one(worker: int) -> None:
    if worker == 1:
        raise ValueError("not this one")


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_an_error_in_the_init_function_is_what_every_batch_of_that_worker_comes_to(method: str) -> None:
    options = {"num_workers": 2, "worker_init_fn": fail_in_worker_one, "multiprocessing_context": method}
    seen = [gist(item) for item in one_epoch(iter(DataLoader(Made(6, int), **options)))]
    caught = "Caught ValueError in DataLoader worker process 1."
    assert [item if isinstance(item, (int, str)) else item[1][0] for item in seen] == [
        0, caught, 2, caught, 4, caught, "end", "end",
    ]  # fmt: skip
    iterator = iter(Stock(Made(6, int), **options))
    assert int(next(iterator)) == 0
    with pytest.raises(ValueError, match="not this one") as theirs:
        next(iterator)
    assert gist(theirs.value)[:2] == seen[1][:2]
    iterator._shutdown_workers()


class CannotBegin(IterableDataset[Any]):
    """Raises when iteration begins."""

    def __iter__(self) -> Iterator[Any]:
        raise KeyError("no beginning")


def test_an_error_when_a_stream_begins_arrives_as_torchs() -> None:
    def run(kind: Any) -> Any:
        iterator = iter(kind(CannotBegin(), num_workers=1))
        with pytest.raises(KeyError) as caught:
            next(iterator)
        iterator._shutdown_workers()
        return gist(caught.value)

    both(run)


class BeginsOddly(IterableDataset[Any]):
    """Raises when iteration begins for the second time."""

    begun = 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        if self.begun == 2:
            raise KeyError("not again")
        return iter(range(2))


def test_a_stream_that_fails_to_begin_again_fails_in_that_epoch_only() -> None:
    """Torch's worker dies of it."""
    loader = DataLoader(BeginsOddly(), num_workers=1, persistent_workers=True)
    assert [int(item) for item in loader] == [0, 1]
    with pytest.raises(KeyError, match="not again"):
        next(iter(loader))
    assert [int(item) for item in loader] == [0, 1]
    loader.close()


UNSENDABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a generator": (lambda samples: {"x": [1, (n for n in samples)]}, r"batch\['x'\]\[1\] cannot be sent"),
    "a lock": (lambda samples: Record(inner=threading.Lock()), r"batch\.inner cannot be sent"),
    "a tracked tensor": (
        lambda samples: [torch.ones(2, requires_grad=True) * 2],
        r"batch\[0\] cannot be sent.*Cowardly refusing to serialize non-leaf tensor.*detach\(\)",
    ),
    "a function": (lambda samples: Point(0, lambda: samples), r"batch\.y cannot be sent"),
}


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_cannot_be_sent_is_an_error_at_its_turn_that_names_the_place(name: str) -> None:
    bad, text = UNSENDABLE[name]

    def collate(items: Any) -> Any:
        return bad(items) if items[0] == 3 else torch.tensor(items)

    seen = one_epoch(iter(DataLoader(Made(6, int), num_workers=2, collate_fn=collate)))
    error = seen.pop(3)
    assert seen == [0, 1, 2, 4, 5, "end", "end"]
    assert isinstance(error, UnpicklableBatchError)
    with pytest.raises(UnpicklableBatchError, match=f"(?s){text}"):
        raise error


class Refuses:
    """Can be sent, and refuses to be rebuilt."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def refuses_at_three(items: Any) -> Any:
    return [torch.ones(100), Refuses()] if items[0] == 3 else torch.tensor(items)


@pytest.mark.slow
def test_what_cannot_be_rebuilt_is_an_error_at_its_turn_and_loses_no_slot() -> None:
    loader = DataLoader(Made(8, int), num_workers=2, collate_fn=refuses_at_three, persistent_workers=True)
    for _ in range(3):
        seen = one_epoch(iter(loader))
        assert [item for item in seen if not isinstance(item, Exception)] == [0, 1, 2, 4, 5, 6, 7, "end", "end"]
        assert "not a number" in str(seen[3])
        del seen
        gc.collect()
    loader._iterator._pool.reclaim()
    assert list(loader.stats().slots) == ["FREE"]
    loader.close()


class Stuck(Made):
    """Item 2 waits for something that only the test can do."""

    def __init__(self) -> None:
        super().__init__(4, int)
        self.release = multiprocessing.Event()

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            self.release.wait(PATIENCE_S)
        return index


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_come_in_time_is_torchs_error(kind: Any) -> None:
    dataset = Stuck()
    iterator = iter(kind(dataset, num_workers=1, timeout=PATIENCE_S))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    assert iterator._timeout == PATIENCE_S
    iterator._timeout = 0.3  # not before the worker has started, which may take as long
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert str(caught.value) == "DataLoader timed out after 0.3 seconds"
    dataset.release.set()
    iterator._shutdown_workers()


def test_after_a_timeout_the_batch_is_still_there_to_be_had() -> None:
    dataset = Stuck()
    iterator = iter(DataLoader(dataset, num_workers=1, timeout=PATIENCE_S))
    seen = [int(next(iterator)), int(next(iterator))]
    iterator._timeout = 0.1
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    dataset.release.set()
    iterator._timeout = PATIENCE_S
    assert [*seen, *map(int, iterator)] == [0, 1, 2, 3]
