"""The static choice, and the int that remembers it was one."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from shmloader.tuning.auto import AutoWorkers, choose_workers


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_auto_workers_survives_pickling(protocol: int) -> None:
    back = pickle.loads(pickle.dumps(AutoWorkers(3), protocol))
    assert back == 3
    assert type(back) is AutoWorkers


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_auto_workers_survives_copying(again: object) -> None:
    assert callable(again)
    back = again({"num_workers": AutoWorkers(3)})["num_workers"]
    assert back == 3
    assert type(back) is AutoWorkers


def test_auto_workers_looks_like_an_int_everywhere() -> None:
    count = AutoWorkers(3)
    assert isinstance(count, int)
    assert [repr(count), str(count), f"{count}", f"{count:03d}", "%d" % count] == ["3", "3", "3", "003", "3"]  # noqa: UP031
    assert json.dumps({"num_workers": count}) == '{"num_workers": 3}'
    assert (count == 3, count > 2, hash(count)) == (True, True, hash(3))
    assert {3: "x"}[count] == "x"
    assert list(range(count)) == [0, 1, 2]
    assert not AutoWorkers(0)


def test_auto_workers_does_not_survive_arithmetic() -> None:
    assert type(AutoWorkers(3) + 0) is int
    assert type(int(AutoWorkers(3))) is int


@pytest.mark.parametrize(
    ("cores", "batches", "max_workers", "count", "reason"),
    [
        (4, None, None, 4, "4 workers: 4 usable cores."),
        (1, None, None, 1, "1 worker: 1 usable core."),
        (4, 3, None, 3, "3 workers: only 3 batches in an epoch."),
        (4, 1, None, 1, "1 worker: only 1 batch in an epoch."),
        (4, 0, None, 1, "1 worker: only 0 batches in an epoch."),
        (4, 100, 2, 2, "2 workers: max_workers=2."),
        (4, 4, 4, 4, "4 workers: 4 usable cores."),
        (4, 2, 3, 2, "2 workers: only 2 batches in an epoch."),
        (4, 100, 64, 4, "4 workers: 4 usable cores."),
    ],
)
def test_count_is_the_least_limit_and_the_reason_names_it(
    cores: int, batches: int | None, max_workers: int | None, count: int, reason: str
) -> None:
    assert choose_workers(cores=cores, batches=batches, max_workers=max_workers, iterable=False) == (count, reason)


@pytest.mark.parametrize(
    ("cores", "max_workers", "count", "words"),
    [
        (8, None, 1, "whole iterable dataset"),
        (8, 4, 4, "max_workers=4."),
        (2, 4, 2, "2 usable cores, fewer than max_workers=4."),
        (1, 4, 1, "1 usable core, fewer than"),
    ],
)
def test_an_iterable_dataset_gets_one_worker_unless_the_user_caps(
    cores: int, max_workers: int | None, count: int, words: str
) -> None:
    for batches in (None, 1):
        chosen, reason = choose_workers(cores=cores, batches=batches, max_workers=max_workers, iterable=True)
        assert chosen == count
        assert words in reason


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("max_workers", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError)],
)
def test_max_workers_must_be_a_positive_int(max_workers: int, error: type[Exception], iterable: bool) -> None:
    with pytest.raises(error, match="max_workers must be"):
        choose_workers(cores=2, batches=None, max_workers=max_workers, iterable=iterable)
