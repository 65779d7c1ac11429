"""The transport cases run: torch's DataLoader, torch's without workers and shmloader's, in alternating rounds.

Every case runs in rounds; each round measures all contestants, starting with another one each time, so that a machine
that drifts hits all of them alike. Reported are medians over the rounds and ratios of those medians. Batches are
dropped at once and their contents are not read.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import shmloader
from shmloader.cli.cases import CASES, Case
from shmloader.cli.weigh import batch_bytes
from shmloader.loader import TorchLoader

WARM_UP_BATCHES = 8  # workers have started, the pool is carved, what was prefetched is gone
TORCH, IN_PROCESS, OURS = "torch", "torch, no workers", "shmloader"


@dataclass(frozen=True)
class Rate:
    """How fast batches arrived, and what each cost the thread that trains."""

    batches_per_s: float
    gb_per_s: float
    thread_cpu_s: float  # processor seconds of the consuming thread, per batch


@dataclass(frozen=True)
class Result:
    """The medians of one case and every round behind them."""

    case: str
    medians: dict[str, Rate]
    rounds: dict[str, list[Rate]]

    def over(self, other: str) -> float:
        """How many times `other`'s batches per second shmloader reached."""
        return self.medians[OURS].batches_per_s / self.medians[other].batches_per_s

    def as_json(self) -> dict[str, Any]:
        """All of it, with the ratios and what the case is."""
        ratios = {"ratio": self.over(TORCH), "ratio_no_workers": self.over(IN_PROCESS)}
        case = CASES[self.case]
        return {**asdict(self), **ratios, "what": case.what, "batch_size": case.batch_size}


@dataclass(frozen=True)
class Terms:
    """How the cases are run."""

    workers: int = 2
    rounds: int = 3
    seconds: float = 1.5  # per contestant and round
    start_method: str | None = None  # None: the platform's


def measure(loader: Iterable[Any], seconds: float) -> Rate:
    """Batches and bytes per second over about `seconds`, after the warm-up."""
    batches = iter(loader)
    # Sizes are taken now: walking through a batch of many parts would count as the loader's time.
    nbytes = statistics.fmean(batch_bytes(next(batches)) for _ in range(WARM_UP_BATCHES))
    count, took_s = 0, 0.0
    cpu_s, start = time.thread_time(), time.perf_counter()
    while took_s < seconds:
        next(batches)
        count += 1
        took_s = time.perf_counter() - start
    cpu_s = time.thread_time() - cpu_s
    return Rate(count / took_s, count * nbytes / took_s / 1e9, cpu_s / count)


def contestants(case: Case, terms: Terms) -> dict[str, Callable[[], Iterable[Any]]]:
    """A fresh loader per call, for each of the three, over one and the same dataset."""
    dataset = case.dataset()
    batching: dict[str, Any] = {"batch_size": case.batch_size, "collate_fn": case.collate_fn}
    crew: dict[str, Any] = {"num_workers": terms.workers, "multiprocessing_context": terms.start_method}
    return {
        TORCH: lambda: TorchLoader(dataset, **batching, **crew),
        IN_PROCESS: lambda: TorchLoader(dataset, **batching),
        OURS: lambda: shmloader.DataLoader(dataset, **batching, **crew),
    }


def run_case(name: str, terms: Terms) -> Result:
    """All rounds of one case."""
    makers = contestants(CASES[name], terms)
    seen: dict[str, list[Rate]] = {who: [] for who in makers}
    order = list(makers)
    for _ in range(terms.rounds):
        for who in order:
            seen[who].append(measure(makers[who](), terms.seconds))
        order.append(order.pop(0))
    return Result(name, {who: median(rates) for who, rates in seen.items()}, seen)


def median(rates: Sequence[Rate]) -> Rate:
    """The median of each figure by itself."""
    return Rate(*(statistics.median(figures) for figures in zip(*(astuple(rate) for rate in rates))))
