"""``shmloader run``: real scripts that know nothing of it, and what it says at their end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset
from typer.testing import CliRunner

from shmloader import DataLoader
from shmloader.cli.aboard import line
from shmloader.cli.commands import application
from tests.programs import children

PREAMBLE = """
import os, sys, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

NUMBERS = TensorDataset(torch.arange(40))

def numbers(loader):
    return [int(number) for (batch,) in loader for number in batch]
"""


def run(tmp_path: Path, script: str, *options: str, args: tuple[str, ...] = (), **environment: str) -> Any:
    """A script under ``shmloader run``, from another folder than its own."""
    (tmp_path / "script.py").write_text(PREAMBLE + script)
    command = [sys.executable, "-m", "shmloader", "run", *options, str(tmp_path / "script.py"), *args]
    return start(command, **environment)


def start(command: list[str], **environment: str) -> Any:
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, **environment})


def test_a_script_gets_our_loader_its_arguments_and_its_own_exit_code(tmp_path: Path) -> None:
    script = """
loader = DataLoader(NUMBERS, 8, num_workers=2)
assert numbers(loader) == numbers(loader) == list(range(40))
print(type(loader).__mro__[1], sys.argv[1:], __name__, loader.memory_limit)
sys.exit(7)
"""
    found = run(tmp_path, script, "--memory-limit", "64MiB", args=("--workers", "3", "-x", "--", "y"))
    assert found.returncode == 7
    assert found.stdout == (
        "<class 'shmloader.loader.DataLoader'> ['--workers', '3', '-x', '--', 'y'] __main__ 64MiB\n"
    )
    head, *lines = found.stderr.strip().splitlines()
    assert head.startswith("shmloader run: process ")
    assert lines[0] == "  loader over TensorDataset: 10 batches"
    assert lines[2:] == [
        "    from shmloader import DataLoader",
        "    DataLoader(dataset, batch_size=8, num_workers=2, memory_limit='64MiB')",
    ]


def test_what_a_script_raises_is_shown_and_what_it_had_loaded_is_told(tmp_path: Path) -> None:
    found = run(tmp_path, "numbers(DataLoader(NUMBERS, 8))\nraise ZeroDivisionError('mine')")
    assert found.returncode == 1
    assert "ZeroDivisionError: mine" in found.stderr
    assert "loader over TensorDataset: 5 batches" in found.stderr


def test_workers_and_max_batches_as_asked(tmp_path: Path) -> None:
    script = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.tensor([n]),) for n in range(10)])

for persistent in (False, True):
    loader = DataLoader(NUMBERS, 8, num_workers=1, persistent_workers=persistent)
    print(loader.num_workers, len(loader), [numbers(loader)[-1] for _ in range(2)])
print(DataLoader(NUMBERS).num_workers, DataLoader(Stream(), num_workers=1).num_workers)
print(len(numbers(DataLoader(Stream(), batch_size=None))))
"""
    found = run(tmp_path, script, "--workers", "2", "--max-batches", "3")
    assert found.stdout == "2 3 [23, 23]\n2 3 [23, 23]\n0 1\n3\n", found.stderr
    assert found.returncode == 0


def test_loaders_that_the_script_takes_from_us_are_reported_too(tmp_path: Path) -> None:
    found = run(tmp_path, "import shmloader\nnumbers(shmloader.DataLoader(NUMBERS, 8, num_workers=1, slots=6))")
    assert "DataLoader(dataset, batch_size=8, num_workers=1, slots=6)" in found.stderr


def test_a_loader_that_is_gone_by_the_end_is_reported_and_a_forked_child_reports_nothing(tmp_path: Path) -> None:
    script = """
loader = DataLoader(NUMBERS, 8, num_workers=1)
numbers(loader)
del loader
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    found = run(tmp_path, script)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("loader over TensorDataset: 5 batches") == 1


def test_force_and_auto_workers(tmp_path: Path) -> None:
    script = """
from shmloader.tuning.auto import AutoWorkers
loader = DataLoader(NUMBERS, 8)
print(type(loader.num_workers) is AutoWorkers, numbers(loader) == list(range(40)))
"""
    found = run(tmp_path, script, "--workers", "auto", "--force")
    assert found.stdout == "True True\n", found.stderr
    assert 'num_workers="auto"' in found.stderr


def test_spawned_children_get_it_too_and_report_for_themselves_by_rank(tmp_path: Path) -> None:
    script = """
def child(rank):
    torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=1)
    loader = DataLoader(NUMBERS, 8, num_workers=1, multiprocessing_context="spawn")
    assert numbers(loader) == list(range(40))
    torch.distributed.destroy_process_group()
    print(type(loader).__module__, flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(child, nprocs=1)
"""
    found = run(tmp_path, script, args=(str(tmp_path / "meeting"),))
    assert (found.returncode, found.stdout) == (0, "shmloader.patching\n"), found.stderr
    assert len(re.findall(r"shmloader run: process \d+, rank 0\n", found.stderr)) == 1


@pytest.mark.parametrize("launched", ["from within", "by the launcher"])
def test_with_torchs_launcher_every_rank_reports(tmp_path: Path, launched: str) -> None:
    (tmp_path / "ranks.py").write_text(
        PREAMBLE + "numbers(DataLoader(NUMBERS, 8))\nprint(type(DataLoader(NUMBERS)).__module__, flush=True)\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "shmloader", "run"]
    order = [*ours, *launcher] if launched == "from within" else [*launcher, *ours]
    found = start([sys.executable, *order, str(tmp_path / "ranks.py")])
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("shmloader.patching") == 2  # the launcher unbuffers them: line ends come apart
    assert sorted(re.findall(r"shmloader run: process \d+, rank (\d)\n", found.stderr)) == ["0", "1"]


def test_what_only_has_a_loaders_attributes_is_reported_as_well(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
from torch.utils.data import dataloader

class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([number]) for number in range(5))

class Imitation:
    pass

kept = Imitation()
vars(kept).update(vars(DataLoader(Stream(), None, num_workers=1)))
kept._auto_collation, kept._index_sampler, kept.multiprocessing_context = False, iter(int, 1), torch.multiprocessing
del kept.sampler, kept.batch_size, kept.batch_sampler  # which fastai's does not have
print([int(batch) for batch in dataloader._MultiProcessingDataLoaderIter(kept)])
""",
    )
    assert (found.returncode, found.stdout) == (0, "[0, 1, 2, 3, 4]\n"), found.stderr
    report = found.stderr.splitlines()
    assert "  loader over Stream: 5 batches" in report
    assert report[-2:] == ["    import shmloader", "    shmloader.patch_torch()"]


def test_a_module_that_is_run_and_the_sitecustomize_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'seen'\n")
    (tmp_path / "trainer.py").write_text(
        PREAMBLE + "print(os.environ['MINE'], type(DataLoader(NUMBERS)).__module__, sys.argv[1:], __spec__.name)"
    )
    path = os.pathsep.join(part for part in (str(tmp_path), os.environ.get("PYTHONPATH")) if part)
    found = start([sys.executable, "-m", "shmloader", "run", "-m", "trainer", "-m", "x"], PYTHONPATH=path)
    assert found.stdout == "seen shmloader.patching ['-m', 'x'] trainer\n", found.stderr


def test_without_torch_nothing_happens_and_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('torch' in sys.modules, 'shmloader' in sys.modules)\n")
    found = start([sys.executable, "-m", "shmloader", "run", str(tmp_path / "plain.py")])
    assert (found.returncode, found.stdout, found.stderr) == (0, "False False\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], "there is no file 'absent.py'; for a module, write: shmloader run -m absent.py"),
        (["-m", "absent.one"], "there is no module 'absent.one'; for a file, leave out -m"),
        (["--workers", "0", "x.py"], "'0' is neither 'auto' nor a whole number of 1 or more"),
        (["--memory-limit", "lots", "x.py"], "memory_limit"),
        (["--max-batches", "0", "x.py"], "--max-batches"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_run_is_said(arguments: list[str], words: str) -> None:
    before = children()
    found = CliRunner().invoke(application, ["run", *arguments], env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())
    assert children() == before


def double(index: int) -> None:
    """A worker_init_fn."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "batch_size=1, num_workers=0"),
        ({"shuffle": True, "drop_last": True}, "batch_size=1, shuffle=True, num_workers=0, drop_last=True"),
        ({"batch_size": None}, "batch_size=None, num_workers=0"),
        ({"sampler": [1, 2]}, "batch_size=1, sampler=<list>, num_workers=0"),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(4)), 2, False)},
            "batch_sampler=<BatchSampler>, num_workers=0",
        ),
        (
            {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "worker_init_fn": double},
            "batch_size=1, num_workers=2, persistent_workers=True, worker_init_fn=<double>, prefetch_factor=4",
        ),
        (
            {"in_order": False, "slots": 3, "copy": True},
            "batch_size=1, num_workers=0, in_order=False, slots=3, copy=True",
        ),
    ],
)
def test_the_line_to_copy(options: dict[str, Any], text: str) -> None:
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(4)), **options)
    assert line(loader) == f"DataLoader(dataset, {text})"
