"""Our loader beside torch's: what either comes to, in a form that can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase

from shmloader import DataLoader
from tests.equal import assert_same

Stock = torch.utils.data.DataLoader
KINDS = (DataLoader, Stock)
PATIENCE_S = 30
#: Each example starts processes, so that making a failing one smaller would take minutes.
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)

each_start_method = pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)


def of_forking(warning: warnings.WarningMessage) -> bool:
    """Whether it is Python 3.12's of a fork beside a thread, which pytest's own watchdog is."""
    return "multi-threaded" in str(warning.message)


def close(loader: Any) -> None:
    """End persistent workers of either kind of loader."""
    iterator = loader._iterator
    if iterator is not None:
        iterator._shutdown_workers()


def epochs(kind: Any, dataset: Any, *args: Any, count: int = 1, seed: int = 0, **options: Any) -> list[list[Any]]:
    """All batches of so many epochs."""
    torch.manual_seed(seed)
    loader = kind(dataset, *args, **options)
    found = [list(loader) for _ in range(count)]
    close(loader)
    return found


def assert_same_epochs(make_dataset: Callable[[], Any], *args: Any, **options: Any) -> list[list[Any]]:
    """Both kinds of loader deliver the same; returns what ours delivers."""
    mine, its = (epochs(kind, make_dataset(), *args, **options) for kind in KINDS)
    assert_same(mine, its)
    return mine


def both(run: Callable[[Any], Any]) -> Any:
    """What ``run`` comes to with our loader, after a look that it comes to the same with torch's."""
    mine, its = run(DataLoader), run(Stock)
    assert_same(mine, its)
    return mine


def one_epoch(iterator: Any) -> list[Any]:
    """Items and errors of an epoch in which calling on after errors is the thing to do."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(int(next(iterator)))
        except StopIteration:
            seen.append("end")
            if seen[-2:] == ["end", "end"]:
                return seen
        except Exception as error:
            seen.append(error)


def gist(error: Any) -> Any:
    """What users match of an error: class and text, but for the paths and lines of the traceback within."""
    if not isinstance(error, Exception):
        return error
    lines = str(error).splitlines()
    inner = [line for line in lines if "tests/differential/" in line]
    return [type(error).__name__, lines[:2], lines[-1:], len(inner)]
