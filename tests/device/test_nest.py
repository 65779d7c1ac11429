"""What a batch is made of, and how it is made anew."""

from __future__ import annotations

import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shmloader.device.nest import is_plain, leaves, rebuilt, stays
from tests.device.batches import ODD, Encoding, Graph, Stuck, packed, plain_nests
from tests.equal import assert_same
from tests.nests import Point


class Row(list[Any]):
    """A list that carries attributes."""

    name = "nobody"


class Pair(tuple[Any, ...]):
    """A tuple of a class of its own."""


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be made from another one."""

    def __init__(self) -> None:
        self._x = torch.ones(2)

    def __getitem__(self, key: str) -> Any:
        return {"x": self._x}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def negated(data: Any) -> Any:
    """The batch with every plain tensor negated, and a word for whatever moves itself."""
    return rebuilt(data, lambda x: -x, lambda other: f"moved {type(other).__name__}")


X = torch.ones(2)
NESTS = [
    {"a": X, 1: [X]},
    [X, (X, None)],
    OrderedDict(b=X, a=X),
    defaultdict(list, a=X),
    UserDict(a=X),
    MappingProxyType({"a": X}),
    Point(X, {"y": X}),
    Pair((X, X)),
    deque([X, 2], maxlen=5),
    Row([X]),
    UserList([X]),
]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_a_nest_keeps_its_type_and_the_original_stays_as_it_was(nest: Any) -> None:
    made = negated(nest)
    assert type(made) is type(nest)
    assert made is not nest
    assert [float(x.sum()) for x in leaves(made)] == [-2.0] * len(list(leaves(nest)))
    assert all(float(x.sum()) == 2.0 for x in leaves(nest))


def test_what_a_nest_carries_besides_its_items_is_kept() -> None:
    row, default = Row([X]), defaultdict(list, a=X)
    row.name = "somebody"
    assert negated(row).name == "somebody"
    assert negated(default).default_factory is list
    assert negated(deque([X], maxlen=3)).maxlen == 3


def test_what_cannot_be_made_anew_becomes_a_plain_nest_as_with_torch() -> None:
    assert type(negated(Frozen())) is dict
    assert negated(range(3)) == [0, 1, 2]
    assert negated(array.array("i", [1, 2])) == array.array("i", [1, 2])


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", bytearray(b"x"), 1, 2.5, None, Stuck(X), torch.Tensor, torch.float32]
)
def test_what_is_no_nest_stays_the_object_that_it_is(leaf: Any) -> None:
    assert negated([leaf])[0] is leaf
    assert list(leaves([leaf])) == []


def test_what_moves_itself_goes_before_nests() -> None:
    things = [Graph(X), Encoding(x=X), packed()]
    assert negated(things) == ["moved Graph", "moved Encoding", "moved PackedSequence"]
    assert list(leaves(things)) == things


@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors", "ignore:.*quantize")
@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_is_more_than_memory_with_a_shape_is_not_plain(name: str) -> None:
    odd = ODD[name](torch.arange(6.0))
    assert not is_plain(odd)
    assert [id(leaf) for leaf in leaves({"a": odd})] == [id(odd)]


def test_a_leaf_that_requires_grad_and_a_tensor_without_elements_are_plain() -> None:
    assert is_plain(torch.ones(2, requires_grad=True))
    assert is_plain(torch.empty(0, 3))
    assert is_plain(torch.tensor(1.0))
    assert not is_plain(torch.ones(2, device="meta"))


@settings(max_examples=50)
@given(plain_nests())
def test_a_batch_made_anew_of_the_same_tensors_is_the_same(batch: Any) -> None:
    assert_same(rebuilt(batch, lambda x: x, lambda other: other), batch, moved=True)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(2), False),
        ([1, "a", b"b", None, 2.0, True], False),
        ({"x": torch.ones(2), "y": (torch.ones(1), 3)}, False),
        (Point(torch.ones(1), torch.ones(2)), False),
        ({"x": torch.ones(2), "y": (torch.ones(1), np.ones(3))}, True),
        ([Row([torch.ones(1)])], True),
        (packed(), True),
        (torch.ones(2).to_sparse(), True),
        (slice(3), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_still_refer_to_the_cpus_memory_is_told(batch: Any, expected: bool) -> None:
    assert stays(batch) is expected
