"""`benchmarks/pairs.py`, briefly."""

from __future__ import annotations

import json
from pathlib import Path

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
    pairs.check(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))
    with pytest.raises(ValueError, match="wrong pairs"):
        pairs.check(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]]))


def test_figures_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = iter(range(1, 100))

    def measured(who: str, name: str, workers: int, seconds: float) -> pairs.Measured:
        return pairs.Measured(float(next(figures)), 1.0, 2.0, 3.0, 4, workers)

    monkeypatch.setattr(pairs, "measure_apart", measured)
    path = tmp_path / "pairs.json"
    pairs.main(["--only", "a", "--rounds", "2", "--json", str(path)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["a", "a", "a"]
    rounds = json.loads(path.read_text())["results"]["a"]
    assert [each["batches_per_s"] for each in rounds["shmloader"]] == [2.0, 5.0]


@pytest.mark.parametrize("argv", [["--only", "z"], ["--workers", "0"]])
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pairs.main(argv)
    assert "error:" in capsys.readouterr().err
