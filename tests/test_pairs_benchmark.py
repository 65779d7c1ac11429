"""`benchmarks/pairs.py`, briefly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("a", pairs.RECIPE),
        ("a", pairs.ONE),
        ("a", pairs.LATE),
        ("b", pairs.ONE),
        ("c1", pairs.LATE),
        ("c2", pairs.RECIPE),
        ("c2", pairs.LATE),
    ],
)
def test_every_figure_is_there(name: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = pairs.CASES[name]
    short = dataclasses.replace(case, warm_up=3, batches=2 if case.lookahead else case.batches)  # more than one epoch
    monkeypatch.setitem(pairs.CASES, name, short)
    measured = pairs.measure(who, name, workers=1, seconds=0.02)
    assert measured.workers == (2 if who == pairs.RECIPE else 1)
    assert min(measured.batches_per_s, measured.first_ms, measured.input_ms, measured.descriptors) > 0
    assert measured.peak_mib > 0


def test_what_is_no_pair_is_an_error() -> None:
    pairs.check(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    with pytest.raises(ValueError, match="these are no pairs"):
        pairs.check(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]]))


@pytest.mark.parametrize("name", ["a", "b", "c2"])
def test_both_sides_tell_the_same_index(name: str) -> None:
    case = pairs.CASES[name]
    inputs, targets = case.inputs(70), case.targets(70)
    pairs.check(inputs[69][None], targets[69][None])
    with pytest.raises(ValueError, match="these are no pairs"):
        pairs.check(inputs[69][None], targets[68][None])


def test_figures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter(range(1, 100))

    def measured(who: str, name: str, workers: int, seconds: float) -> pairs.Measured:
        return pairs.Measured(float(next(figures)), 1.0, 2.0, 3.0, 4.0, 5.0, workers)

    monkeypatch.setattr(pairs, "measure_apart", measured)
    path = tmp_path / "pairs.json"
    pairs.main(["--only", "a", "--rounds", "2", "--json", str(path)])
    assert sum(line.startswith("a ") for line in capsys.readouterr().out.splitlines()) == len(pairs.CONTESTANTS)
    (result,) = json.loads(path.read_text())["results"]
    assert {who: len(rounds) for who, rounds in result["rounds"].items()} == dict.fromkeys(pairs.CONTESTANTS, 2)
    assert len(result["goals"]) == 2


@pytest.mark.parametrize("argv", [["--only", "z"], ["--workers", "0"]])
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pairs.main(argv)
    assert "error:" in capsys.readouterr().err
