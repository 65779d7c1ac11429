"""The main job, small and whole."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from shmloader.cli import demo, footprint
from shmloader.cli.commands import application
from shmloader.cli.demo import QUICK, Settings, run
from shmloader.cli.photographs import HELD_OUT
from shmloader.device import accelerator

pytestmark = pytest.mark.slow

TINY = replace(
    QUICK,
    patches=24,
    rounds=2,
    job_batches=2,
    decoded_batches=2,
    decoded_batch_size=8,
    decoded_pairs=16,
    kept_batches=4,
)


@pytest.fixture(autouse=True)
def compute_threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_figures_are_complete_and_the_training_repeats_itself() -> None:
    first, second = (run(Settings(TINY, workers=workers), Console(file=io.StringIO())) for workers in (1, 2))
    assert first.training.steps == TINY.patches // 8
    assert [each.photograph for each in first.held_out] == list(HELD_OUT)
    assert first.held_out == second.held_out  # neither the run nor the number of workers changes what is learnt
    assert (first.held is None) == (not footprint.readable())


def test_auto_is_the_accelerator_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert demo.device_of("auto") == demo.device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    found = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(accelerator, "find", lambda device: found if device == "cuda" else None)
    assert demo.device_of("auto") == torch.device("cuda", 1)


def test_seconds_end_the_training_early() -> None:
    settings = Settings(replace(TINY, patches=2000), epochs=1000, seconds=0.2, workers=1)
    figures = run(settings, Console(file=io.StringIO()))
    assert 0 < figures.training.steps < 1000
    assert figures.training.seconds < 10


@pytest.mark.timeout(120)
def test_the_quick_demo_restores_held_out_photographs_and_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of its training, and of the races so little that their figures tell nothing but that they are there.
    # In this process; as a command of its own and in full it is a step of .ci/run.
    monkeypatch.setattr(demo, "QUICK", replace(TINY, patches=512, decoded_batch_size=16, kept_batches=40))
    path = tmp_path / "figures.json"
    answer = CliRunner().invoke(application, ["demo", "--quick", "--json", str(path)], catch_exceptions=False)
    assert (answer.exit_code, answer.stderr) == (0, "")
    for line in ("1 this job", "2 decoded uint8", "3 batches kept", "held-out photograph"):
        assert line in answer.stdout
    figures = json.loads(path.read_text())
    assert figures["restored_db"] > figures["degraded_db"] + 1.5
    assert all(each["restored_db"] > each["degraded_db"] for each in figures["held_out"])
    assert {"seed", "workers", "training", "job", "decoded", "held"} <= figures.keys()
    assert figures["job"]["ratio"] > 0
    assert figures["decoded"]["batch_bytes"] > figures["job"]["batch_bytes"]
    if footprint.readable():
        assert figures["held"]["shmloader"]["descriptors"] < figures["held"]["torch"]["descriptors"]
