"""The figures as a few lines for people's eyes."""

from rich.console import Console
from rich.table import Table

from shmloader.cli.comparison import OURS, THEIRS, Holding, Race
from shmloader.cli.figures import Figures, Training

EQUAL_WITHIN = 0.1  # of 1: rounds of a machine that does other things too differ by as much


def show(figures: Figures, console: Console) -> None:
    """Prints the training, the restored photographs and the three comparisons."""
    console.print(_training(figures.training), soft_wrap=True)
    console.print(_photographs(figures))
    console.print(f"\n[bold]torch's loader beside ours[/], {figures.workers} workers, medians of alternating rounds")
    for line in _comparisons(figures):
        console.print(line, soft_wrap=True)


def _training(training: Training) -> str:
    waited = 100 * training.waited_s / training.seconds
    return (
        f"{training.steps} steps in {training.seconds:.1f} s, waiting for batches {waited:.1f} % of it\n"
        f"pool of {_size(training.pool_bytes)}, {training.private_copies} batches copied out of it"
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
    work = f"blur, noise and JPEG {1000 * figures.batch_work_s:.1f} with either"
    return [
        f"1 this job       {_speeds(figures.job)}",
        f"                 {_cpu(figures.job)}, of which {work}",
        f"2 decoded uint8  {_speeds(figures.decoded)}",
        f"                 {_cpu(figures.decoded)}; {_size(figures.decoded.batch_bytes)} cross, nothing is computed",
        *_holdings(figures.held),
    ]


def _cpu(race: Race) -> str:
    if race.torch_cpu_s is None or race.shmloader_cpu_s is None:
        return "CPU ms a batch: not measured"
    return f"CPU ms a batch: {1000 * race.torch_cpu_s:.1f} and {1000 * race.shmloader_cpu_s:.1f}"


def _speeds(race: Race) -> str:
    rates = f"torch {race.torch_batches_per_s:.0f}/s, shmloader {race.shmloader_batches_per_s:.0f}/s"
    return f"{rates}: [bold]{race.ratio:.2f}x[/], {verdict(race)}"


def verdict(race: Race) -> str:
    """What the ratio of a race allows to say."""
    if abs(race.ratio - 1) <= EQUAL_WITHIN:
        return "about equal"
    if race.ratio_low <= 1 <= race.ratio_high:
        return "the rounds differ too much to tell"
    return "ours is faster" if race.ratio > 1 else "ours is slower"


def _holdings(held: dict[str, Holding] | None) -> list[str]:
    if held is None:
        return ["3 batches kept   not measured: this system has no /proc/self/smaps_rollup"]
    theirs, ours = held[THEIRS], held[OURS]
    return [
        f"3 batches kept   {ours.batches} of {_size(ours.batch_bytes)}: what the loader adds to the process tree",
        f"                 torch {_held(theirs)}; shmloader {_held(ours)}",
    ]


def _held(holding: Holding) -> str:
    return f"{_size(holding.peak_bytes)}, {holding.descriptors} descriptors"


def _size(nbytes: int) -> str:
    mebibytes = nbytes / 2**20
    return f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.1f} MiB"
