"""What makes two batches the same, and how much of them is looked at."""

from __future__ import annotations

import pickle
import warnings
from collections import UserDict, defaultdict
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.cli.fingerprint import fingerprint
from shmloader.cli.weigh import batch_bytes, look_at
from tests.bench_targets import Point, Record, Slotted, odd_batch


class Tagged(torch.Tensor):
    """A subclass of Tensor."""


def tagged(tag: str) -> torch.Tensor:
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.tag = tag  # type: ignore[attr-defined]
    return tensor


def sparse(value: float) -> torch.Tensor:
    return torch.tensor([[0.0, value]]).to_sparse()


def quantized(scale: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch deprecates them
        return torch.quantize_per_tensor(torch.ones(3), scale, 0, torch.qint8)


def nested(length: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(length)])


SAME: list[Callable[[], Any]] = [
    lambda: None,
    lambda: float("nan"),
    lambda: torch.tensor([float("nan"), -0.0]),
    lambda: {"b": 1, "a": [torch.arange(20), (2, "x")]},
    lambda: {"x", "y", "zz", 3},
    lambda: np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    lambda: np.zeros((0, 3)),
    lambda: np.array([None, {"a": torch.ones(1)}], dtype=object),
    lambda: UserDict(a=torch.ones(2)),
    lambda: defaultdict(list, a=[1]),
    lambda: PurePath("a/b"),
    lambda: sparse(3.0),
    lambda: quantized(0.5),
    lambda: nested(3),
    lambda: torch.ones(3, 3, device="meta"),
    lambda: torch.complex(torch.ones(3), torch.ones(3)).conj(),
    lambda: tagged("a"),
    Slotted,
    lambda: Record(torch.ones(2), {"k": 1}),
    lambda: ["\udcff", "ä"] * 10,
]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("make", SAME)
def test_equal_batches_have_equal_fingerprints_also_after_a_journey(make: Callable[[], Any]) -> None:
    assert fingerprint(make()) == fingerprint(make())
    assert fingerprint(pickle.loads(pickle.dumps(make()))) == fingerprint(make())


@pytest.mark.parametrize(
    ("one", "two", "where"),
    [
        (1, 2, ""),
        (1, True, ""),
        (0.0, -0.0, ""),
        ("a", b"a", ""),
        ([1, 2], (1, 2), ""),
        ([1, 2], [2, 1], "[0]"),
        (list(range(50)), [*range(49), 0], ""),
        ({"a": 1}, {"a": 2}, "['a']"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "['a']"),
        ({1, 2}, {1, 3}, ""),
        (Point(1, 2), Point(1, 3), "[1]"),
        (torch.zeros(9), torch.zeros(9, dtype=torch.float64), ""),
        (torch.zeros(9), torch.zeros(3, 3), ""),
        (torch.zeros(9), torch.eye(9)[0], ""),
        (torch.zeros(1), -torch.zeros(1), ""),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), ""),
        (torch.ones(2), tagged("a"), ""),
        (tagged("a"), tagged("b"), ".tag"),
        (sparse(3.0), sparse(4.0), " (inside)[2]"),
        (quantized(0.5), quantized(0.25), " (inside)[0]"),
        (nested(3), nested(4), " (inside)[1]"),
        (np.zeros(3), np.zeros(3, dtype=np.float32), ""),
        (np.zeros(30), np.ones(30), ""),
        (np.float32(1), np.float64(1), ""),
        ({"r": [Record(torch.ones(2), {"k": 1})]}, {"r": [Record(torch.ones(2), {"k": 2})]}, "['r'][0].extra['k']"),
    ],
)
def test_a_difference_is_found_where_it_is(one: Any, two: Any, where: str) -> None:
    pairs = zip(fingerprint(one), fingerprint(two))
    assert next(mine.where for mine, its in pairs if mine != its) == where


def test_what_cannot_be_looked_into_is_marked() -> None:
    parts = {part.where: part.opaque for part in fingerprint({"a": 1, "stream": iter(()), "gen": (i for i in [1])})}
    assert parts["['gen']"]
    assert not parts["['a']"]


def test_a_batch_that_refers_to_itself_comes_to_an_end() -> None:
    batch: list[Any] = [torch.ones(2)]
    batch.append(batch)
    assert fingerprint(batch)[-1].form == "refers to what it lies in"
    assert batch_bytes(batch) > 0


def test_bytes_are_counted_wherever_they_are() -> None:
    record = Record(torch.zeros(4), {"array": np.zeros(3), "bytes": b"12345"})
    assert batch_bytes([record, (torch.zeros(2, dtype=torch.uint8), "text", None)]) == 16 + 24 + 5 + 2
    assert batch_bytes(Slotted()) == 24


def test_every_kind_of_batch_can_be_weighed_and_looked_at() -> None:
    for batch in [odd_batch(3), *(make() for make in SAME)]:
        assert batch_bytes(batch) >= 0
        look_at(batch)
