"""The house of shmloader: who may import whom, read from the source with `ast`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import shmloader

HOUSE = Path(shmloader.__file__).parent

# From the ground up. A room is a package or a module; it may use the rooms of lower floors and itself, nothing else.
# "" is the package itself, the door that users come in by, and the command line is one of them.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "stats"),
    ("workers.protocol",),
    ("memory", "tuning"),
    ("workers", "device"),
    ("iterator",),
    ("front",),
    ("",),
    ("cli",),
    ("__main__",),
)
SHARED_ROOMS = {
    "pump": "iterator",
    **dict.fromkeys(("inprocess", "endings", "turns", "late", "bell", "task"), "iterator"),
    **dict.fromkeys(("counts", "verdict"), "stats"),
    **dict.fromkeys(
        ("asynchronous", "loader", "paired", "patching", "sidecollate", "sides"), "front"
    ),  # what a user imports
}
FOR_PEOPLES_EYES = {"argparse", "typer", "rich", "PIL", "skimage", "matplotlib"}


class Import(NamedTuple):
    """One imported module, and whether importing the importer executes it."""

    target: str
    at_import: bool
    line: int


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name without `shmloader.`; the package itself is ``""``."""
    found = {}
    for path in sorted(HOUSE.rglob("*.py")):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ROOMS = {name for name, path in MODULES.items() if name and path.name == "__init__.py"}


def imports(name: str) -> Iterator[Import]:
    """What a module imports, wherever in it; names that are modules of ours count as imports of those."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(MODULES[name].read_text())
    deferred = {id(inner) for node in ast.walk(tree) if is_deferred(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, id(node) not in deferred, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(package, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                target = inner if ours(inner) in MODULES else base
                yield Import(target, id(node) not in deferred, node.lineno)


def is_deferred(node: ast.AST) -> bool:
    """Whether code inside is skipped when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def absolute(package: str, node: ast.ImportFrom) -> str:
    """The dotted name that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = ["shmloader", *package.split(".")] if package else ["shmloader"]
    return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))


def ours(target: str) -> str | None:
    """The name under which `MODULES` knows a target, or None for foreign ones."""
    if target == "shmloader":
        return ""
    return target.removeprefix("shmloader.") if target.startswith("shmloader.") else None


def room(name: str) -> str:
    """The room that a module belongs to."""
    if any(name in floor for floor in FLOORS):
        return name
    top = name.split(".")[0]
    return SHARED_ROOMS.get(top, top)


def floor(name: str) -> int:
    """The floor that a module's room is on."""
    for level, rooms in enumerate(FLOORS):
        if room(name) in rooms:
            return level
    raise AssertionError(f"shmloader/{name.replace('.', '/')}.py has no room in FLOORS")


def top_level(target: str) -> str:
    return target.split(".")[0]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_knows_only_its_room_and_lower_floors(name: str) -> None:
    for imported in imports(name):
        other = ours(imported.target)
        if other is None:
            continue
        where = f"{MODULES[name]}:{imported.line} imports {imported.target}"
        assert other in MODULES, f"{where}, which does not exist"
        allowed = room(other) == room(name) or floor(other) < floor(name)
        assert allowed, (
            f"{where}: floor {floor(name)} ({room(name)}) must not know floor {floor(other)} ({room(other)})"
        )


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_rooms_init_imports_nothing_so_that_each_of_its_modules_can_be_had_alone(name: str) -> None:
    assert [imported.target for imported in imports(name) if imported.target != "__future__"] == []


def test_no_import_cycle_when_modules_are_executed() -> None:
    graph = {
        name: {ours(imported.target) for imported in imports(name) if imported.at_import} - {None, name}
        for name in MODULES
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", MODULES)
def test_psutil_is_imported_in_one_module_only(name: str) -> None:
    foreign = {top_level(imported.target) for imported in imports(name)}
    assert "psutil" not in foreign or name == "tuning.machine"


@pytest.mark.parametrize("name", MODULES)
def test_what_is_for_peoples_eyes_stays_in_the_command_line(name: str) -> None:
    foreign = {top_level(imported.target) for imported in imports(name)}
    assert not foreign & FOR_PEOPLES_EYES or room(name) == "cli"


@pytest.mark.parametrize("name", MODULES)
def test_runtime_dependencies_are_torch_numpy_and_psutil(name: str) -> None:
    foreign = {top_level(imported.target) for imported in imports(name)} - set(sys.stdlib_module_names)
    extras = FOR_PEOPLES_EYES if room(name) == "cli" else set()
    assert foreign <= {"shmloader", "torch", "numpy", "psutil"} | extras


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh Python has after a statement and had not before it."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(answer.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    assert {name for name in loaded_by("import shmloader") if top_level(name) not in sys.stdlib_module_names} == {
        "shmloader"
    }


def test_shmloader_run_hands_over_to_the_script_without_importing_torch_first() -> None:
    assert "torch" not in loaded_by("import shmloader.cli.run")


@pytest.mark.slow
def test_importing_all_of_the_package_loads_nothing_that_is_for_peoples_eyes() -> None:
    loaded = loaded_by("import torch; before = set(sys.modules); from shmloader import *")
    assert "shmloader.patching" in loaded
    assert not {top_level(name) for name in loaded} & FOR_PEOPLES_EYES


@pytest.mark.slow
def test_a_spawned_workers_half_does_without_the_main_processs_half() -> None:
    """Every worker loads it while the first batch is waited for."""
    loaded = loaded_by("import shmloader.workers.worker")
    assert "shmloader.memory.codec" in loaded
    assert not loaded & {
        "psutil",
        *(f"shmloader.{name}" for name in ("loader", "iterator", "pump", "stats", "verdict")),
    }


def test_the_package_has_the_names_that_type_checkers_see() -> None:
    names = {
        alias.name: node.module
        for node in ast.walk(ast.parse(MODULES[""].read_text()))
        if isinstance(node, ast.ImportFrom) and ours(node.module or "")
        for alias in node.names
    }
    assert sorted(names) == sorted(shmloader.__all__)
    for name, module in names.items():
        assert getattr(shmloader, name) is getattr(importlib.import_module(str(module)), name)
    assert set(names) <= set(dir(shmloader))


def test_a_name_that_the_package_lacks_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'shmloader' has no attribute 'DataLoaders'"):
        shmloader.DataLoaders  # noqa: B018
