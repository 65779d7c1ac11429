"""Fetched and collated as by torch's workers, or, where those cannot, as by torch without any."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from shmloader import DataLoader, UnpicklableBatchError
from tests.beside import (
    KINDS,
    Stock,
    assert_same_epochs,
    both,
    epochs,
    gist,
    one_epoch,
)
from tests.datasets import (
    Batchwise,
    Made,
    Rows,
    as_is,
)
from tests.equal import assert_same
from tests.nests import (
    Point,
    Record,
    Sample,
    tagged,
)

# -- fetching and collating -------------------------------------------------------------------------------------


class Returned(Record):
    """Stands for a batch type of a library's own."""


def without_batch_fetching() -> Any:
    dataset = Rows(6)
    dataset.__getitems__ = None
    return dataset


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_fetches_batches_is_asked_for_them_and_answered_for_unchanged(workers: int) -> None:
    returns: list[Callable[[list[int]], Any]] = [
        lambda indices: [torch.tensor(index) for index in indices],
        lambda indices: Returned(x=torch.tensor(indices), names=[str(index) for index in indices]),
        lambda indices: torch.tensor(indices),
        lambda indices: indices,
    ]
    for fetch in returns:
        assert_same_epochs(lambda fetch=fetch: Batchwise(6, fetch), 2, num_workers=workers, collate_fn=as_is)
    assert_same_epochs(without_batch_fetching, 2, num_workers=workers)


ODD_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda n: (n, float(n), str(n), torch.ones(2) * n),
    "namedtuple": lambda n: Point(n, np.float32(n)),
    "dict": lambda n: {"x": torch.ones(n % 1 + 2), "nested": {"y": [n, {"z": (n,)}]}},
    "OrderedDict": lambda n: collections.OrderedDict(b=n, a=[n]),
    "defaultdict": lambda n: collections.defaultdict(list, {"x": torch.tensor(n)}),
    "UserDict": lambda n: collections.UserDict(x=torch.tensor(n), y=n),
    "list subclass": lambda n: collections.UserList([n, n]),
    "range": lambda n: range(n, n + 2),
    "numpy": lambda n: np.full((2, 3), n, np.int16),
    "numpy scalar": lambda n: np.float64(n),
    "numpy bool": lambda n: np.bool_(n % 2),
    "0-d array": lambda n: np.array(n, np.uint8),
    "strings": lambda n: [str(n), b"bytes"],
    "bool": lambda n: n % 2 == 0,
    "complex": lambda n: torch.tensor(complex(n, 1)),
    "large int": lambda n: 2**40 + n,
    "empty tuple": lambda n: (),
    "empty dict": lambda n: {},
    "0-d tensor": lambda n: torch.tensor(n),
    "0-size tensor": lambda n: torch.empty(0, 3),
    "bfloat16": lambda n: torch.full((2,), n, dtype=torch.bfloat16),
    "float8": lambda n: torch.full((2,), n).to(torch.float8_e4m3fn),
    "uint16": lambda n: torch.full((2,), n, dtype=torch.uint16),
    "channels last": lambda n: torch.rand(3, 4, 5).permute(1, 2, 0),
    "expanded": lambda n: torch.tensor([n]).expand(3),
    "subclass": lambda n: tagged(torch.ones(2), note=n),
    "mixed widths": lambda n: torch.ones(2, dtype=torch.float32 if n % 2 else torch.float64),
    "mixed widths, other way": lambda n: torch.ones(2, dtype=torch.float64 if n % 2 else torch.float32),
    "mixed numbers": lambda n: (n if n % 2 else n + 0.5,),
    "ints first": lambda n: (n + 0.5 if n % 2 else n,),
    "tuples and lists": lambda n: (n, n) if n % 2 else [n, n],
}


def odd_sample(index: tuple[str, int]) -> Any:
    name, n = index
    return ODD_SAMPLES[name](n)


@pytest.fixture(scope="module")
def collated() -> dict[str, list[Any]]:
    """For each name what ours and torch's make of samples 0 to 8, in batches of four and one by one.

    Of all names with one worker each, since starting them is what takes time.
    """
    blocks = [range(4), range(4, 8), range(8, 9)]
    batches = [[(name, n) for n in block] for name in ODD_SAMPLES for block in blocks]
    singles = [index for batch in batches for index in batch]
    found: dict[str, list[Any]] = {name: [] for name in ODD_SAMPLES}
    for indices, options in (batches, {"batch_sampler": batches}), (singles, {"sampler": singles, "batch_size": None}):
        mine, its = (epochs(kind, Made(0, odd_sample), num_workers=1, **options)[0] for kind in KINDS)
        for index, *pair in zip(indices, mine, its):
            found[index[0][0] if isinstance(index, list) else index[0]].append(pair)
    return found


@pytest.mark.filterwarnings("ignore:.*not writable")
@pytest.mark.parametrize("name", ODD_SAMPLES)
def test_samples_are_collated_as_torch_collates_them(collated: dict[str, list[Any]], name: str) -> None:
    assert len(collated[name]) == 3 + 9
    for mine, its in collated[name]:
        assert_same(mine, its)
    assert_same_epochs(lambda: Made(9, ODD_SAMPLES[name]), 4)


WRONG_SAMPLES: dict[str, Callable[[Any], Any]] = {
    "None": lambda n: None,
    "a dataclass": lambda n: Sample(n),
    "unequal shapes": lambda n: torch.ones(n + 1),
    "unequal lengths": lambda n: [1] * (n + 1),
    "missing keys": lambda n: {str(n): 1},
    "object array": lambda n: np.array([None]),
    "string array": lambda n: np.array(["a"]),
    "sparse": lambda n: torch.eye(2).to_sparse(),
    "unequal kinds": lambda n: [torch.ones(1), 1][n % 2],
}


@pytest.mark.parametrize("name", WRONG_SAMPLES)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_torch_cannot_collate_is_the_same_error(name: str, workers: int) -> None:
    def run(kind: Any) -> list[Any]:
        return [gist(item) for item in one_epoch(iter(kind(Made(4, WRONG_SAMPLES[name]), 2, num_workers=workers)))]

    assert [item for item in both(run) if not isinstance(item, list)] == ["end", "end"]


def collate_records(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return [record.x for record in batch]


def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.cat(batch), "by hand"


@pytest.mark.usefixtures("restored_map")
@pytest.mark.parametrize("later", [False, True])
def test_types_registered_with_torchs_collate_are_honoured_also_when_the_loader_was_there_first(later: bool) -> None:
    def run(kind: Any) -> list[Any]:
        default_collate_fn_map.pop(Record, None)
        if not later:
            default_collate_fn_map[Record] = collate_records
        loader = kind(Made(4, lambda n: (Record(x=n), n)), 2, num_workers=1)
        default_collate_fn_map[Record] = collate_records
        return list(loader)

    assert both(run)[0][0] == [0, 1]


@pytest.mark.usefixtures("restored_map")
def test_an_entry_of_torchs_collate_may_be_replaced() -> None:
    default_collate_fn_map[torch.Tensor] = collate_tensors
    mine = assert_same_epochs(lambda: Made(4, lambda n: (torch.ones(2) * n, n)), 2, num_workers=1)
    assert mine[0][1][0][1] == "by hand"


# -- where torch with workers and torch without differ ----------------------------------------------------------


def wide_or_narrow(n: Any) -> torch.Tensor:
    return torch.ones(2, dtype=torch.float64 if n % 2 else torch.float32)


def test_a_column_of_two_widths_takes_the_first_with_workers_and_the_wider_without() -> None:
    with_workers = assert_same_epochs(lambda: Made(4, wide_or_narrow), 2, num_workers=1)
    without = assert_same_epochs(lambda: Made(4, wide_or_narrow), 2)
    assert (with_workers[0][0].dtype, without[0][0].dtype) == (torch.float32, torch.float64)


ONLY_WITHOUT_WORKERS: dict[str, Callable[[Any], Any]] = {
    "ints, then floats": lambda n: torch.ones(2, dtype=torch.float32 if n % 2 else torch.int64),
    "leaves that require grad": lambda n: torch.ones(2, requires_grad=True),
    "negated views": lambda n: torch.tensor([n + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", ONLY_WITHOUT_WORKERS)
def test_what_torch_only_collates_without_workers_is_refused_by_it_with_workers(name: str) -> None:
    make = ONLY_WITHOUT_WORKERS[name]
    assert len(list(Stock(Made(4, make), 2))) == 2
    seen = one_epoch(iter(Stock(Made(4, make), 2, num_workers=1)))
    assert [isinstance(item, (RuntimeError, TypeError)) for item in seen] == [True, True, False, False]


@pytest.mark.parametrize("name", ["ints, then floats", "negated views"])
@pytest.mark.parametrize("collate_fn", [None, as_is])
def test_and_comes_from_our_workers_as_without_any(name: str, collate_fn: Any) -> None:
    make = ONLY_WITHOUT_WORKERS[name]
    mine = epochs(DataLoader, Made(4, make), 2, num_workers=1, collate_fn=collate_fn)
    assert_same(mine, epochs(Stock, Made(4, make), 2, collate_fn=collate_fn))


def test_a_stack_of_leaves_that_require_grad_cannot_travel_and_says_why() -> None:
    loader = DataLoader(Made(4, ONLY_WITHOUT_WORKERS["leaves that require grad"]), 2, num_workers=1)
    with pytest.raises(UnpicklableBatchError, match="Cowardly refusing to serialize non-leaf tensor"):
        list(loader)
