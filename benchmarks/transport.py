"""What a loader itself costs: torch's DataLoader and shmloader's side by side in one run.

In the transport cases the dataset only returns rows of one tensor, so fetching, collating, handing over and reusing
memory are all that is measured. In the case "photo" every sample is decoded from JPEG, so that the workers' own work
dominates and a loader can only lose. Every case runs in rounds; each round measures all contestants, starting with
another one each time, so that a machine that drifts hits all of them alike. Reported are medians over the rounds and
ratios of those medians. Batches are dropped at once and their contents are not read.

    python benchmarks/transport.py
    python benchmarks/transport.py --only L,S,photo --rounds 5 --workers 2 --json out.json
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import shmloader

Sample = tuple[torch.Tensor, int]
ENDLESS = 1 << 40  # samples in a dataset: no round comes to the end of an epoch
WARM_UP_BATCHES = 8  # workers have started, the pool is carved, what was prefetched is gone
DISTINCT_ROWS = 64  # rows a transport case cycles through
TORCH, IN_PROCESS, OURS = "torch", "torch, no workers", "shmloader"


class Rows(Dataset[Sample]):
    """Rows of one tensor, over and over."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.rows = torch.rand(DISTINCT_ROWS, *shape).mul_(255).to(dtype)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index % DISTINCT_ROWS], index


class Photos(Dataset[Sample]):
    """A few photograph-like JPEGs, kept in memory; each sample is one of them decoded, cropped and resized."""

    EDGE = 224  # pixels of a finished sample

    def __init__(self, sizes: Iterable[tuple[int, int]] = ((640, 480), (480, 640), (800, 600), (500, 375))) -> None:
        self.files = [encode_photo(width, height, seed) for seed, (width, height) in enumerate(sizes)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as file:
            image = file.convert("RGB")
        side = min(image.size) * (4 + index % 4) // 8
        left = (image.width - side) * (index % 5) // 4
        top = (image.height - side) * (index % 3) // 2
        box = (left, top, left + side, top + side)
        pixels = np.array(image.resize((self.EDGE, self.EDGE), Image.Resampling.BILINEAR, box=box))
        return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255), index


def encode_photo(width: int, height: int, seed: int) -> bytes:
    """JPEG bytes with the spectrum of a photograph (detail fades with frequency) and correlated colours."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falloff = np.maximum(np.hypot(fy, fx), 1 / max(width, height)) ** -1.4
    noise = np.fft.rfft2(rng.standard_normal((3, height, width))) * falloff
    planes = np.fft.irfft2(noise, s=(height, width))
    planes = planes[:1] + 0.2 * planes  # mostly brightness, a little colour
    low, high = np.percentile(planes, (1, 99))
    pixels = (np.clip((planes - low) / (high - low), 0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


@dataclass(frozen=True)
class Case:
    """A dataset and the batch size that it is read with."""

    dataset: Callable[[], Dataset[Sample]]
    batch_size: int
    what: str


CASES = {
    "L": Case(lambda: Rows((3, 224, 224), torch.float32), 64, "38.5 MB a batch: float images"),
    "M": Case(lambda: Rows((3, 64, 64), torch.float32), 32, "1.6 MB a batch: small images"),
    "S": Case(lambda: Rows((256,), torch.float32), 32, "33 kB a batch: feature vectors"),
    "XS": Case(lambda: Rows((16,), torch.float32), 1, "64 B a batch: one short row"),
    "U8": Case(lambda: Rows((3, 224, 224), torch.uint8), 128, "19.3 MB a batch: images as bytes"),
    "photo": Case(Photos, 16, "9.6 MB a batch: JPEGs decoded by the workers"),
}


@dataclass(frozen=True)
class Rate:
    """How fast batches arrived."""

    batches_per_s: float
    gb_per_s: float


@dataclass(frozen=True)
class Result:
    """The medians of one case and every round behind them."""

    case: str
    medians: dict[str, Rate]
    rounds: dict[str, list[Rate]]

    def over(self, other: str) -> float:
        """How many times `other`'s batches per second shmloader reached."""
        return self.medians[OURS].batches_per_s / self.medians[other].batches_per_s


def measure(loader: Iterable[Any], seconds: float) -> Rate:
    """Batches and bytes per second over about `seconds`, after the warm-up."""
    batches = iter(loader)
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    count = size_bytes = 0
    took_s = 0.0
    start = time.perf_counter()
    while took_s < seconds:
        inputs, _targets = next(batches)
        count += 1
        size_bytes += inputs.numel() * inputs.element_size()
        took_s = time.perf_counter() - start
    return Rate(count / took_s, size_bytes / took_s / 1e9)


def contestants(case: Case, workers: int, start_method: str | None) -> dict[str, Callable[[], Iterable[Any]]]:
    """A fresh loader per call, for each of the three, over one and the same dataset."""
    dataset, batch_size = case.dataset(), case.batch_size
    crew: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": start_method}
    return {
        TORCH: lambda: DataLoader(dataset, batch_size, **crew),
        IN_PROCESS: lambda: DataLoader(dataset, batch_size),
        OURS: lambda: shmloader.DataLoader(dataset, batch_size, **crew),
    }


def run_case(name: str, rounds: int, seconds: float, workers: int, start_method: str | None) -> Result:
    """All rounds of one case."""
    makers = contestants(CASES[name], workers, start_method)
    seen: dict[str, list[Rate]] = {who: [] for who in makers}
    order = list(makers)
    for _ in range(rounds):
        for who in order:
            seen[who].append(measure(makers[who](), seconds))
        order.append(order.pop(0))
    return Result(name, {who: median(rates) for who, rates in seen.items()}, seen)


def median(rates: Sequence[Rate]) -> Rate:
    """The median of each figure by itself."""
    return Rate(*(statistics.median(figures) for figures in zip(*(astuple(rate) for rate in rates))))


HEADER = ("case", "torch /s", "GB/s", "no workers /s", "GB/s", "shmloader /s", "GB/s", "x torch", "x no workers")
WIDTHS = (6, 10, 7, 14, 7, 13, 7, 8, 13)


def line(cells: Iterable[str]) -> str:
    """One line of the table."""
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, WIDTHS))
    return " ".join([first.strip().ljust(WIDTHS[0]), *rest])


def row(result: Result) -> str:
    """A result as a line of the table."""
    cells = [result.case]
    for who in (TORCH, IN_PROCESS, OURS):
        rate = result.medians[who]
        cells.append(f"{rate.batches_per_s:,.{0 if rate.batches_per_s >= 100 else 1}f}")
        cells.append(f"{rate.gb_per_s:.2f}")
    return line([*cells, f"{result.over(TORCH):.2f}", f"{result.over(IN_PROCESS):.2f}"])


def machine_facts() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: above 0.5 others are being measured as well
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shmloader": shmloader.__version__,
    }


def as_json(result: Result) -> dict[str, Any]:
    """A result for the JSON file."""
    ratios = {"ratio": result.over(TORCH), "ratio_no_workers": result.over(IN_PROCESS)}
    return {**asdict(result), **ratios, "what": CASES[result.case].what, "batch_size": CASES[result.case].batch_size}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="torch's DataLoader against shmloader's, in one run.")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round (default: %(default)s)")
    parser.add_argument("--start-method", choices=("fork", "spawn", "forkserver"), help="default: the platform's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, medians and rounds here as well")
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return parsed


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the cases and prints a line for each as soon as it is known."""
    args, facts = arguments(argv), machine_facts()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f", workers {args.workers}")
    print(line(HEADER))
    results = []
    for name in args.only:
        results.append(run_case(name, args.rounds, args.seconds, args.workers, args.start_method))
        print(row(results[-1]), flush=True)
    if args.json:
        settings = {"workers": args.workers, "rounds": args.rounds, "seconds": args.seconds}
        report = {"facts": facts | settings, "results": [as_json(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
