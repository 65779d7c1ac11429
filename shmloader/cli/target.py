"""What the TARGET of `shmloader bench` names: `module:callable` or `path/file.py:callable`.

A file is imported under its own name, with its directory on `sys.path`: multiprocessing hands `sys.path` to spawned
workers and to those of a forkserver, so that they can import what the file defines.
"""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import Dataset

from shmloader.loader import TorchLoader

ORIGINAL = "Original Traceback (most recent call last):"
REMOTE_PLACE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
FORM = "module:callable or path/file.py:callable"


class BenchError(Exception):
    """The user has to change something; the message says what. Ends the command with exit code 2."""


def resolve(target: str) -> Any:
    """The dataset or DataLoader that a target stands for.

    Raises:
        BenchError: nothing of the kind is there, or making it failed.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise BenchError(f"{target!r} is not {FORM}")
    module = _import_file(Path(where)) if _is_file_name(where) else _import_module(where)
    return _made(_attribute(module, where, name), target)


def is_map_style(value: Any) -> bool:
    """Whether torch's loader could index it; a dataset need not be a `Dataset`."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, (str, bytes, Mapping))


def explain(error: BaseException) -> str:
    """An error without its traceback: its type, its text, and the place where it was raised."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if ORIGINAL in text:  # it comes from a worker, with the traceback as text
        remote = text.partition(ORIGINAL)[2]
        places = REMOTE_PLACE.findall(remote)
        return remote.strip().splitlines()[-1] + (_place(*places[-1]) if places else "")
    frames = traceback.extract_tb(error.__traceback__)
    return text + (_place(frames[-1].filename, frames[-1].lineno) if frames else "")


def _place(file: str, line: int | str | None) -> str:
    return f" ({Path(file).name}, line {line})"


def _is_file_name(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BenchError(f"there is no file {str(path)!r}")
    if path.suffix != ".py":
        raise BenchError(f"{str(path)!r} is not a Python file (.py)")
    path = path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():  # the file may import its package's other modules
        root, name = root.parent, f"{root.name}.{name}"
    for folder in (path.parent, root):
        _put_on_path(folder)
    module = _import(name, str(path))
    found = Path(getattr(module, "__file__", None) or "built in")
    if found.resolve() != path:
        raise BenchError(f"{str(path)!r} cannot be imported: the name {name!r} stands for {found}. Rename the file")
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    return _import(name, name)


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise BenchError(f"there is no module {error.name!r} in this folder or among what is installed") from error
        raise BenchError(f"importing {what} raised {explain(error)}") from error
    except (Exception, SystemExit) as error:
        raise BenchError(f"importing {what} raised {explain(error)}") from error


def _attribute(module: ModuleType, where: str, dotted: str) -> Any:
    found: Any = module
    for name in dotted.split("."):
        if not hasattr(found, name):
            there = sorted(each for each, value in vars(module).items() if _could_be_meant(each, value, module))
            raise BenchError(f"{where} has no {dotted!r}; it has {', '.join(there) or 'nothing that could be meant'}")
        found = getattr(found, name)
    return found


def _could_be_meant(name: str, value: Any, module: ModuleType) -> bool:
    own = getattr(value, "__module__", None) == module.__name__ and callable(value)
    return not name.startswith("_") and (own or _usable(value))


def _usable(value: Any) -> bool:
    """Whether it is a dataset or a DataLoader rather than something that makes one."""
    return isinstance(value, (Dataset, TorchLoader)) and not isinstance(value, type)


def _made(found: Any, target: str) -> Any:
    if _usable(found):
        return found
    if not callable(found):
        if is_map_style(found):
            return found
        raise BenchError(f"{target} is neither callable nor a Dataset or DataLoader, but {_a(found)}")
    _check_needs_nothing(found, target)
    try:
        value = found()
    except (Exception, SystemExit) as error:
        raise BenchError(f"{target} raised {explain(error)}") from error
    if not (_usable(value) or is_map_style(value)):
        raise BenchError(f"{target} returned {_a(value)}; a Dataset or a DataLoader is wanted")
    return value


def _check_needs_nothing(function: Any, target: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise BenchError(f"{target} needs arguments ({error}); name a callable that takes none") from error


def _a(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__module__}.{type(value).__qualname__}"
