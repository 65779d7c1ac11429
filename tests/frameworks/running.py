"""Runs the jobs of this folder, each a script in processes of its own, and reads what they tell."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.material import FOLDER, SLOTS
from tests.programs import ROOT, all_gone

LIMIT_S = 45.0
GONE_WITHIN_S = 5.0
OUR_CLASS = "shmloader.loader.DataLoader"
INSTALL = "pip install '.[frameworks]'"
RUN = ("-m", "shmloader", "run")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def told_by(
    job: str,
    *args: str,
    needs: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> Any:
    """Run ``job_<job>.py`` to its end; what it told, by rank.

    Fails if a package that it needs is not installed, if it ends with an error, and if a process of it is left.
    """
    return ran(job, *args, needs=needs, launcher=launcher, limit_s=limit_s)[0]


def ran(
    job: str,
    *args: str,
    needs: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    limit_s: float = LIMIT_S,
) -> tuple[Any, str]:
    """As :func:`told_by`, and what its processes wrote to their outputs."""
    installed = {distribution.name.lower() for distribution in metadata.distributions()}
    if missing := [name for name in needs if name not in installed]:
        pytest.fail(f"not installed: {', '.join(missing)}; {INSTALL}", pytrace=False)
    command = [sys.executable, *launcher, str(ROOT / "tests" / "frameworks" / f"job_{job}.py"), *args]
    # Not below pytest's folder: sockets lie in there, whose paths have to be short.
    with tempfile.TemporaryDirectory(prefix="shmjob", dir="/tmp") as name:
        folder = Path(name)
        code, left = _run(command, folder, limit_s)
        output = (folder / "output").read_text()
        print(output)  # shown where the test fails
        assert code == 0, f"{' '.join(command)} {'hangs' if code is None else f'ends with {code}'}"
        assert not left, f"{' '.join(command)} leaves processes behind"
        return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))], output


def _run(command: list[str], folder: Path, limit_s: float) -> tuple[int | None, bool]:
    """Run a command with its output in the folder; its exit code, if it ends, and whether something of it is left."""
    surroundings = {
        **os.environ,
        FOLDER: str(folder),  # also tells the job's processes from all others, whoever adopted them
        "TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "PYTHONFAULTHANDLER": "",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    code = None
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=surroundings, cwd=folder
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            left = code is None or not all_gone(members(folder), GONE_WITHIN_S)
        finally:
            for pid in members(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    return code, left


def members(folder: Path) -> list[int]:
    """The running processes of the job that was given this folder."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def assert_same(
    told: Any, *, ranks: int = 1, except_for: tuple[str, ...] = ("loader",), of: tuple[str, ...] = ()
) -> None:
    """Fails unless every rank saw the same with both loaders, digit for digit, and was rid of the workers after it.

    ``of`` names what to look at where a rank compared more than once.
    """
    assert len(told) == ranks
    for rank in told:
        for name in of:
            rank = rank[name]
        assert rank["ours"].keys() == rank["torch"].keys()
        assert_equal(rank["ours"], rank["torch"], except_for)
        assert rank["ours"]["workers_left"] == 0, f"{rank['ours']['workers_left']} workers left"


def assert_equal(ours: Any, theirs: Any, except_for: tuple[str, ...] = ("loader",)) -> None:
    """Fails unless what was seen with ours is what was seen with torch's."""
    for what in ours.keys() - set(except_for):
        assert ours[what] == theirs[what], f"{what}: {ours[what]} instead of {theirs[what]}"


def assert_kept(facts: Any, batches: int, *, num_workers: str = "int") -> None:
    """Fails unless the framework worked with a loader of ours that has kept its options, and took batches from it.

    ``num_workers`` is the type's name: ``AutoWorkers`` if the number is an automatic one.
    """
    assert facts == {"class": OUR_CLASS, "slots": SLOTS, "num_workers": num_workers, "batches": batches}, facts


def assert_patched(facts: Any, batches: int, *, num_workers: str = "int", slots: int | None = SLOTS) -> None:
    """Fails unless the loader that the framework made for itself is ours, with the option that was patched in."""
    assert facts["class"].startswith("shmloader."), facts
    assert (facts["slots"], facts["num_workers"], facts["batches"]) == (slots, num_workers, batches), facts


def reported(output: str) -> list[str]:
    """The ranks whose process has told at its end, under ``shmloader run``, which loaders it had."""
    return sorted(re.findall(r"^shmloader run: process \d+, rank (\d+)\n  loader over ", output, re.MULTILINE))
