"""The scripts in `benchmarks/`, briefly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import event_loop, startup, transfer, transport
from benchmarks.startup import OURS, TORCH, Result, Times, Way


def test_the_first_life_of_each_child_is_kept_apart() -> None:
    lives = [[Times(9, 9, 9, 9), Times(1, 2, 3, 4), Times(3, 2, 1, 0)], [Times(7, 7, 7, 7), Times(2, 2, 2, 2)]]
    result = Result(Way("fork", True), {TORCH: lives, OURS: lives})
    assert result.first(TORCH) == Times(8, 8, 8, 8)
    assert result.warm(OURS) == Times(2, 2, 2, 2)
    assert startup.row(result, OURS).split()[:3] == ["fork,", "persistent", "shmloader"]


def test_every_way_is_measured_once() -> None:
    assert [str(way) for way in startup.ways(["none", "fork"])] == ["no workers", "fork", "fork, persistent"]


@pytest.mark.slow
@pytest.mark.parametrize(("who", "method"), [(TORCH, "none"), (OURS, "fork")])
def test_a_life_has_every_time(who: str, method: str) -> None:
    for times in startup.lead_lives(who, Way(method, method == "fork"), workers=1, lives=2):
        assert 0 < times.iter_s < times.first_batch_s
        assert min(times.turn_s, times.shutdown_s) > 0


def test_startup_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "in_a_child", startup.lead_lives)
    path = tmp_path / "startup.json"
    startup.main(["--only", "none", "--rounds", "1", "--lives", "2", "--json", str(path)])
    assert "no workers" in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert set(result[TORCH]["warm"]) == {"iter_s", "first_batch_s", "turn_s", "shutdown_s"}


@pytest.mark.slow
def test_transport_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "transport.json"
    transport.main(["--only", "XS", "--rounds", "1", "--seconds", "0.02", "--workers", "1", "--json", str(path)])
    assert capsys.readouterr().out.splitlines()[-1].startswith("XS")
    (result,) = json.loads(path.read_text())["results"]
    assert result["ratio"] > 0
    assert set(result["medians"]) == {"torch", "torch, no workers", "shmloader"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_transfer_writes_its_figures_whatever_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "DEVICE", "cpu")
    path = tmp_path / "transfer.json"
    short = ["--only", "XS", "--rounds", "1", "--seconds", "0.02", "--workers", "1", "--json", str(path)]
    transfer.report(transfer.arguments(short), {}, transfer.Step(0.01, edge=8))
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["XS", "copies"], ["XS", "torch"], ["XS", "pinned"], ["XS", "device"]
    ]  # fmt: skip
    (result,) = json.loads(path.read_text())["results"]
    assert all(ratios["step_over_alone"] > 0 for ratios in result["ratios"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to be measured")
def test_transfer_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="a CUDA device is missing"):
        transfer.main([])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("script", [startup, transfer, transport])
def test_unknown_names_are_refused(script: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--only", "nothing"])  # type: ignore[attr-defined]
    assert "nothing; there are" in capsys.readouterr().err


@pytest.mark.slow
def test_event_loop_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "event_loop.json"
    event_loop.main(["--rounds", "1", "--batch-s", "0.1", "--batches", "2", "--json", str(path)])
    assert "async for: p99 asked for below 10 ms" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert list(results) == list(event_loop.COMPANY)
    assert results["for"]["most_ms"] > 50  # it blocks while a batch is made


def test_an_event_loop_that_comes_late_misses() -> None:
    free, late = event_loop.Lateness(0.1, 0.5, 1.0), event_loop.Lateness(0.1, 11.0, 20.0)
    assert event_loop.met({"no loader": free, "async for": free})
    assert not event_loop.met({"no loader": free, "async for": late})
    assert event_loop.met({"no loader": late, "async for": late})
