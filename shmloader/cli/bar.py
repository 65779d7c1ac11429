"""Progress on a terminal, and nothing where the output goes elsewhere."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """What is being done, drawn by the thread that does it.

    Rich's own refreshing thread may hold the output's lock at the moment when a worker is forked.
    """

    def __init__(self, console: Console, steps: int) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        hidden = not console.is_terminal
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=hidden)
        self._task = self._bar.add_task("", total=steps)
        self._begun = False

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def doing(self, what: str) -> None:
        """The next step begins, and the one before has ended."""
        self._bar.update(self._task, description=what, advance=1 if self._begun else 0)
        self._begun = True
        self._bar.refresh()
