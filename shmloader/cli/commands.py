"""The commands and their options. What a command does is imported when it runs, so that `--help` is quick."""

import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shmloader import __version__

if TYPE_CHECKING:
    from shmloader.cli.bench import Settings

application = typer.Typer(
    name="shmloader",
    help="A drop-in torch DataLoader whose workers write whole batches straight into shared-memory slots.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # an error's lines would drown in printed tensors
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shmloader {__version__}")
        raise typer.Exit


@application.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Holds what comes before a command."""


def _workers(text: str) -> str:
    if text != "auto" and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text!r} is neither 'auto' nor a whole number of 1 or more.")
    return text


def _above_zero(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < float("inf"):
        raise typer.BadParameter(f"{seconds} is not a number of seconds above 0.")
    return seconds


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuses now what would fail only after a minute of training."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}.")
    return path


def _device(text: str) -> str:
    from shmloader.cli.demo import device_of

    try:
        device_of(text)
    except (RuntimeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    return text


@application.command()
def demo(
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the patches (4; with --quick 1).")] = None,
    seconds: Annotated[
        float | None, typer.Option(callback=_above_zero, help="Stop training after so many seconds, if earlier.")
    ] = None,
    workers: Annotated[str, typer.Option(callback=_workers, help="Worker processes: a number, or 'auto'.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, max=256, help="Pairs of patches a batch.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the patches, their damage and the model.")] = 0,
    device: Annotated[
        str,
        typer.Option(callback=_device, help="Where to train: 'auto' for the accelerator if there is one, or a name."),
    ] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="About ten seconds: fewer patches, shorter rounds.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(callback=_in_a_folder, dir_okay=False, writable=True, help="Write every figure to this file."),
    ] = None,
) -> None:
    """Train a restorer on real photographs, then set torch's loader beside ours."""
    from shmloader.cli.demo import FULL, QUICK, Settings, run

    settings = Settings(
        scale=QUICK if quick else FULL,
        epochs=epochs,
        seconds=seconds,
        workers="auto" if workers == "auto" else int(workers),
        batch_size=batch_size,
        seed=seed,
        device=device,
    )
    figures = run(settings, Console())
    if json is not None:
        json.write_text(figures.as_json())


class StartMethod(str, Enum):
    """How worker processes are started."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"


def _counts(text: str | None) -> str | None:
    numbers = [] if text is None else text.split(",")
    if not all(each.strip().isascii() and each.strip().isdigit() for each in numbers):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers such as 0,1,2,4.")
    return text


def _not_negative(milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0 <= milliseconds < float("inf"):
        raise typer.BadParameter(f"{milliseconds} is not a number of milliseconds.")
    return milliseconds


def _picture(path: Path | None) -> Path | None:
    """Refuses now what would fail only when everything is measured."""
    if path is None:
        return None
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("the plot needs Matplotlib: pip install 'shmloader[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise typer.BadParameter(f"{path.name!r} ends with none of {', '.join(sorted(formats))}.")
    return _in_a_folder(path)


def _cases(text: str | None) -> str | None:
    from shmloader.cli.cases import CASES

    if unknown := [name for name in (text or "").split(",") if text and name not in CASES]:
        raise typer.BadParameter(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}.")
    return text


TARGET_HELP = """module:callable or path/file.py:callable. The callable takes no arguments and returns a Dataset, or a
torch DataLoader whose arguments are all taken over; a Dataset or DataLoader that is there already will do as well.
Without it, the transport cases are run."""
STEP_HELP = """A simulated training step after each batch. The consumer sleeps: so does a process while an accelerator
computes, and the cores stay free for the workers. (0)"""


@application.command()
def bench(
    target: Annotated[str | None, typer.Argument(help=TARGET_HELP, show_default=False)] = None,
    workers: Annotated[
        str | None,
        typer.Option(callback=_counts, help="Numbers of workers, as 0,1,2,4. (By loader and cores; cases: 2.)"),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples a batch. (The loader's own; 32.)")] = None,
    seconds: Annotated[float, typer.Option(callback=_above_zero, help="For each measurement.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds, of which the medians count.")] = 3,
    step_ms: Annotated[float | None, typer.Option(callback=_not_negative, help=STEP_HELP)] = None,
    start_method: Annotated[
        StartMethod | None, typer.Option(help="How workers are started. (The loader's own; the platform's.)")
    ] = None,
    only: Annotated[
        str | None, typer.Option(callback=_cases, help="Transport cases, separated by commas. (All of them.)")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(callback=_in_a_folder, dir_okay=False, writable=True, help="Write every figure to this file."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=_picture, dir_okay=False, writable=True, help="Draw the figures into this file."),
    ] = None,
) -> None:
    """Are the batches of your data set the same as torch's, and how much faster do they come?"""
    method = start_method.value if start_method else None
    counts = tuple(sorted({int(each) for each in workers.split(",")})) if workers else None
    if target is None:
        _refuse("goes only with a TARGET", batch_size=batch_size, step_ms=step_ms, plot=plot)
        _bench_cases(only, counts, seconds, rounds, method, json)
    else:
        _refuse("goes only with the transport cases, without a TARGET", only=only)
        from shmloader.cli.bench import Settings

        _bench_target(Settings(target, counts, batch_size, seconds, rounds, step_ms or 0.0, method), json, plot)


def _refuse(why: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{name.replace('_', '-')} {why}.")


def _bench_cases(
    only: str | None, counts: tuple[int, ...] | None, seconds: float, rounds: int, method: str | None, json: Path | None
) -> None:
    from shmloader.cli.bench import run_cases
    from shmloader.cli.cases import CASES
    from shmloader.cli.transport import Terms

    if counts and (len(counts) > 1 or counts[0] == 0):
        raise typer.BadParameter("the transport cases are run with one number of workers, of 1 or more.")
    terms = Terms(counts[0] if counts else 2, rounds, seconds, method)
    names = only.split(",") if only else list(CASES)
    figures = run_cases(names, terms, Console(), Console(stderr=True))
    if json is not None:
        json.write_text(figures)


def _bench_target(settings: "Settings", json: Path | None, plot: Path | None) -> None:
    """Exit code 2: the user has to change something; 1: the batches are not torch's."""
    from shmloader.cli.bench import run
    from shmloader.cli.target import BenchError

    try:
        report = run(settings, Console(), Console(stderr=True))
    except BenchError as error:
        print(f"shmloader bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json is not None:
        json.write_text(report.as_json())
    if plot is not None and report.measurements:
        from shmloader.cli.plot import draw

        draw(report.measurements, f"{settings.target}: shmloader and torch's DataLoader", plot)
    if report.equality.verdict == "different":
        raise typer.Exit(1)


def _memory(text: str | None) -> str | None:
    if text is not None:
        from shmloader.memory.budget import parse_memory_limit
        from shmloader.tuning.machine import available_memory

        try:
            parse_memory_limit(int(text) if text.isdigit() else text, available_memory)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text


# Everything behind the script's name is the script's.
@application.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    target: Annotated[list[str], typer.Argument(help="The script and its arguments.", show_default=False)],
    module: Annotated[bool, typer.Option("-m", help="The target is a module's name, as of python -m.")] = False,
    workers: Annotated[
        str | None,
        typer.Option(
            callback=lambda text: text and _workers(text),
            help="Workers of each loader that asks for any: a number, or 'auto'. (What they ask for.)",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="--workers also for iterable data sets and loaders without workers.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(callback=_memory, help="Of each loader's pool: 512MiB, 2GB, 25%.")
    ] = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="End every epoch after so many.")] = None,
) -> None:
    """Run a training script as it is, with shmloader in the place of torch's DataLoader, and say what was slow."""
    from shmloader.cli.run import RunError
    from shmloader.cli.run import run as start

    count = int(workers) if workers is not None and workers != "auto" else workers
    limit = int(memory_limit) if memory_limit is not None and memory_limit.isdigit() else memory_limit
    try:
        start(target, module=module, num_workers=count, force=force, memory_limit=limit, max_batches=max_batches)
    except RunError as error:
        typer.echo(f"shmloader run: {error}", err=True)
        raise typer.Exit(2) from None
