"""``num_workers="auto"`` from static facts: cores, batches, the user's cap."""

from __future__ import annotations

import operator


class AutoWorkers(int):
    """The count that ``num_workers="auto"`` came to.

    An int in every respect (comparison, hash, text, JSON). Pickling and copying keep the class, so a constructor that
    meets it again, when a framework re-creates a loader from its attributes, knows that the count was automatic.
    Arithmetic gives plain ints: a count that somebody computed is not automatic any more.
    """

    __slots__ = ()


def choose_workers(*, cores: int, batches: int | None, max_workers: int | None, iterable: bool) -> tuple[int, str]:
    """How many workers to start with, and why.

    Args:
        cores: cores that this process may count on.
        batches: batches in an epoch, None where unknown. Ignored for iterable datasets, whose length is a guess.
        max_workers: the user's cap, None for none.
        iterable: whether the dataset is iterable rather than map-style.

    Returns:
        The count, at least 1, and one sentence.

    Raises:
        TypeError: ``max_workers`` is not an int.
        ValueError: ``max_workers`` is below 1.
    """
    cap = check_max_workers(max_workers)
    if iterable:
        return _choose_for_iterable(cores, cap)
    limits = [(cores, _count(cores, "usable core"))]
    if batches is not None:
        limits.append((batches, f"only {_count(batches, 'batch', 'batches')} in an epoch"))
    if cap is not None:
        limits.append((cap, f"max_workers={cap}"))
    limit, why = min(limits, key=operator.itemgetter(0))  # of equals the first: cores explain more than a cap
    count = max(1, limit)
    return count, f"{_count(count, 'worker')}: {why}."


def _choose_for_iterable(cores: int, cap: int | None) -> tuple[int, str]:
    if cap is None:
        return 1, "1 worker: each would yield the whole iterable dataset, unless max_workers says that it shards."
    count = max(1, min(cap, cores))
    why = f"max_workers={cap}" if cap <= cores else f"{_count(cores, 'usable core')}, fewer than max_workers={cap}"
    return count, f"{_count(count, 'worker')} for an iterable dataset: {why}."


def check_max_workers(max_workers: object) -> int | None:
    """``max_workers`` as a plain int, or None.

    Raises:
        TypeError: it is not an int (a bool is not).
        ValueError: it is below 1.
    """
    if max_workers is None:
        return None
    if isinstance(max_workers, bool) or not hasattr(max_workers, "__index__"):
        raise TypeError(f"max_workers must be an int of 1 or more, or None; got {max_workers!r}")
    count = operator.index(max_workers)
    if count < 1:
        raise ValueError(f"max_workers must be 1 or more, or None for no cap; got {count}")
    return count


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
