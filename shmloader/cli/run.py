"""``shmloader run``: an unmodified script, with ours in the place of torch's loader."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

#: What ``shmloader run`` asks of the processes that it starts: JSON.
VARIABLE = "SHMLOADER_RUN"
SITE = Path(__file__).with_name("site")


class RunError(Exception):
    """What was asked for cannot be run."""


def run(target: list[str], *, module: bool, **asked: Any) -> NoReturn:
    """Become the Python that runs ``target``, a script or a module with its arguments.

    Args:
        target: the script's path or the module's name, and the arguments.
        module: whether it is a module.
        asked: what :func:`shmloader.patch_torch` takes, and ``max_batches``.

    Raises:
        RunError: there is no such script or module.
    """
    name = target[0]
    if module:
        _check_module(name)
    elif not Path(name).exists():
        raise RunError(f"there is no file {name!r}; for a module, write: shmloader run -m {name}")
    path = os.pathsep.join(part for part in (str(SITE), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, VARIABLE: json.dumps(asked), "PYTHONPATH": path}
    sys.stdout.flush()
    # In place of this process, so that signals, the terminal and the exit code are the script's own.
    os.execve(sys.executable, [sys.executable, *(["-m"] if module else []), *target], environment)


def _check_module(name: str) -> None:
    sys.path.insert(0, "")  # where python -m looks first
    try:
        found = find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise RunError(f"there is no module {name!r}; for a file, leave out -m")
