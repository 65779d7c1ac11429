"""The console script. It starts without Typer and Rich, so that it can say how to get them."""

import sys

EXTRA_OF = {"typer": "cli", "rich": "cli", "PIL": "demo", "skimage": "demo"}


def main() -> None:
    """Runs the command line; exits with 1 and one line when an extra is not installed."""
    try:
        from shmloader.cli.commands import application

        application()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        extra = "demo" if sys.argv[1:2] == ["demo"] else EXTRA_OF[package]
        print(f"shmloader: {package} is missing: pip install 'shmloader[{extra}]'", file=sys.stderr)
        sys.exit(1)
