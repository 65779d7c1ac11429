"""The figures of `shmloader bench TARGET` as a picture: throughput, waiting and memory over the number of workers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from shmloader.cli.measurement import Measurement
from shmloader.cli.recipe import OURS, TORCH

INCHES = (13.0, 4.2)
DOTS_PER_INCH = 150
LOOKS = {TORCH: ("#d95f02", "s", "--"), OURS: ("#1b6ca8", "o", "-")}  # colour, marker, line: to be told apart in grey

Figures: TypeAlias = Callable[[Measurement], float | None]


def draw(medians: Sequence[Measurement], title: str, path: Path) -> None:
    """Writes the picture; its format follows from the file's name."""
    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    throughput, waiting, memory = figure.subplots(1, 3)
    _panel(throughput, medians, "Throughput", "batches per second", lambda each: each.batches_per_s)
    _panel(waiting, medians, "Waiting for batches", "share of the time (%)", lambda each: each.waiting)
    waiting.set_ylim(0, 1.05)
    waiting.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=None))
    _panel(memory, medians, "Added memory, all processes", "MiB (proportional set size)", _mebibytes)
    figure.suptitle(title)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _mebibytes(measurement: Measurement) -> float | None:
    return None if measurement.extra_bytes is None else measurement.extra_bytes / 2**20


def _panel(axes: Axes, medians: Sequence[Measurement], title: str, unit: str, of: Figures) -> None:
    for loader, (colour, marker, line) in LOOKS.items():
        mine = [(each.workers, of(each)) for each in medians if each.loader == loader]
        if points := [(workers, value) for workers, value in mine if value is not None]:
            axes.plot(*zip(*points), color=colour, marker=marker, linestyle=line, label=loader)
    axes.set_title(title)
    axes.set_xlabel("worker processes (num_workers)")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(FixedLocator(sorted({each.workers for each in medians})))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "this system does not tell", ha="center", va="center", transform=axes.transAxes)
