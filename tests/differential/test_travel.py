"""Whatever a collate function returns arrives as from torch's loader, nests of anything among it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    default_collate,
    default_convert,
)

from shmloader import DataLoader
from tests.beside import (
    KINDS,
    WITHOUT_SHRINKING,
    Stock,
    assert_same_epochs,
    both,
    epochs,
)
from tests.datasets import (
    Items,
    Made,
    Rows,
    first,
)
from tests.equal import assert_same
from tests.nests import (
    Point,
    Sample,
    arrays,
    batches,
    nests,
    plain,
    random_array,
    random_tensor,
    tagged,
    tensors,
)

# -- what travels -----------------------------------------------------------------------------------------------


class Whatever:
    """A collate function's own batch type, with everything in it."""

    def __init__(self, samples: Any) -> None:
        self.x = default_collate([x for x, _ in samples])
        self.view = self.x[1:]
        self.again = self.x
        self.label: Any = Point(np.arange(3), {"ids": [y for _, y in samples]})
        self.sample = Sample(self.x[0], self.label)
        self.deep = ({"a": [({"b": [self.x[:, 1]]},)]},)
        self.packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3.0), torch.arange(2.0)])


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_batch_of_any_class_travels_in_order_with_identity_and_aliasing(method: str) -> None:
    options = {"batch_size": 3, "shuffle": True, "num_workers": 2, "collate_fn": Whatever}
    mine = epochs(DataLoader, Rows(11), multiprocessing_context=method, **options)
    assert_same(mine, epochs(Stock, Rows(11), **options))  # what torch's come to under fork
    batch = mine[0][0]
    assert batch.again is batch.x
    batch.x[2, 1] = -5
    assert batch.view[1, 1] == -5
    assert batch.deep[0]["a"][0][0]["b"][0][2] == -5


TRAVELLERS: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "leaf that requires grad": lambda: torch.arange(3.0).requires_grad_(),
    "subclass that requires grad": lambda: tagged(torch.arange(3.0), note=1).requires_grad_(),
    "view of a subclass": lambda: tagged(torch.arange(9.0))[2:5],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "overlapping": lambda: torch.arange(9).as_strided((3, 4), (1, 2)),
    "storage": lambda: [torch.arange(3).untyped_storage().tolist()],
    "typed array": lambda: np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "empty array": lambda: np.empty((2, 0), np.uint8),
    "nothing": list,
    "foreign byte order": lambda: [np.arange(3, dtype=">i4"), np.array([(1,)], [("a", ">f8")])],
    "F-order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "reversed": lambda: np.arange(6)[::-2],
    "objects": lambda: np.array([1, "a", None], object),
    "dates": lambda: np.array(["2020-01-01"], "M8[D]"),
    "generator state": lambda: torch.Generator().manual_seed(0).get_state(),
    "dtype and size": lambda: [torch.float32, torch.Size([1, 2]), torch.device("cpu")][:2],
}


@pytest.fixture(scope="module")
def arrived() -> dict[str, list[Any]]:
    """For each name four pairs of what arrived from ours and from torch's, all from one worker each."""
    names = [name for name in TRAVELLERS for _ in range(4)]
    items = [TRAVELLERS[name]() for name in names]
    mine, its = (epochs(kind, Items(items), 1, num_workers=1, collate_fn=first)[0] for kind in KINDS)
    found: dict[str, list[Any]] = {name: [] for name in TRAVELLERS}
    for name, *pair in zip(names, mine, its):
        found[name].append(pair)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*nested tensors")
@pytest.mark.parametrize("name", TRAVELLERS)
def test_what_a_collate_function_returns_arrives_as_from_torchs_loader(
    arrived: dict[str, list[Any]], name: str
) -> None:
    assert len(arrived[name]) == 4
    for mine, its in arrived[name]:
        assert_same(mine, its)


BETTER: dict[str, Callable[[], Any]] = {
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("name", BETTER)
def test_what_torchs_loader_gets_wrong_arrives_right(name: str) -> None:
    items = [BETTER[name]() for _ in range(4)]
    assert_same(epochs(DataLoader, Items(items), 1, num_workers=1, collate_fn=first)[0], items)


@pytest.mark.slow
def test_batches_may_grow_shrink_and_be_empty() -> None:
    sizes = [1, 0, 10, 1000, 3, 100_000, 1, 0, 300_000, 299_999, 5, 300_001, 70_000]

    def made() -> Any:
        return Items([torch.full((size,), 7, dtype=torch.uint8) for size in sizes])

    for workers in (1, 2):
        assert_same_epochs(made, 1, num_workers=workers, count=2)


@pytest.mark.slow
def test_many_small_fields_travel_like_a_few() -> None:
    def sample(n: Any) -> Any:
        return [{str(field): torch.tensor([n, field]) for field in range(40)} for _ in range(5)]

    assert_same_epochs(lambda: Made(12, sample), 4, num_workers=2)


def named(n: Any) -> Any:
    return torch.full((3,), n), f"photograph-{n:04}.jpg"


@pytest.mark.slow
def test_names_in_batches_arrive_right_between_batches_of_fixed_layout() -> None:
    mine = assert_same_epochs(lambda: Made(400, named), 1, num_workers=2)
    assert [names for _, (names,) in mine[0]] == [named(n)[1] for n in range(400)]


# -- random nests -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=5, phases=WITHOUT_SHRINKING)
@given(st.lists(batches(), min_size=20, max_size=20))
def test_random_nests_arrive_as_from_torchs_loader(nests: list[Any]) -> None:
    """Forked workers have the nests; the collate function returns one per batch."""
    assert_same_epochs(lambda: Items(nests), 1, num_workers=1, collate_fn=first)


samples = st.recursive(
    st.one_of(
        st.integers(-9, 9),
        st.floats(-9, 9),
        st.booleans(),
        st.text(max_size=3),
        st.builds(
            random_tensor, st.sampled_from([torch.float32, torch.int64, torch.bfloat16]), st.just((2, 3)), st.just(0)
        ),
        st.builds(random_array, st.sampled_from(["f4", "u1", "?"]), st.sampled_from([(), (3,)]), st.just(0)),
        st.just(np.int16(3)),
    ),
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inside, max_size=3),
        st.builds(Point, inside, inside),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=6, phases=WITHOUT_SHRINKING)
@given(st.lists(samples, min_size=15, max_size=15))
def test_random_samples_are_collated_as_by_torchs_loader(samples: list[Any]) -> None:
    """One loader for all examples: each batch is one sample, three times."""
    order = [[index] * 3 for index in range(len(samples))]
    assert_same_epochs(lambda: Items(samples), batch_sampler=order, num_workers=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not writable")
@settings(max_examples=4, phases=WITHOUT_SHRINKING)
@given(st.lists(nests(st.one_of(tensors, arrays, plain)), min_size=10, max_size=10))
def test_random_samples_are_converted_as_by_torchs_loader(samples: list[Any]) -> None:
    def run(kind: Any) -> list[Any]:
        return epochs(kind, Items(samples), batch_size=None, num_workers=1, collate_fn=convert)

    both(run)


def convert(sample: Any) -> Any:
    try:
        return default_convert(sample)
    except (TypeError, ValueError, RuntimeError) as error:  # numpy types that torch does not know
        return type(error).__name__
