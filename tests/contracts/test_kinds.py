"""Kinds of batches: every container and every sort of tensor arrives as it does from torch's workers."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import fractions
import types
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from shmloader import DataLoader
from tests.beside import KINDS, Stock, epochs
from tests.datasets import Items, Made, first
from tests.equal import assert_same
from tests.nests import DTYPES, Point, Record, Sample, tagged


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As the Hugging Face tokenizers': a UserDict that hands its keys on as attributes, and has some of its own."""

    def __init__(self, data: Any, encodings: Any = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> Any:
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state: Any) -> None:
        self.data, self._encodings = state["data"], state["encodings"]


class Attributed(dict[str, Any]):
    """A dict that has attributes beside its items."""


class Listed(list[Any]):
    """A list that has attributes beside its items."""


class Triple(tuple[Any, ...]):
    """A tuple of a class of its own."""


class Labelled(Point):
    """A subclass of a namedtuple."""

    @property
    def label(self) -> Any:
        return self.y


class Split(enum.Enum):
    """A member travels as itself."""

    TRAIN = "train"
    VALIDATION = "validation"


class Stateful:
    """Decides itself what of it travels, and what it is afterwards."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.cache = x, object

    def __getstate__(self) -> Any:
        return {"x": self.x}

    def __setstate__(self, state: Any) -> None:
        self.x, self.cache = state["x"], int


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass with a field that is left out of comparisons."""

    x: Any
    names: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A frozen dataclass without a ``__dict__``."""

    x: Any
    y: Any


def x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def with_attributes(made: Any) -> Any:
    made.source, made.ids = "here", torch.arange(2)
    return made


def ring() -> Any:
    """A list that holds itself, with a tensor in it."""
    made: list[Any] = [x()]
    made.append(made)
    return made


def twice() -> Any:
    """The same containers and the same tensor at several places."""
    tensor, inner = x(), [1, "text"]
    return {"a": inner, "b": inner, "c": (inner, tensor), "d": tensor, "e": tensor[1]}


CONTAINERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"x": x(), 1: "number", (1, 2): "tuple", None: x()},
    "OrderedDict": lambda: collections.OrderedDict(b=x(), a=[x()]),
    "defaultdict": lambda: collections.defaultdict(list, {"x": [x()]}),
    "Counter": lambda: collections.Counter("abracadabra"),
    "UserDict": lambda: collections.UserDict(x=x(), y="text"),
    "UserList": lambda: collections.UserList([x(), 1]),
    "an encoding": lambda: Encoding({"input_ids": x(), "mask": x() > 2}, encodings=["raw"]),
    "a dict with attributes": lambda: with_attributes(Attributed(x=x())),
    "a list with attributes": lambda: with_attributes(Listed([x(), 2])),
    "a subclass of tuple": lambda: Triple((x(), 2, "three")),
    "a namedtuple": lambda: Point(x(), {"y": Point(1, x())}),
    "a subclass of a namedtuple": lambda: Labelled(x(), 5),
    "a dataclass": lambda: Sample(x(), label=[Sample(x())]),
    "a frozen dataclass": lambda: Frozen(x(), names=["a", "b"]),
    "a dataclass with slots": lambda: Slotted(x(), [1]),
    "an object": lambda: Record(x=x(), inner=Record(y=[x()])),
    "an object that decides what travels": lambda: Stateful(x()),
    "a packed sequence": lambda: pack_sequence([torch.arange(3.0), torch.arange(2.0)]),
    "a packed sequence, unsorted": lambda: pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False),
    "a namespace": lambda: types.SimpleNamespace(x=x(), y=types.SimpleNamespace(z=1)),
    "five deep": lambda: {"a": [({"b": [x(), (x(), [x()])]},)]},
    "fifty deep": lambda: nested(50),
    "twice the same": twice,
    "empty ones": lambda: [[], (), {}, set(), "", b"", torch.empty(0), np.empty(0)],
    "sets": lambda: [{1, 2}, frozenset("ab"), set()],
    "plain values": lambda: [1, 2**70, 1.5, float("inf"), 1j, True, None, "text", b"bytes", bytearray(b"array")],
    "text of every kind": lambda: ["", "a" * 10_000, "\x00", "é", "日本", "\U0001f600", "\ud800"],
    "types and functions": lambda: [int, torch.float32, torch.Size([1, 2]), slice(1, 2), range(3), np.dtype("f4")],
    "an enum's member in a list": lambda: [Split.TRAIN.value, x()],
    "numbers of numpy": lambda: [np.float32(1.5), np.int64(3), np.bool_(True), np.complex64(1j)],
}

#: What ``assert_same`` cannot walk through, and how to see that it is right.
ODD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "slots without a dict": (lambda: Slots(x(), [1]), lambda made: [type(made).__name__, made.x, made.y]),
    "a deque": (lambda: collections.deque([x(), 1], 5), lambda made: [type(made).__name__, *made, made.maxlen]),
    "an enum": (lambda: Split.TRAIN, lambda made: made is Split.TRAIN),
    "a path": (lambda: PurePosixPath("a/b"), lambda made: [type(made).__name__, str(made)]),
    "exact numbers": (lambda: [decimal.Decimal("1.10"), fractions.Fraction(1, 3)], repr),
    "a list in itself": (ring, lambda made: [made[1] is made, made[0]]),
    "a chain of maps": (lambda: collections.ChainMap({"x": x()}, {}), lambda made: [type(made).__name__, made.maps]),
    "a class": (lambda: Stateful, lambda made: made is Stateful),
    "a device": (lambda: torch.device("cpu"), str),
    "a storage": (lambda: x().untyped_storage(), lambda made: made.tolist()),
}


def nested(depth: int) -> Any:
    made: Any = x()
    for level in range(depth):
        made = {"a": made} if level % 3 == 0 else [made] if level % 3 == 1 else (made, level)
    return made


def arrivals(makers: dict[str, Callable[[], Any]], kind: Any, **options: Any) -> dict[str, list[Any]]:
    """For each name what arrives of three batches of it: the first of their layout, the second, and one more."""
    names = [name for name in makers for _ in range(3)]
    found = epochs(kind, Items([makers[name]() for name in names]), 1, collate_fn=first, **options)[0]
    return {name: found[3 * position : 3 * position + 3] for position, name in enumerate(makers)}


METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def containers_from_torch() -> dict[str, list[Any]]:
    return arrivals(CONTAINERS, Stock, num_workers=1)


@pytest.mark.parametrize("method", METHODS)
def test_a_container_arrives_with_its_class_its_attributes_and_its_identities(
    method: str, containers_from_torch: dict[str, list[Any]]
) -> None:
    mine = arrivals(CONTAINERS, DataLoader, num_workers=1, multiprocessing_context=method)
    for name, batches in mine.items():
        for ours, theirs in zip(batches, containers_from_torch[name], strict=True):
            assert_same(ours, theirs)
            assert type(ours) is type(CONTAINERS[name]())
    assert mine["an encoding"][2].input_ids[1, 2] == 5
    assert mine["defaultdict"][2]["missing"] == []
    assert mine["a subclass of a namedtuple"][2].label == 5
    assert mine["an object that decides what travels"][2].cache is int


@pytest.mark.parametrize("method", METHODS)
def test_what_is_hard_to_compare_arrives_too(method: str) -> None:
    makers = {name: make for name, (make, _) in ODD.items()}
    mine = arrivals(makers, DataLoader, num_workers=1, multiprocessing_context=method)
    its = arrivals(makers, Stock, num_workers=1)
    for name, (make, look) in ODD.items():
        for ours, theirs in zip(mine[name], its[name], strict=True):
            assert_same(look(ours), look(theirs))
        assert_same(look(mine[name][0]), look(make()))


def test_without_workers_a_collate_functions_batch_is_handed_over_itself() -> None:
    made = [make() for make in CONTAINERS.values()]
    for kind in KINDS:
        assert all(a is b for a, b in zip(kind(Items(made), 1, collate_fn=first), made, strict=True))


# -- not batched ------------------------------------------------------------------------------------------------

CONVERTED: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda n: (n, torch.full((2,), n), "text", b"bytes", None),
    "namedtuple": lambda n: Point(np.full((2,), n), Point(n, None)),
    "numpy": lambda n: np.full((2, 3), n, np.int16),
    "a 0-d array": lambda n: np.array(n),
    "a numpy scalar": lambda n: np.float32(n),
    "text arrays": lambda n: np.array(["a", "b"]),
    "objects": lambda n: np.array([None, n], object),
    "dict": lambda n: {"x": np.ones(2) * n, "y": {"z": [np.int64(n)]}},
    "OrderedDict": lambda n: collections.OrderedDict(b=np.ones(1) * n),
    "UserDict": lambda n: collections.UserDict(x=np.ones(1) * n),
    "a list with attributes": lambda n: with_attributes(Listed([np.ones(1) * n])),
    "a dict with attributes": lambda n: with_attributes(Attributed(x=np.ones(1) * n)),
    "a dataclass": lambda n: Sample(np.ones(2) * n),
    "an object": lambda n: Record(x=torch.ones(1) * n),
    "a tensor of a subclass": lambda n: tagged(torch.ones(2) * n, note=n),
    "a number": lambda n: n,
    "nothing": lambda n: None,
    "a range": lambda n: range(n, n + 2),
    "a set": lambda n: {n},
}


@pytest.mark.parametrize("workers", [0, 1])
def test_without_batches_samples_are_converted_as_by_torch(workers: int) -> None:
    names = [name for name in CONVERTED for _ in range(3)]

    def sample(n: int) -> Any:
        return CONVERTED[names[n]](n)

    mine, its = (epochs(kind, Made(len(names), sample), batch_size=None, num_workers=workers)[0] for kind in KINDS)
    assert len(mine) == len(its) == len(names)
    for name, ours, theirs in zip(names, mine, its):
        try:
            assert_same(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# -- tensors ----------------------------------------------------------------------------------------------------


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numel = int(np.prod(shape))
    data = torch.arange(numel) % 2
    return data.to(torch.float32).to(dtype).reshape(shape) if dtype.itemsize == 1 else data.to(dtype).reshape(shape)


TENSORS: dict[str, Callable[[], Any]] = {
    f"{dtype} {shape}": lambda dtype=dtype, shape=shape: filled(dtype, shape)
    for dtype in DTYPES
    for shape in ((), (0,), (1,), (2, 3), (2, 0, 3))
} | {
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, of one": lambda: torch.arange(60.0).view(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "in three dimensions": lambda: torch.rand(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.arange(6).view(2, 3).T,
    "strided": lambda: torch.arange(20)[3::4],
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "expanded from nothing": lambda: torch.tensor(1.5).expand(2, 2),
    "a slice": lambda: torch.arange(100)[90:],
    "a leaf that requires grad": lambda: torch.arange(3.0).requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "a frozen parameter": lambda: torch.nn.Parameter(torch.arange(3.0), requires_grad=False),
    "a buffer": lambda: torch.nn.Buffer(torch.arange(3.0)),
    "a subclass": lambda: tagged(x(), note="attribute", more=[1, torch.arange(2)]),
    "a view of a subclass": lambda: tagged(x(), note="attribute")[0],
    "detached": lambda: (torch.ones(3, requires_grad=True) * 2).detach(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (3,)),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "not a number": lambda: torch.tensor([float("nan"), -0.0, float("-inf")]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors")
def test_every_sort_of_tensor_arrives_as_from_torchs_workers() -> None:
    mine, its = (arrivals(TENSORS, kind, num_workers=1) for kind in KINDS)
    for name in TENSORS:
        for ours, theirs in zip(mine[name], its[name], strict=True):
            try:
                assert_same(ours, theirs)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


def per_channel() -> torch.Tensor:
    return torch.quantize_per_channel(x(), torch.tensor([0.5, 0.25]), torch.tensor([1, 2]), 0, torch.qint8)


SOURCES: dict[str, Callable[[], Any]] = {
    "a conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "a negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(x(), 0.5, 1, torch.quint8),
    "quantized by channels": per_channel,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:.*nested tensors")
def test_what_torchs_workers_do_not_send_rightly_arrives_as_it_was_made() -> None:
    for name, batches in arrivals(SOURCES, DataLoader, num_workers=1).items():
        for batch in batches:
            assert_same(batch, SOURCES[name]())
