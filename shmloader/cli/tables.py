"""The figures of `shmloader bench` for people's eyes."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shmloader.cli.advice import Advice
from shmloader.cli.equality import Equality
from shmloader.cli.measurement import Measurement
from shmloader.cli.recipe import OURS, TORCH
from shmloader.cli.transport import IN_PROCESS, Rate, Result

UNKNOWN = "-"
PLAIN: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0, "title_justify": "left"}
COLOURS = {"equal": "green", "different": "bold red", "unrepeatable": "yellow"}


def show_equality(equality: Equality, notes: Sequence[str], console: Console) -> None:
    """The first line, which is what people look for before they swap, and what else is to be known."""
    console.print(f"[{COLOURS[equality.verdict]}]{escape(str(equality))}[/]", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)


def show_measurements(medians: Sequence[Measurement], advice: Advice, rounds: int, console: Console) -> None:
    """The table, and the recommendation as the last lines."""
    table = Table("workers", "loader", title=f"medians of {rounds} alternating rounds", **PLAIN)
    for heading in ("batches/s", "samples/s", "MB/s", "waiting", "CPU ms", "MiB", "over torch"):
        table.add_column(heading, justify="right")
    for each in medians:
        theirs = next(other for other in medians if (other.loader, other.workers) == (TORCH, each.workers))
        table.add_row(*_cells(each, theirs), end_section=each.loader == OURS)
    console.print(table)
    legend = "waiting: share of the time; CPU ms: of the training thread, a batch; MiB: memory added, all processes"
    console.print(legend, soft_wrap=True, highlight=False)
    if not all(each.steady for each in medians):
        short = "epochs are too short for a steady state: the figures include the starts of epochs"
        console.print(short, soft_wrap=True)
    console.print(f"[bold]recommended:[/] {escape(advice.text)}", soft_wrap=True, highlight=False)
    console.print(escape(advice.diagnosis), soft_wrap=True, highlight=False)


def _cells(each: Measurement, theirs: Measurement) -> list[str]:
    return [
        str(each.workers),
        each.loader,
        number(each.batches_per_s),
        UNKNOWN if each.samples_per_s is None else number(each.samples_per_s),
        number(each.mb_per_s),
        f"{each.waiting:.0%}",
        f"{1000 * each.thread_cpu_s:.2f}",
        UNKNOWN if each.extra_bytes is None else number(each.extra_bytes / 2**20),
        f"{each.batches_per_s / theirs.batches_per_s:.2f}x" if each.loader == OURS else "",
    ]


def cases_table(results: Sequence[Result], workers: int) -> Table:
    """A line for each transport case."""
    title = f"{workers} workers, medians of alternating rounds; CPU ms: of the training thread"
    table = Table("case", title=title, **PLAIN)
    for heading in ("torch", "CPU ms", "no workers", "shmloader", "GB/s", "CPU ms", "over torch", "over none"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(*_case_cells(result))
    return table


def _case_cells(result: Result) -> list[str]:
    theirs, alone, ours = (result.medians[who] for who in (TORCH, IN_PROCESS, OURS))
    return [
        result.case,
        f"{number(theirs.batches_per_s)}/s",
        _cpu_ms(theirs),
        f"{number(alone.batches_per_s)}/s",
        f"{number(ours.batches_per_s)}/s",
        f"{ours.gb_per_s:.2f}",
        _cpu_ms(ours),
        f"{result.over(TORCH):.2f}x",
        f"{result.over(IN_PROCESS):.2f}x",
    ]


def _cpu_ms(rate: Rate) -> str:
    return f"{1000 * rate.thread_cpu_s:.3f}"


def number(value: float) -> str:
    """With one digit behind the point where there are few before it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
