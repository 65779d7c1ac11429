"""The examples, as a user runs them: they end well, say nothing on stderr, and print what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "benchmarks" / "examples"
#: What each prints, among other things.
PRINTED = {
    "two_loaders": ["right pairs: 192 of 192 batches", "worker processes: 4"],
    "one_loader": ["right pairs: 192 of 192 batches", "worker processes: 2"],
    "late_targets": ["late_targets=False:", "late_targets=True:", "right pairs: 16 of 16 batches"],
    "asynchronous": ["right pairs: 100 of 100 batches", "ticks, late by", "torch.jit.fork: returned after"],
    "swap_in": ["equal digit for digit: True"],
}
WITH_MAIN = sorted(path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())


def test_every_example_is_run() -> None:
    assert sorted(PRINTED) == WITH_MAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for text in PRINTED[name]:
        assert text in done.stdout
    assert "wrong" not in done.stdout
