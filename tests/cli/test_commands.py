"""The command line: options, refusals, and what it says when an extra is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import shmloader
from shmloader.cli import app
from shmloader.cli.commands import application

EYES = re.compile(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]")


def run(*arguments: str) -> tuple[Result, str]:
    """The result, and its output without colours, frames and line breaks."""
    result = CliRunner().invoke(application, arguments)
    return result, " ".join(EYES.sub(" ", result.output).split())


def test_version() -> None:
    result, output = run("--version")
    assert (result.exit_code, output) == (0, f"shmloader {shmloader.__version__}")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_needs_no_photographs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "PIL", "skimage")
    result, output = run(*arguments)
    assert result.exit_code == 0
    assert "demo" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", "some"], "'some' is neither 'auto' nor a whole number of 1 or more"),
        (["--workers", "0"], "'0' is neither 'auto' nor a whole number of 1 or more"),
        (["--epochs", "0"], "Invalid value for '--epochs'"),
        (["--batch-size", "-4"], "Invalid value for '--batch-size'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--seconds", "0"], "0.0 is not a number of seconds above 0"),
        (["--seconds", "nan"], "nan is not a number of seconds above 0"),
        (["--json", "no/such/folder/figures.json"], "there is no folder 'no/such/folder'"),
        (["--json", "."], "is a directory"),
        (["--device", "abacus"], "device='abacus' is no device"),
        (["--device", "meta"], "holds no data"),
        (["--speed", "9"], "No such option: --speed"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments: list[str], complaint: str) -> None:
    result, output = run("demo", *arguments)
    assert result.exit_code == 2
    assert complaint in output


def forget(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes packages impossible to import, as on a machine without them."""
    for name in list(sys.modules):
        if name.partition(".")[0] in packages:
            monkeypatch.setitem(sys.modules, name, None)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    for module in ("commands", "demo", "readout", "photographs"):
        monkeypatch.delitem(sys.modules, f"shmloader.cli.{module}", raising=False)


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("typer", "demo", "demo"),
        ("rich", "demo", "demo"),
        ("PIL", "demo", "demo"),
        ("skimage", "demo", "demo"),
        ("typer", "run", "cli"),
        ("rich", "bench", "cli"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(
    package: str, command: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(monkeypatch, package)
    monkeypatch.setattr(sys, "argv", ["shmloader", command, "--quick"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", f"shmloader: {package} is missing: pip install 'shmloader[{extra}]'\n")


def test_a_missing_module_of_someone_else_is_not_taken_for_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shmloader.cli.commands", None)
    with pytest.raises(ModuleNotFoundError, match=r"shmloader\.cli\.commands"):
        app.main()


def test_python_dash_m_shmloader_is_the_same_command() -> None:
    module = Path(shmloader.__file__).with_name("__main__.py").read_text()
    assert "from shmloader.cli.app import main" in module
