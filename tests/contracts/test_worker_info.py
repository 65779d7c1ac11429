"""What a worker knows of itself, and what a process that inherits a loader can do to it: nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from shmloader import DataLoader
from tests.beside import KINDS, both, close, epochs
from tests.datasets import Made, Rows, as_is, first
from tests.equal import assert_same
from tests.loaders import loader, numbers
from tests.programs import Forked, Teller


def told(_: Any = None) -> Any:
    """All that the worker's description says, but for the data set, which cannot be compared."""
    info = get_worker_info()
    if info is None:
        return None
    found = {name: getattr(info, name) for name in dir(info) if not name.startswith("_") and name != "dataset"}
    found |= {"class": type(info).__name__, "data set": type(info.dataset).__name__}
    found["fields"] = [field.name for field in dataclasses.fields(info)]  # type: ignore[arg-type]
    for name, value in (("id", 5), ("whatever", 5)):
        try:
            setattr(info, name, value)
        except Exception as error:
            found[f"{name} cannot be set"] = [type(error).__name__, str(error)]
    found["torch's"] = torch.utils.data._utils.worker._worker_info is info
    return found


@pytest.mark.parametrize(
    "method", [None, "fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]
)
def test_every_field_says_what_it_says_in_torchs_workers(method: str | None) -> None:
    def run(kind: Any, method: str | None) -> Any:
        options = {"num_workers": 1 if method == "spawn" else 2, "multiprocessing_context": method}
        if method is None:
            options["num_workers"] = 0
        return epochs(kind, Made(4, told), 2, collate_fn=as_is, **options)

    mine = run(DataLoader, method)
    if method == "spawn":
        assert mine[0][0][0]["num_workers"] == 1
        assert mine[0][0][0]["fields"][:4] == ["id", "num_workers", "seed", "dataset"]
        return
    assert_same(mine, run(KINDS[1], method and "fork"))  # there is no difference between methods in torch's
    assert (mine[0][0][0] is None) is (method is None)


class Places(IterableDataset[Any]):
    """Says where it is called from."""

    log: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.log.append(["iter", told() is not None])
        yield [*self.log, ["next", told() is not None]]
        self.log.append(["iter went on", told() is not None])
        yield list(self.log)


def note_init(_: int) -> None:
    Places.log.append(["init", told() is not None])


def note_collate(samples: Any) -> Any:
    return [*samples, ["collate", told() is not None]]


@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_known_wherever_the_worker_runs_the_users_code_and_nowhere_else(workers: int) -> None:
    asked: list[Any] = []

    class Asking:
        def __iter__(self) -> Iterator[Any]:
            for _ in range(2):
                asked.append(get_worker_info())
                yield [0]

    def run(kind: Any) -> list[Any]:
        Places.log = []
        loader = kind(Places(), num_workers=workers, collate_fn=note_collate, worker_init_fn=note_init)
        found = list(loader)
        list(kind(Rows(1), batch_sampler=Asking(), num_workers=workers))
        return [*found, get_worker_info()]

    found = both(run)
    assert {known for batch in found[:-1] for _, known in (*batch[0], batch[1])} == {workers > 0}
    assert asked == [None] * 4


# -- a child that inherits a loader in the middle of an epoch ---------------------------------------------------


def drops(iterator: Any, source: Any) -> None:
    source._iterator = None


def shuts_down(iterator: Any, source: Any) -> None:
    iterator._shutdown_workers()
    iterator.__del__()


def closes(iterator: Any, source: Any) -> None:
    source.close()


def asks_on(iterator: Any, source: Any) -> None:
    with pytest.raises(RuntimeError, match="belongs to the process that made it"):
        next(iterator)


@pytest.mark.parametrize("act", [drops, shuts_down, closes, asks_on])
@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_that_a_forked_child_does_to_its_parents_iterator_reaches_the_parent(
    act: Callable[[Any, Any], None], persistent: bool
) -> None:
    source = loader(persistent_workers=persistent)
    iterator = iter(source)
    held = [next(iterator) for _ in range(3)]

    def child(teller: Teller) -> None:
        act(iterator, source)
        teller.tell(numbers(held))

    with Forked(child) as forked:
        assert forked.hear() == [0, 1, 2]
        forked.reap()
    held += list(iterator)
    assert numbers(held) == list(range(40))
    if persistent:
        assert iter(source) is iterator
        assert numbers(iterator) == list(range(40))
    close(source)


def test_workers_of_two_loaders_know_their_own_data_set() -> None:
    def run(kind: Any) -> list[Any]:
        inner = [kind(Made(2, lambda _, name=name: (name, os.getpid() != main)), num_workers=1) for name in "ab"]
        return [list(zip(*inner)), list(kind(Made(2, told), num_workers=1, collate_fn=first))]

    main = os.getpid()
    torch.manual_seed(0)
    mine = run(KINDS[0])
    torch.manual_seed(0)
    assert_same(mine, run(KINDS[1]))
