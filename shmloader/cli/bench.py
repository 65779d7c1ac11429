"""`shmloader bench`: are a target's batches torch's, and how fast do they come? Without target: the transport cases."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from shmloader.cli import transport
from shmloader.cli.advice import Advice, advise
from shmloader.cli.bar import Bar
from shmloader.cli.cases import CASES
from shmloader.cli.equality import Equality, compare
from shmloader.cli.facts import machine_facts
from shmloader.cli.measurement import Measurement, Terms, measure, median
from shmloader.cli.recipe import KINDS, Recipe, of_dataset, of_loader
from shmloader.cli.tables import cases_table, show_equality, show_measurements
from shmloader.cli.target import BenchError, explain, resolve
from shmloader.loader import TorchLoader
from shmloader.tuning.machine import usable_cores

MOST_WORKERS = 8  # that are tried unless the user names more


@dataclass(frozen=True)
class Settings:
    """What the user chose."""

    target: str
    workers: tuple[int, ...] | None = None  # None: the loader's own number and powers of two up to the cores
    batch_size: int | None = None  # None: the loader's own, or torch's recipe for a dataset
    seconds: float = 1.0
    rounds: int = 3
    step_ms: float = 0.0
    start_method: str | None = None


@dataclass(frozen=True)
class Report:
    """All that a run found out."""

    settings: Settings
    facts: dict[str, Any]
    equality: Equality
    measurements: tuple[Measurement, ...] = ()  # medians
    rounds: tuple[Measurement, ...] = ()  # what lies behind them
    advice: Advice | None = None  # None: there was nothing to measure

    def as_json(self) -> str:
        """All of it, with the first line in words."""
        return json.dumps({"first_line": str(self.equality), **asdict(self)}, indent=1) + "\n"


def run_cases(names: Sequence[str], terms: transport.Terms, out: Console, progress: Console) -> str:
    """Runs transport cases and prints a table; the figures come back as JSON."""
    facts = machine_facts()
    results = []
    with _quiet(), Bar(progress, len(names)) as bar:
        for name in names:
            bar.doing(f"{name}: {CASES[name].what}")
            results.append(transport.run_case(name, terms))
    out.print(cases_table(results, terms.workers))
    return json.dumps({"facts": facts | asdict(terms), "results": [result.as_json() for result in results]}, indent=1)


def run(settings: Settings, out: Console, progress: Console) -> Report:
    """Compares, then measures, and prints what comes of it.

    Raises:
        BenchError: there is nothing to compare or to measure, and the user can change that.
    """
    facts = machine_facts()
    recipe = _recipe(settings)
    counts = settings.workers or _worker_counts(recipe)
    with _quiet(), Bar(progress, 1 + settings.rounds * len(counts) * len(KINDS)) as bar:
        bar.doing(f"comparing with torch's batches, num_workers={max(counts)}")
        equality = compare(recipe, max(counts))
        show_equality(equality, recipe.notes, out)
        if equality.failed:
            return Report(settings, facts, equality)
        rounds = list(_rounds(recipe, counts, settings, bar))
    medians = _medians(rounds)
    advice = advise(medians)
    show_measurements(medians, advice, settings.rounds, out)
    return Report(settings, facts, equality, medians, tuple(rounds), advice)


def _recipe(settings: Settings) -> Recipe:
    found = resolve(settings.target)
    of = of_loader if isinstance(found, TorchLoader) else of_dataset
    return of(found, settings.batch_size, settings.start_method)


def _worker_counts(recipe: Recipe) -> tuple[int, ...]:
    powers = (2**power for power in range(MOST_WORKERS.bit_length()))
    own = () if recipe.workers is None else (recipe.workers,)
    return tuple(sorted({0, 1, *own, *(count for count in powers if count <= usable_cores())}))


def _rounds(recipe: Recipe, counts: tuple[int, ...], settings: Settings, bar: Bar) -> Iterator[Measurement]:
    """Every number of workers in every round, and both loaders next to each other: what drifts hits all alike."""
    terms = Terms(settings.seconds, settings.step_ms / 1000)
    for number in range(settings.rounds):
        for workers in counts:
            for kind in list(KINDS)[:: -1 if number % 2 else 1]:
                bar.doing(f"round {number + 1} of {settings.rounds}: {kind}, num_workers={workers}")
                try:
                    yield measure(recipe, kind, workers, terms)
                except BenchError:
                    raise
                except Exception as error:
                    raise BenchError(f"{kind}, num_workers={workers}: {explain(error)}") from error


def _medians(rounds: list[Measurement]) -> tuple[Measurement, ...]:
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for each in rounds:
        groups.setdefault((each.workers, each.loader), []).append(each)
    return tuple(median(groups[workers, kind]) for workers in sorted({key[0] for key in groups}) for kind in KINDS)


@contextmanager
def _quiet() -> Iterator[None]:
    """More workers than cores are tried on purpose; what cannot be pickled is said in our own words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create|Got pickle error")
        yield
