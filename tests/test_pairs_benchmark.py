"""`benchmarks/pairs.py`, briefly."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import pairs


@pytest.mark.slow
@pytest.mark.parametrize("who", pairs.CONTESTANTS)
@pytest.mark.parametrize("name", ["c1", "c2"])
def test_every_contestant_is_measured(who: str, name: str) -> None:
    measured = pairs.measure(who, name, workers=1, seconds=0.1)
    assert measured.workers == (2 if who == pairs.RECIPE else 1)
    assert measured.first_ms > 0
    assert measured.batches_per_s > 0


def test_a_wrong_pair_is_an_error() -> None:
    right, wrong = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    pairs.check(SimpleNamespace(inputs=right, targets=right))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="these are no pairs"):
        pairs.check(SimpleNamespace(inputs=right, targets=wrong))  # type: ignore[arg-type]


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
