"""The commands and their options. What a command does is imported when it runs, so that `--help` is quick."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shmloader import __version__

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
    """Keeps `demo` a subcommand while it is the only one."""


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


@application.command()
def demo(
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the patches (4; with --quick 1).")] = None,
    seconds: Annotated[
        float | None, typer.Option(callback=_above_zero, help="Stop training after so many seconds, if earlier.")
    ] = None,
    workers: Annotated[str, typer.Option(callback=_workers, help="Worker processes: a number, or 'auto'.")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1, max=256, help="Pairs of patches a batch.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the patches, their damage and the model.")] = 0,
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
    )
    figures = run(settings, Console())
    if json is not None:
        json.write_text(figures.as_json())
