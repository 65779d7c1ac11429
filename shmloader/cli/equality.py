"""Whether our batches are torch's: value, dtype, shape and type of every part, and the order, from the same seed."""

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from shmloader.cli.fingerprint import DIGEST_BYTES, Part, fingerprint
from shmloader.cli.recipe import OURS, TORCH, Recipe, Run, running
from shmloader.cli.target import BenchError, explain
from shmloader.errors import UnpicklableBatchError

MOST_BATCHES = 300
MOST_SECONDS = 4.0  # for one loader's batches; the first is waited for in any case
EPOCHS = 2  # that are read, if there is time
HELD = 2  # batches that are held, as a training may, before each is looked at
SEED = 20_240_229
SHOWN_PLACES = 3
SPAWN_HINT = "\nWorkers that are not forked are sent the data set: define its class at the top level of a module."

Verdict: TypeAlias = Literal["equal", "different", "unrepeatable"]


class Item(NamedTuple):
    """What a loader has at one position: a batch, the end of an epoch, or an error."""

    name: str
    parts: list[Part]
    is_batch: bool = True


class Change(NamedTuple):
    """A place where two loaders differ."""

    item: str
    where: str  # in it
    what: str


@dataclass(frozen=True)
class Reading:
    """What one loader delivered, in order."""

    items: list[Item]
    failure: Exception | None = None  # for which the last item stands

    def batches(self) -> int:
        """How many of the items are batches."""
        return sum(item.is_batch for item in self.items)


@dataclass(frozen=True)
class Equality:
    """What came of the comparison."""

    verdict: Verdict
    why: str  # where the first difference is; or what torch's loader does not repeat
    batches: int  # that were compared
    workers: int
    opaque: tuple[str, ...] = ()  # types of which nothing but the type could be compared
    failed: bool = False  # one of the loaders raises: there is nothing to be timed

    def __str__(self) -> str:
        run = f"{self.batches} {'batch' if self.batches == 1 else 'batches'} compared, num_workers={self.workers}"
        limits = f"; of {', '.join(self.opaque)} only the type" if self.opaque else ""
        if self.verdict == "different":
            return f"NOT equal to torch's batches: {self.why} ({run})"
        if self.verdict == "unrepeatable":
            return f"the data set is not repeatable: {self.why} ({run}{limits})"
        return f"equal to torch's batches: {run} (value, dtype, shape, type, order; same seed{limits})"


def compare(recipe: Recipe, workers: int) -> Equality:
    """Reads ours, then torch's, and torch's once more if they differ.

    Ours is read first: a batch that cannot be pickled is an error there, where torch's loader waits for ever.

    Raises:
        BenchError: there is nothing to compare, for reasons that lie with the dataset.
    """
    ours = _read(recipe, OURS, workers, MOST_BATCHES)
    if isinstance(ours.failure, UnpicklableBatchError):
        text = str(ours.failure).strip().splitlines()[-1].removeprefix("shmloader.errors.UnpicklableBatchError: ")
        raise BenchError(f"{text}\nWith torch's loader, the training would wait for this batch for ever.")
    theirs = _read(recipe, TORCH, workers, len(ours.items))
    if ours.failure and theirs.failure:
        hint = SPAWN_HINT if "pickle" in str(theirs.failure) else ""
        raise BenchError(f"the data set cannot be read, with torch's loader either: {explain(theirs.failure)}{hint}")
    count = min(ours.batches(), theirs.batches())
    changes = list(_changes(ours, theirs))
    if not count and not changes:
        raise BenchError("not one batch: the data set, or what its sampler and drop_last leave of it, is empty")
    again = list(_changes(_read(recipe, TORCH, workers, len(theirs.items)), theirs)) if changes else []
    opaque = tuple(sorted({part.kind for item in ours.items for part in item.parts if part.opaque}))
    return Equality(*_judge(changes, again), count, workers, opaque, failed=bool(ours.failure or theirs.failure))


def _read(recipe: Recipe, kind: str, workers: int, most: int) -> Reading:
    """The first items of a fresh loader that is seeded as every other."""
    _seed()
    # Without order there would be nothing to compare by; ours draws as torch's does only when workers are seeded once.
    changes: dict[str, Any] = {"in_order": True, **({"seeding": "worker"} if kind == OURS else {})}
    items: list[Item] = []
    try:
        with running(recipe.make(kind, workers, **changes)) as run:
            deadline = float("inf")
            for item in _items(run):
                if not items:  # the workers have started, which under spawn takes its time
                    deadline = time.perf_counter() + MOST_SECONDS
                items.append(item)
                if len(items) >= most or time.perf_counter() > deadline:
                    break
    except Exception as error:
        items.append(_marker("the error", f"{type(error).__name__} ({explain(error)})"))
        return Reading(items, error)
    return Reading(items)


def _items(run: Run) -> Iterator[Item]:
    for epoch in range(EPOCHS):
        suffix = " of the second epoch" if epoch else ""
        held: deque[tuple[str, Any]] = deque()
        try:
            for number, batch in enumerate(run.begin()):
                held.append((f"batch {number}{suffix}", batch))
                if len(held) > HELD:
                    yield _item(*held.popleft())
        except Exception:
            yield from (_item(*each) for each in held)
            raise
        yield from (_item(*each) for each in held)
        yield _marker(f"the end{suffix}", "the end of the epoch")


def _item(name: str, batch: Any) -> Item:
    return Item(name, fingerprint(batch))


def _marker(name: str, kind: str) -> Item:
    return Item(name, [Part("", kind, "", "")], is_batch=False)


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the generator that datasets draw from, and torch's loader seeds


def _changes(ours: Reading, theirs: Reading) -> Iterator[Change]:
    """All places where two readings differ, in order, as far as both go."""
    for mine, its in zip(ours.items, theirs.items):
        if mine.parts == its.parts:
            continue
        if not (mine.is_batch and its.is_batch):
            # Everything behind it has moved.
            name = mine.name if mine.is_batch else its.name
            yield Change(name, "", f"shmloader has {_gist(mine)}, torch's loader {_gist(its)}")
            return
        yield from _changed_parts(mine, its)


def _gist(item: Item) -> str:
    return "a batch" if item.is_batch else item.parts[0].kind


def _changed_parts(ours: Item, theirs: Item) -> Iterator[Change]:
    mine, its = ({part.where: part for part in item.parts} for item in (ours, theirs))
    changed = [where for where in mine if mine[where] != its.get(where)] + [where for where in its if where not in mine]
    for where in changed:
        yield Change(ours.name, where, _change(mine.get(where), its.get(where)))
    if not changed:
        yield Change(ours.name, "", "the parts come in another order")


def _change(ours: Part | None, theirs: Part | None) -> str:
    if ours is None or theirs is None:
        return f"{ours.kind if ours else 'nothing'} for {theirs.kind if theirs else 'nothing'}"
    if ours.kind != theirs.kind:
        return f"{ours.kind} for {theirs.kind}"
    if ours.form != theirs.form:
        return f"{ours.form} for {theirs.form}"
    if len(ours.value) == 2 * DIGEST_BYTES:
        return f"other values of {ours.form or ours.kind}"
    return f"{ours.value} for {theirs.value}"


def _judge(changes: list[Change], again: list[Change]) -> tuple[Verdict, str]:
    if not changes:
        return "equal", ""
    by_chance = {change.where for change in again}
    for name, where, what in changes:
        # What torch's loader repeats must be the same in ours, whatever else is left to chance.
        if where not in by_chance:
            return "different", f"{name}{f', at {where}' if where else ''}: {what}"
    places = [place or "the whole batch" for place in sorted(by_chance, key=len)]
    listed = ", ".join(places[:SHOWN_PLACES]) + (", ..." if places[SHOWN_PLACES:] else "")
    return "unrepeatable", f"torch's own batches differ from run to run, at {listed}; all else is equal"
