"""Iterable data sets: shards, lengths, ends and errors as with torch's loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import (
    IterableDataset,
)

from shmloader import DataLoader
from tests.beside import (
    assert_same_epochs,
    both,
    close,
    of_forking,
)
from tests.datasets import (
    Shards,
)

STREAMS: dict[str, list[list[int]]] = {
    "even": [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]],
    "uneven": [[0], [10, 11, 12, 13, 14, 15, 16], [20, 21, 22]],
    "one empty": [[], [10, 11, 12], [20]],
    "last empty": [[0, 1, 2, 3, 4], [10], []],
    "all empty": [[], [], []],
    "first long": [[*range(9)], [10], [20, 21]],
}


#: With three workers all ways to batch, with fewer those that tell how many items and ends each worker has.
WAYS: list[tuple[int, dict[str, Any]]] = [
    *((3, {"batch_size": 2, "drop_last": drop}) for drop in (False, True)),
    *((3, {"batch_size": size}) for size in (None, 5)),
    (2, {"batch_size": 2, "drop_last": True}),
    (2, {"batch_size": None}),
    (1, {"batch_size": 2}),
    *((0, {"batch_size": size, "drop_last": drop}) for size in (2, 5) for drop in (False, True)),
    (0, {"batch_size": None}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_streams_come_as_from_torchs_loader(name: str) -> None:
    for workers, options in WAYS:
        assert_same_epochs(lambda: Shards(*STREAMS[name]), num_workers=workers, **options)


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": None}], ids=str)
def test_persistent_workers_begin_their_streams_again(options: dict[str, Any]) -> None:
    assert_same_epochs(lambda: Shards(*STREAMS["uneven"]), num_workers=3, persistent_workers=True, count=3, **options)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_persistent_workers_begin_their_streams_again_after_an_early_break(stop: int) -> None:
    def run(kind: Any) -> list[Any]:
        loader = kind(Shards(*STREAMS["uneven"]), 2, num_workers=3, persistent_workers=True)
        for count, _ in enumerate(loader, 1):
            if count == stop:
                break
        found = list(loader)
        close(loader)
        return found

    both(run)


def test_three_uneven_shards_in_the_order_that_torch_documents() -> None:
    shards = [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    mine = assert_same_epochs(lambda: Shards(*shards), 2, num_workers=3)
    assert [batch.tolist() for batch in mine[0]] == [[0, 3], [1, 4], [2, 5], [6, 9], [7], [8]]


def test_streams_out_of_order_lose_and_repeat_nothing() -> None:
    for shards in STREAMS.values():
        found = [int(item) for item in DataLoader(Shards(*shards), num_workers=3, in_order=False)]
        assert sorted(found) == sorted(item for shard in shards for item in shard)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("asked", [False, True])
def test_a_stream_longer_than_it_said_is_warned_of_as_often_as_torch_does_and_in_its_words(
    workers: int, asked: bool
) -> None:
    dataset = Shards([0, 1, 2, 3, 4], [10, 11, 12, 13], length=2)

    def run(kind: Any) -> list[str]:
        loader = kind(dataset, 2, num_workers=workers)
        if asked:
            len(loader)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:  # list() would ask for the length
                pass
        return [f"{warning.category.__name__}: {warning.message}" for warning in caught if not of_forking(warning)]

    mine = both(run)
    assert bool(mine) is asked
    assert all("Length of IterableDataset" in text for text in mine)


class BreaksOff(IterableDataset[Any]):
    """Yields three items and raises."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(3)
        raise KeyError("stream broke")


def test_an_error_in_a_stream_comes_where_it_does_in_torchs_loader() -> None:
    def run(kind: Any) -> list[Any]:
        seen: list[Any] = []
        iterator = iter(kind(BreaksOff(), 2, num_workers=1))
        for _ in range(3):
            try:
                seen.append(next(iterator).tolist())
            except (KeyError, StopIteration) as error:
                seen.append(type(error).__name__)
        iterator._shutdown_workers()
        return seen

    assert both(run) == [[0, 1], "KeyError", "StopIteration"]
