"""The annotations, as a user's type checker sees them."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shmloader

PROGRAM = Path(__file__).parent / "typing" / "program.py"
REFUSED = [number for number, row in enumerate(PROGRAM.read_text().splitlines(), 1) if row.endswith("# refused")]
CHECKERS = {
    "mypy": ["--strict", "--no-incremental", "--cache-dir=/dev/null", "--config-file=", "--follow-imports=silent"],
    "pyright": [f"--pythonpath={sys.executable}"],
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program_is_understood_and_its_mistakes_are_found(checker: str) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"{checker} comes with the extra 'dev'")
    command = [sys.executable, "-m", checker, *CHECKERS[checker], str(PROGRAM)]
    root = Path(shmloader.__file__).parents[1]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=230)
    errors = re.findall(r"program\.py:(\d+)(?::\d+)?(?:: error| - error)", found.stdout)
    assert sorted({int(number) for number in errors}) == REFUSED, found.stdout + found.stderr
