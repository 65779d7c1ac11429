"""`shmloader bench` as a whole, in this process, and what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shmloader.cli.cases import CASES
from shmloader.cli.commands import application
from shmloader.cli.measurement import Measurement
from shmloader.cli.plot import draw
from shmloader.cli.recipe import KINDS, OURS
from shmloader.cli.target import resolve
from tests.cli.test_commands import EYES

TARGETS = "tests.bench_targets"
QUICK = ("--seconds", "0.02", "--rounds", "1")


@pytest.fixture(autouse=True)
def little_and_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("shmloader.cli.equality.MOST_BATCHES", 11)  # two epochs of five, and the end of the first
    monkeypatch.setattr("shmloader.cli.equality.MOST_SECONDS", 60.0)
    monkeypatch.setattr("shmloader.cli.measurement.LOOKS", 1)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and "pytest-" in str(sys.modules[name].__file__):
            del sys.modules[name]


def bench(*arguments: str) -> tuple[Result, str]:
    """The result, and its output without colours, frames and line breaks."""
    result = CliRunner().invoke(application, ["bench", *arguments])
    return result, " ".join(EYES.sub(" ", result.output).split())


@pytest.fixture(scope="module")
def _fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Matplotlib keeps the files of its fonts open: that is no leak of a test."""
    draw(
        [Measurement(OURS, 0, 1.0, None, 1.0, 0.5, 0.1, None, steady=True)], "", tmp_path_factory.mktemp("p") / "p.png"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_fonts")
def test_a_target_is_compared_measured_written_and_drawn(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    files = ("--json", str(figures), "--plot", str(picture))
    result, output = bench(f"{TARGETS}:shuffled", "--workers", "1,0", "--step-ms", "0.1", *QUICK, *files)
    assert (result.exit_code, result.stderr) == (0, "")
    first = "equal to torch's batches: 10 batches compared, num_workers=1 (value, dtype, shape, type, order; same seed)"
    assert result.stdout.splitlines()[0] == first
    assert "recommended: num_workers=" in output
    written = json.loads(figures.read_text())
    assert written["first_line"] == first
    assert [(each["workers"], each["loader"]) for each in written["measurements"]] == [
        (workers, loader) for workers in (0, 1) for loader in KINDS
    ]
    assert written["settings"]["step_ms"] == 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_batches_are_said_first_and_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = KINDS[OURS]
    monkeypatch.setitem(KINDS, OURS, lambda dataset, **given: ours(dataset, **{**given, "collate_fn": tuple}))
    result, output = bench(f"{TARGETS}:rows", "--workers", "0", *QUICK)
    assert result.exit_code == 1
    assert result.stdout.startswith("NOT equal to torch's batches: batch 0: tuple for list")
    assert "recommended" in output  # the figures are shown all the same


def test_a_loader_that_fails_where_torchs_does_not_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dataset: Any, **given: Any) -> Any:
        raise OSError("no memory files here")

    monkeypatch.setitem(KINDS, OURS, broken)
    result, output = bench(f"{TARGETS}:rows", "--workers", "0", *QUICK)
    assert result.exit_code == 1
    assert "batch 0: shmloader has OSError (OSError: no memory files here" in output
    assert "recommended" not in output


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("no-colon", "'no-colon' is not module:callable"),
        ("nowhere.py:make", "there is no file 'nowhere.py'"),
        (f"{TARGETS}:missing", "has no 'missing'; it has"),
        (f"{TARGETS}:empty", "not one batch"),
        (f"{TARGETS}:failing", "ValueError: sample 2 is broken"),
        (f"{TARGETS}:once", "can be read only once"),
    ],
)
def test_a_users_mistake_is_a_line_on_stderr_and_ends_with_2(target: str, complaint: str) -> None:
    result, _ = bench(target, "--workers", "0", *QUICK)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("shmloader bench: ")
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["x:y", "--workers", "1,two"], "'1,two' is not a list of whole numbers such as 0,1,2,4"),
        (["x:y", "--workers", ""], "'' is not a list of whole numbers"),
        (["x:y", "--seconds", "0"], "0.0 is not a number of seconds above 0"),
        (["x:y", "--rounds", "0"], "Invalid value for '--rounds'"),
        (["x:y", "--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["x:y", "--step-ms", "-1"], "-1.0 is not a number of milliseconds"),
        (["x:y", "--start-method", "teleport"], "Invalid value for '--start-method'"),
        (["x:y", "--json", "no/such/folder/x.json"], "there is no folder 'no/such/folder'"),
        (["x:y", "--plot", "no/such/folder/x.png"], "there is no folder 'no/such/folder'"),
        (["x:y", "--plot", "figures.xyz"], "'figures.xyz' ends with none of"),
        (["x:y", "--only", "S"], "--only goes only with the transport cases"),
        (["--only", "S,Q"], "unknown case Q; there are L, M, S"),
        (["--step-ms", "3"], "--step-ms goes only with a TARGET"),
        (["--batch-size", "3"], "--batch-size goes only with a TARGET"),
        (["--workers", "1,2"], "with one number of workers"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(arguments: list[str], complaint: str) -> None:
    result, output = bench(*arguments)
    assert result.exit_code == 2
    assert complaint in output


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, output = bench("x:y", "--plot", "out.png")
    assert result.exit_code == 2
    assert "the plot needs Matplotlib: pip install 'shmloader[bench]'" in output


@pytest.mark.slow
def test_transport_cases_run_without_a_target(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    result, output = bench("--only", "XS,many", "--workers", "1", *QUICK, "--json", str(figures))
    assert result.exit_code == 0
    assert "XS" in output
    results = json.loads(figures.read_text())["results"]
    assert [each["case"] for each in results] == ["XS", "many"]
    assert all(rate["thread_cpu_s"] > 0 for each in results for rate in each["medians"].values())


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("L", "U8", "photo")])
def test_every_case_makes_a_batch(name: str) -> None:
    case = CASES[name]
    dataset = case.dataset()
    collate = case.collate_fn or list
    assert collate([dataset[index] for index in range(case.batch_size)]) is not None


SOURCE = """
class Numbers:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return index

def tell(dataset, pipe):
    pipe.send([dataset[index] for index in range(len(dataset))])
"""


@pytest.mark.slow
def test_a_spawned_process_finds_what_a_file_defines(tmp_path: Path) -> None:
    path = tmp_path / "numbers-of-mine.py"
    path.write_text(SOURCE)
    dataset = resolve(f"{path}:Numbers")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=sys.modules["numbers-of-mine"].tell, args=(dataset, there))
    process.start()
    assert here.recv() == list(range(6))
    process.join()
    process.close()
    here.close()
    there.close()
