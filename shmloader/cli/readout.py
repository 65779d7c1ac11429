"""The figures as a few lines for people's eyes."""

from rich.console import Console
from rich.table import Table

from shmloader.cli.comparison import OURS, THEIRS, Holding, Race
from shmloader.cli.figures import Figures, Training

NOISE = 0.1  # ratios this close to 1 are called equal: rounds of a busy machine differ by as much


def show(figures: Figures, console: Console) -> None:
    """Prints the training, the restored photographs and the three comparisons."""
    console.print(_training(figures.training))
    console.print(_photographs(figures))
    console.print(f"\n[bold]torch's loader beside ours[/], {figures.workers} workers, medians of alternating rounds")
    for line in _comparisons(figures):
        console.print(line)


def _training(training: Training) -> str:
    waited = 100 * training.waited_s / training.seconds
    return (
        f"{training.steps} steps in {training.seconds:.1f} s, {waited:.1f} % of it waiting for batches; "
        f"pool {_size(training.pool_bytes)}, {training.private_copies} private copies"
    )


def _photographs(figures: Figures) -> Table:
    table = Table("held-out photograph", title="PSNR in dB", title_justify="left")
    for heading in ("degraded", "restored", "gain"):
        table.add_column(heading, justify="right")
    for each in figures.held_out:
        _add_row(table, each.photograph, each.degraded_db, each.restored_db)
    table.add_section()
    _add_row(table, "[bold]mean[/]", figures.degraded_db, figures.restored_db)
    return table


def _add_row(table: Table, name: str, degraded_db: float, restored_db: float) -> None:
    table.add_row(name, f"{degraded_db:.2f}", f"{restored_db:.2f}", f"{restored_db - degraded_db:+.2f}")


def _comparisons(figures: Figures) -> list[str]:
    return [
        f"1 this job       {_speeds(figures.job)}: {_verdict(figures.job.ratio)}; blur, noise and JPEG keep a worker "
        f"busy for {1000 * figures.batch_work_s:.1f} ms a batch ({_size(figures.job.batch_bytes)}), "
        "and no loader can shorten that",
        f"2 decoded uint8  {_speeds(figures.decoded)}: {_verdict(figures.decoded.ratio)}; nothing is computed, "
        f"so what counts is how a batch of {_size(figures.decoded.batch_bytes)} crosses",
        _holdings(figures.held),
    ]


def _speeds(race: Race) -> str:
    return f"torch {race.torch_batches_per_s:.0f}/s, shmloader {race.shmloader_batches_per_s:.0f}/s"


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) <= NOISE:
        return f"[bold]{ratio:.2f}x[/], about equal"
    return f"[bold]{ratio:.2f}x[/], ours is {'faster' if ratio > 1 else 'slower'}"


def _holdings(held: dict[str, Holding] | None) -> str:
    if held is None:
        return "3 batches kept   not measured: this system has no /proc/self/smaps_rollup"
    theirs, ours = held[THEIRS], held[OURS]
    return (
        f"3 batches kept   {ours.batches} of {_size(ours.batch_bytes)}: torch {_held(theirs)}, shmloader {_held(ours)}"
    )


def _held(holding: Holding) -> str:
    return f"{_size(holding.peak_bytes)} more memory and {holding.descriptors} more descriptors"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
