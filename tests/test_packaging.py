"""The facts of the distribution: dependencies, extras, console script, version, and what the README tells to type."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shmloader
from tests.conftest import pytest_collection_modifyitems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TOP_LEVEL = {
    "pyproject.toml",
    "shmloader",
    "tests",
    "benchmarks",
    "README.md",
    "README.zh.md",
    "LICENSE",
    "CHANGELOG.md",
}
DISTRIBUTIONS = {
    "PIL": "pillow",
    "skimage": "scikit-image",
    "pytest_timeout": "pytest-timeout",
    "ignite": "pytorch-ignite",
}


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower()


def closure(extra: str) -> set[str]:
    """The distributions that `pip install '.[extra]'` asks for, the runtime dependencies among them."""
    names = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in EXTRAS[extra]:
        if inner := re.fullmatch(r"shmloader\[([\w,]+)\]", requirement):
            names.update(*(closure(other) for other in inner[1].split(",")))
        else:
            names.add(name_of(requirement))
    return names


def foreign_imports(folder: str) -> Iterator[tuple[Path, str]]:
    """The third-party modules that the Python files of a folder import, and who does."""
    own = {path.stem for path in (ROOT / folder).rglob("*.py")} | {path.name for path in (ROOT / folder).rglob("*")}
    known = set(sys.stdlib_module_names) | own | {"tomllib", "shmloader", "tests", "benchmarks"}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            else:
                continue
            yield from ((path, top) for top in (name.split(".")[0] for name in names) if top not in known)


def test_runtime_dependencies_are_three_with_lower_bounds_only() -> None:
    assert {name_of(requirement) for requirement in PROJECT["dependencies"]} == {"torch", "numpy", "psutil"}
    for requirement in [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]:
        specifier = requirement.partition(";")[0]
        assert not re.search(r"<|==|~=|!=", specifier), f"{requirement} pins from above"
        assert ">=" in specifier or specifier.startswith("shmloader["), f"{requirement} has no lower bound"


def test_the_extras_build_on_each_other() -> None:
    assert set(EXTRAS) == {"cli", "bench", "demo", "test", "frameworks", "dev"}
    assert closure("cli") < closure("demo") < closure("test") < closure("dev")
    assert closure("cli") < closure("bench") < closure("test")


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_the_extra_test_brings_all_that_tests_and_benchmarks_import(folder: str) -> None:
    for path, module in foreign_imports(folder):
        brought = closure("test") | (closure("frameworks") if "frameworks" in path.parts else set())
        assert DISTRIBUTIONS.get(module, module) in brought, f"{path} imports {module}"


def test_the_extra_frameworks_brings_only_what_its_tests_import() -> None:
    imported = {module for path, module in foreign_imports("tests") if "frameworks" in path.parts}
    # tests/datasets.py hides the package of that name here.
    used = {DISTRIBUTIONS.get(module, module) for module in imported} | {"datasets"}
    assert closure("frameworks") - {"numpy", "psutil"} <= used


def test_tests_with_frameworks_are_left_out_unless_they_are_asked_for() -> None:
    tests = set((ROOT / "tests" / "frameworks").glob("test_*.py"))
    marked = {path for path in tests if re.search(r"^pytestmark = .*mark\.frameworks", path.read_text(), re.MULTILINE)}
    assert {path.name for path in tests - marked} == {"test_running.py"}


@pytest.mark.parametrize(
    ("expression", "left"), [("", ["ours"]), ("not slow", ["ours"]), ("frameworks", ["ours", "theirs"])]
)
def test_only_an_expression_that_names_frameworks_lets_them_in(expression: str, left: list[str]) -> None:
    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(name=name, path=Path(__file__), get_closest_marker=lambda mark: mark in marks)

    deselected: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression), hook=hook)
    everything = [item("ours", "slow"), item("theirs", "frameworks")]
    items = list(everything)
    pytest_collection_modifyitems(config, items)
    assert [each.name for each in items] == left
    assert deselected == [each for each in everything if each not in items]


def test_the_oldest_python_is_the_one_that_the_tools_are_told() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert PROJECT["requires-python"] == f">={tools['mypy']['python_version']}"
    assert tools["ruff"]["target-version"] == "py" + tools["mypy"]["python_version"].replace(".", "")


def test_the_console_script_names_a_callable() -> None:
    module, _, attribute = PROJECT["scripts"]["shmloader"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_the_version_is_the_same_everywhere() -> None:
    assert shmloader.__version__ == PROJECT["version"]
    try:
        installed = metadata.version("shmloader")
    except metadata.PackageNotFoundError:
        return  # run from a checkout that is not installed
    assert installed == PROJECT["version"]


def test_type_information_and_licence_are_shipped() -> None:
    assert (ROOT / "shmloader" / "py.typed").is_file()
    assert PROJECT["license"] == "BSD-3-Clause"
    assert "The shmloader authors" in (ROOT / "LICENSE").read_text()


def test_the_changelog_has_a_place_for_what_comes() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_top_level_holds_only_what_has_a_place_there() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    entries = {line.split("/")[0].strip('"') for line in listed.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def text_of(name: str) -> str:
    """A file at the top, empty if it is not there."""
    return (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""


README, CHINESE = text_of("README.md"), text_of("README.zh.md")
TEXTS = pytest.mark.parametrize("text", [README, CHINESE], ids=["English", "Chinese"])


def block_after(marker: str) -> str:
    """The fenced block that follows a marker in the README, as `.ci/run` takes it."""
    match = re.search(rf"<!-- {re.escape(marker)} -->\s*```\w*\n(.*?)\n *```", README, re.DOTALL)
    assert match, f"README.md has no fenced block right after <!-- {marker} -->"
    return match[1]


def test_the_readmes_test_command_sets_everything_up_by_itself() -> None:
    command = block_after("ci:test")
    assert re.match(r"python3? -m venv \.venv && ", command)
    assert ".[test]" in command
    assert "-m pytest" in command


def test_the_readmes_frameworks_command_sets_everything_up_by_itself() -> None:
    command = block_after("ci:frameworks")
    assert re.match(r"python3? -m venv \.venv && ", command)
    assert ".[test,frameworks]" in command
    assert command.endswith("-m pytest -m frameworks")


@pytest.mark.parametrize("arguments", [["nonsense"], [""], ["fast", "frameworks"]], ids=["unknown", "empty", "two"])
def test_the_ci_script_refuses_other_parts_than_it_has(arguments: list[str]) -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("not a git checkout")
    result = subprocess.run(["bash", script, *arguments], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == f".ci/run: give 'fast', 'frameworks', or nothing for both; not '{' '.join(arguments)}'\n"
    assert result.stdout == ""


def test_the_readmes_demo_command_sets_everything_up_by_itself() -> None:
    commands = [line for line in README.splitlines() if "shmloader demo" in line and "-m venv" in line]
    assert any(".[demo]" in line for line in commands)


@TEXTS
def test_the_readme_names_only_extras_and_files_that_exist(text: str) -> None:
    named = {
        extra.strip() for found in re.findall(r"(?:\.|shmloader)\[([\w, ]+)\]", text) for extra in found.split(",")
    }
    assert named <= set(EXTRAS)
    scripts = re.findall(r"\b(?:benchmarks|tests|shmloader)/[\w/]+\.py\b", text)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_readmes_subcommands_exist() -> None:
    from typer.main import get_command

    from shmloader.cli.commands import application

    there = set(getattr(get_command(application), "commands", {}))
    named = set(re.findall(r"(?:^|bin/|&& |-m )shmloader ([a-z]+)\b", README, re.MULTILINE))
    assert named <= there
