"""The machine's offer, on made-up machines (files under a temporary root, variables in a dict) and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path

import psutil
import pytest

from shmloader.tuning import machine
from shmloader.tuning.machine import available_memory, local_ranks, quota_cores, share_cores, total_memory

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712  # what the kernel writes with 4 KiB pages
LARGE = 1 << 50  # the made-up machine's memory: far above every limit in these tests


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "real" in request.node.name:
        return

    class Memory:
        total = LARGE
        available = LARGE

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def tree(root: Path, cgroup: str, files: dict[str, object]) -> str:
    """A root with ``/proc/self/cgroup`` and files below ``/sys/fs/cgroup``."""
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())
    return str(root)


# ---- CPU quota ----


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        pytest.param("0::/", {"cpu.max": "150000 100000"}, 1.5, id="v2 seen from its own namespace"),
        pytest.param("0::/a", {"a/cpu.max": "max 100000"}, None, id="v2 without a quota"),
        pytest.param("0::/a", {"a/cpu.max": "250000"}, 2.5, id="v2 without a period"),
        pytest.param(
            "0::/a/b/c",
            {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "400000 100000"},
            2.0,
            id="v2 nested, the ancestor is tighter",
        ),
        pytest.param(
            "0::/a/b", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "50000 100000"}, 0.5, id="v2 nested, inner tighter"
        ),
        pytest.param(
            "4:cpu,cpuacct:/a\n0::/a",
            {"cpu/a/cpu.cfs_quota_us": 300000, "cpu/a/cpu.cfs_period_us": 100000},
            3.0,
            id="v1",
        ),
        pytest.param(
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": 50000, "cpu,cpuacct/a/cpu.cfs_period_us": 20000},
            2.5,
            id="v1 mounted under both names only",
        ),
        pytest.param(
            "4:cpu:/a/b",
            {
                "cpu/a/cpu.cfs_quota_us": 100000,
                "cpu/a/cpu.cfs_period_us": 100000,
                "cpu/a/b/cpu.cfs_quota_us": -1,
                "cpu/a/b/cpu.cfs_period_us": 100000,
            },
            1.0,
            id="v1 nested, -1 is no quota",
        ),
        pytest.param(
            "4:cpu:/docker/1234",
            {"cpu/cpu.cfs_quota_us": 200000, "cpu/cpu.cfs_period_us": 100000},
            2.0,
            id="v1 container, path of the host",
        ),
        pytest.param(
            "4:cpu:/docker/1234/job",
            {"cpu/job/cpu.cfs_quota_us": 100000, "cpu/job/cpu.cfs_period_us": 100000},
            1.0,
            id="v1 container, group made inside it",
        ),
        pytest.param("0::/../../x", {"cpu.max": "100000 100000"}, 1.0, id="v2 outside the namespace's root"),
        pytest.param("0::/a", {"unified/a/cpu.max": "100000 100000"}, 1.0, id="hybrid"),
        pytest.param("0::/gone", {}, None, id="no files"),
        pytest.param("0::/a", {"a/cpu.max": "many 100000"}, None, id="garbled quota"),
        pytest.param("0::/a", {"a/cpu.max": "200000 often"}, 2.0, id="garbled period"),
        pytest.param("0::/a", {"a/cpu.max": b"\xff\xfe\x00"}, None, id="bytes"),
        pytest.param("0::/a", {"a/cpu.max": "-5 100000"}, None, id="negative"),
        pytest.param("0::/a", {"a/cpu.max": ""}, None, id="empty"),
        pytest.param("nonsense\n::\n:cpu\n\n", {"cpu.max": "100000 100000"}, 1.0, id="garbled list of groups"),
    ],
)
def test_quota_is_the_tightest_of_all_ancestors(
    tmp_path: Path, cgroup: str, files: dict[str, object], cores: float | None
) -> None:
    assert quota_cores(tree(tmp_path, cgroup, files)) == cores


def test_a_machine_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert quota_cores(str(tmp_path)) is None
    assert available_memory(str(tmp_path)) == LARGE
    assert total_memory(str(tmp_path)) == LARGE


# ---- cores ----


@pytest.mark.parametrize(
    ("affinity", "pinned", "quota", "physical", "ranks", "cores"),
    [
        pytest.param(8, False, None, None, 1, 8, id="affinity"),
        pytest.param(8, False, 2.5, None, 1, 3, id="quota is rounded up"),
        pytest.param(8, False, 0.2, 4, 1, 1, id="part of a core is one"),
        pytest.param(8, False, None, 4, 1, 4, id="physical cores"),
        pytest.param(1, True, 16.0, 64, 1, 1, id="one CPU"),
        pytest.param(8, False, None, None, 3, 2, id="shared and rounded down"),
        pytest.param(2, False, None, 2, 8, 1, id="never none"),
        pytest.param(16, True, None, 64, 4, 16, id="a rank's own CPUs are not divided again"),
        pytest.param(32, True, None, 64, 4, 16, id="own CPUs that overlap: no more than a share of the machine"),
        pytest.param(16, True, 8.0, 64, 4, 2, id="a quota is shared even so"),
    ],
)
def test_cores_are_the_least_limit_shared_among_ranks(
    affinity: int, pinned: bool, quota: float | None, physical: int | None, ranks: int, cores: int
) -> None:
    shared = share_cores(affinity=affinity, pinned=pinned, quota_cores=quota, physical_cores=physical, ranks=ranks)
    assert shared == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_a_process_on_one_cpu_really_counts_one_core() -> None:
    # Imported without its package, which would import torch.
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "import machine; found = machine.describe()\n"
        "print(machine.usable_cores(), found.affinity, found.usable_cores, found.pinned)"
    )
    source = Path(machine.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    several = len(os.sched_getaffinity(0)) > 1
    assert done.stdout.split() == ["1", "1", "1", str(several)]


def test_the_real_machine_is_described_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_ranks", lambda: 1)
    found = machine.describe()
    assert 1 <= found.usable_cores <= found.affinity
    assert found.physical_cores is None or found.usable_cores <= found.physical_cores
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes <= psutil.virtual_memory().total
    with pytest.raises(AttributeError):
        found.affinity = 2  # type: ignore[misc]


def test_real_available_memory_is_cheap_enough_to_ask_often() -> None:
    assert min(timeit.repeat(available_memory, number=1, repeat=50)) < 1e-3  # the least: others use the CPU too


# ---- ranks ----


def no_accelerators() -> int:
    return 0


@pytest.mark.parametrize(
    ("env", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "lots", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-4"}, 1),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "5"}, 5),
        ({"MPI_LOCALNRANKS": "6"}, 6),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,5(x999999999)", "SLURM_NODEID": "7"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,5", "SLURM_NODEID": "9"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,5", "SLURM_NODEID": "x"}, 5),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(y2)", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "0"}, 1),
        # mpirun inside a SLURM job: its daemons are a step of one task per node.
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 8),
    ],
)
def test_ranks_come_from_the_nearest_launcher(env: dict[str, str], ranks: int) -> None:
    assert local_ranks(env, no_accelerators) == ranks


@pytest.mark.parametrize(
    ("world", "accelerators", "ranks"), [("16", 8, 8), ("2", 8, 2), ("16", 0, 1), ("16", 1, 1), ("", 8, 1)]
)
def test_a_world_without_a_local_size_has_one_rank_per_accelerator(world: str, accelerators: int, ranks: int) -> None:
    assert local_ranks({"WORLD_SIZE": world}, lambda: accelerators) == ranks


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}])
def test_accelerators_are_not_counted_without_need(env: dict[str, str]) -> None:
    def count() -> int:
        raise AssertionError("asked")

    local_ranks(env, count)


def test_accelerators_are_none_while_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.visible_accelerators() == 0


# ---- memory ----

STAT_V2 = "anon 1\nfile 99\ninactive_file {inactive}\nactive_file 7"
STAT_V1 = "inactive_file 1\ntotal_cache 99\ntotal_inactive_file {inactive}"


def v2(directory: str, limit: object, usage: object, inactive: object = 0) -> dict[str, object]:
    return {
        f"{directory}/memory.max": limit,
        f"{directory}/memory.current": usage,
        f"{directory}/memory.stat": STAT_V2.format(inactive=inactive),
    }


def v1(directory: str, limit: object, usage: object, inactive: object = 0) -> dict[str, object]:
    return {
        f"memory/{directory}/memory.limit_in_bytes": limit,
        f"memory/{directory}/memory.usage_in_bytes": usage,
        f"memory/{directory}/memory.stat": STAT_V1.format(inactive=inactive),
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "available", "total"),
    [
        pytest.param("0::/a", v2("a", 8 * GIB, 3 * GIB), 5 * GIB, 8 * GIB, id="v2"),
        pytest.param("0::/a", v2("a", 8 * GIB, 7 * GIB, 2 * GIB), 3 * GIB, 8 * GIB, id="v2 with reclaimable cache"),
        pytest.param("0::/a", v2("a", "max", 3 * GIB), LARGE, LARGE, id="v2 without a limit"),
        pytest.param("0::/", v2(".", 8 * GIB, GIB), 7 * GIB, 8 * GIB, id="v2 seen from its own namespace"),
        pytest.param(
            "0::/a/b/c",
            {**v2("a", 16 * GIB, 15 * GIB), **v2("a/b", "max", 9 * GIB), **v2("a/b/c", 8 * GIB, 2 * GIB)},
            1 * GIB,
            8 * GIB,
            id="v2 nested: another group has used the ancestor's",
        ),
        pytest.param(
            "0::/a",
            {**v2("a", "max", 3 * GIB), "a/memory.high": 4 * GIB},
            1 * GIB,
            4 * GIB,
            id="v2 throttled above a size",
        ),
        pytest.param("0::/a", v2("a", 2 * GIB, 3 * GIB), 0, 2 * GIB, id="limit lowered below the usage"),
        pytest.param("0::/a", v2("a", 2 * GIB, GIB, 3 * GIB), 2 * GIB, 2 * GIB, id="never above the limit"),
        pytest.param("4:memory:/a\n0::/", v1("a", 8 * GIB, 5 * GIB, GIB), 4 * GIB, 8 * GIB, id="v1"),
        pytest.param("4:memory:/a", v1("a", NO_LIMIT_V1, 5 * GIB), LARGE, LARGE, id="v1 without a limit"),
        pytest.param(
            "4:memory:/a/b",
            {**v1("a", 4 * GIB, 3 * GIB), **v1("a/b", NO_LIMIT_V1, GIB)},
            1 * GIB,
            4 * GIB,
            id="v1 nested",
        ),
        pytest.param("4:memory:/docker/1234", v1(".", GIB, 0), GIB, GIB, id="v1 container, path of the host"),
        pytest.param("0::/a", {"a/memory.max": 2 * GIB}, 2 * GIB, 2 * GIB, id="usage unknown"),
        pytest.param("0::/a", v2("a", "plenty", 3 * GIB), LARGE, LARGE, id="garbled limit"),
        pytest.param("0::/a", v2("a", 4 * GIB, "?", "?"), 4 * GIB, 4 * GIB, id="garbled usage and cache"),
        pytest.param(
            "0::/a", {**v2("a", 4 * GIB, GIB), "a/memory.stat": b"\xff\n\x00 1 2"}, 3 * GIB, 4 * GIB, id="garbled stat"
        ),
    ],
)
def test_memory_is_what_the_tightest_group_has_left(
    tmp_path: Path, cgroup: str, files: dict[str, object], available: int, total: int
) -> None:
    root = tree(tmp_path, cgroup, files)
    assert available_memory(root) == available
    assert total_memory(root) == total


def test_memory_is_never_more_than_the_machine_has(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/a", v2("a", 4 * LARGE, 0))
    assert available_memory(root) == LARGE
