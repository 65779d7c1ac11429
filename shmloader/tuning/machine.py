"""What the machine offers this process: cores, memory, and how many ranks share them.

The only module that imports psutil. Files are read below ``root`` and variables from ``env``, so that every rule can
be tested on made-up machines; an unreadable or garbled file or variable counts as absent, never as an error.

Rules from the kernel's documents ``admin-guide/cgroup-v2.rst`` and ``admin-guide/cgroup-v1/memory.rst``: a limit binds
a control group and all below it, so the tightest of a group's ancestors is the one that counts.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import psutil

DEFAULT_PERIOD_US = 100_000  # the kernel's CPU quota period where a file names none
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned 63-bit number: above this is none
LARGEST_FILE_BYTES = 1 << 16  # the largest, memory.stat, has about 2 KB; the kernel gives such files in one read

# Set by the launcher for each process, so they beat SLURM's: mpirun starts its daemons through srun, whose step then
# counts one task per node, whatever the number of ranks that the daemon starts.
LAUNCHER_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
# The step's own count first: the other is what the whole job asked for, and a step may be smaller.
SLURM_VARIABLES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True)
class Machine:
    """What this process may use, at one moment.

    Attributes:
        affinity: CPUs that this process may run on.
        pinned: whether the launcher gave this process CPUs of its own (fewer than the parent process may use).
        quota_cores: CPU quota of the control group, in cores; None without one.
        physical_cores: physical cores of the whole machine; None where unknown.
        local_ranks: processes of the same job on this machine, this one included.
        usable_cores: cores for this process, at least 1: see :func:`share_cores`.
        memory_available_bytes: see :func:`available_memory`.
        memory_total_bytes: see :func:`total_memory`.
    """

    affinity: int
    pinned: bool
    quota_cores: float | None
    physical_cores: int | None
    local_ranks: int
    usable_cores: int
    memory_available_bytes: int
    memory_total_bytes: int


def describe() -> Machine:
    """Read everything once."""
    affinity, pinned = _affinity()
    quota, physical, ranks = quota_cores(), _physical_cores(), local_ranks()
    cores = share_cores(affinity=affinity, pinned=pinned, quota_cores=quota, physical_cores=physical, ranks=ranks)
    return Machine(
        affinity=affinity,
        pinned=pinned,
        quota_cores=quota,
        physical_cores=physical,
        local_ranks=ranks,
        usable_cores=cores,
        memory_available_bytes=available_memory(),
        memory_total_bytes=total_memory(),
    )


def usable_cores() -> int:
    """Cores that this process may count on, at least 1: see :func:`share_cores`."""
    return describe().usable_cores


def share_cores(
    *, affinity: int, pinned: bool, quota_cores: float | None, physical_cores: int | None, ranks: int
) -> int:
    """One rank's share of the cores, at least 1.

    The least of affinity, CPU quota (rounded up) and physical cores, each where known, divided among the ranks and
    rounded down. An affinity that is the rank's own (``pinned``) is a share already and is not divided again.
    """
    shared = [] if pinned else [affinity]
    if quota_cores is not None:
        shared.append(math.ceil(quota_cores))
    if physical_cores is not None:
        shared.append(physical_cores)
    shares = [cores // ranks for cores in shared]
    return max(1, min([affinity, *shares]))


def _affinity() -> tuple[int, bool]:
    """CPUs of this process, and whether they are fewer than its parent's."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1, False
    own = len(os.sched_getaffinity(0))
    parent = os.getppid()
    # 0 is a parent outside our container; asking for it would ask for this process.
    if parent == 0:
        return own, False
    try:
        return own, own < len(os.sched_getaffinity(parent))
    except OSError:
        return own, False


@lru_cache(maxsize=1)  # reads several files per CPU, and the answer never changes
def _physical_cores() -> int | None:
    try:
        cores: int | None = psutil.cpu_count(logical=False)
    except (OSError, ValueError, psutil.Error):
        return None
    return cores if cores and cores > 0 else None


# ---- ranks ----


def visible_accelerators() -> int:
    """Accelerators that this process sees, 0 unless torch is imported.

    CUDA's own count is asked first: it goes through NVML, whereas other ways initialise the driver, after which
    forked workers cannot use CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    count: int = torch.cuda.device_count()
    if count == 0 and torch.accelerator.is_available():
        count = torch.accelerator.device_count()
    return count


def local_ranks(env: Mapping[str, str] = os.environ, accelerators: Callable[[], int] = visible_accelerators) -> int:
    """Processes of this job on this machine, 1 where nothing tells.

    Taken from LOCAL_WORLD_SIZE; else Open MPI's, MVAPICH2's or Hydra's local size; else SLURM's tasks per node; else,
    for launchers that set none of these, from WORLD_SIZE, at most one rank per visible accelerator.
    """
    for name in LAUNCHER_VARIABLES:
        ranks = _positive(env.get(name))
        if ranks:
            return ranks
    for name in SLURM_VARIABLES:
        ranks = _tasks_on_node(env.get(name, ""), env.get("SLURM_NODEID"))
        if ranks:
            return ranks
    world = _positive(env.get("WORLD_SIZE")) or 1
    # Counting accelerators may wake a driver: only where a second rank is known to exist.
    return max(1, min(world, accelerators())) if world > 1 else 1


def _tasks_on_node(text: str, node: str | None) -> int | None:
    """SLURM's count for one node out of ``4`` or ``4(x2),3``; the largest where the node is unknown."""
    counts: list[int] = []
    index = int(node) if node and re.fullmatch(r"\d{1,9}", node, re.ASCII) else None
    seen = 0
    for entry in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,8})(?:\(x([1-9]\d{0,8})\))?", entry.strip(), re.ASCII)
        if match is None:
            return None
        counts.append(int(match[1]))
        seen += int(match[2] or 1)
        if index is not None and index < seen:
            return counts[-1]
    return max(counts)


def _positive(text: str | bytes | None) -> int | None:
    """``text`` as a whole number above 0, or None."""
    try:
        number = int(text) if text is not None else 0
    except ValueError:
        return None
    return number if number > 0 else None


# ---- control groups ----


def quota_cores(root: str = "/") -> float | None:
    """CPU quota in cores (may be a fraction), the tightest of this process's control groups; None without one."""
    quotas = (_quota(directory) for directory in cgroup_directories("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(directory: str) -> float | None:
    words = _read(directory, "cpu.max").split()  # v2: "<quota or max> <period>"
    if not words:
        words = [_read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")]
    quota = _positive(words[0])
    period = _positive(words[1]) if len(words) > 1 else None
    return None if quota is None else quota / (period or DEFAULT_PERIOD_US)


def available_memory(root: str = "/") -> int:
    """Bytes that can be taken now without swapping: what machine and control groups both have left.

    The machine's is psutil's ``available``. A group's is its limit less its usage, where file cache that it has not
    used lately (``inactive_file``) counts as left, since the kernel drops it before anybody is killed.
    """
    rooms = [_memory_room(directory) for directory in cgroup_directories("memory", root)]
    return _least([psutil.virtual_memory().available, *rooms])


def private_bytes(pid: int) -> int:
    """Bytes of a process of this user that it shares with no other (USS); 0 if it has ended or the system is silent.

    Takes a millisecond or more.
    """
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError, AttributeError):
        return 0


def total_memory(root: str = "/") -> int:
    """Bytes of memory in all, under the same limits as :func:`available_memory`."""
    limits = [_memory_limit(directory) for directory in cgroup_directories("memory", root)]
    return _least([psutil.virtual_memory().total, *limits])


def _least(sizes: Iterable[int | None]) -> int:
    return max(0, min(size for size in sizes if size is not None))


def _memory_limit(directory: str) -> int | None:
    """The group's own limit in bytes. Past ``memory.high`` nobody is killed, but everybody is slowed to a crawl."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = (_positive(_read(directory, name)) for name in names)
    return min((limit for limit in limits if limit is not None and limit < NO_LIMIT_BYTES), default=None)


def _memory_room(directory: str) -> int | None:
    limit = _memory_limit(directory)
    if limit is None:  # the usual case, and memory.stat is the dearest file to read
        return None
    usage = _positive(_read(directory, "memory.current") or _read(directory, "memory.usage_in_bytes")) or 0
    return max(0, limit - max(0, usage - _inactive_file(directory)))


def _inactive_file(directory: str) -> int:
    """Reclaimable cache of the group and all below it: v1 keeps that sum under another name."""
    pairs = (line.split() for line in _read(directory, "memory.stat").splitlines())
    stat = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return _positive(stat.get(b"total_inactive_file", stat.get(b"inactive_file"))) or 0


def cgroup_directories(controller: str, root: str = "/") -> list[str]:
    """Directories of the control groups that bind this process for ``controller``, innermost first.

    From ``/proc/self/cgroup`` and the mounts below ``/sys/fs/cgroup``, both versions. Empty where there are none.
    """
    mount = os.path.join(root, "sys/fs/cgroup")
    directories: list[str] = []
    for line in _read(root, "proc/self/cgroup").decode(errors="replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # v2, beside v1's mounts in a hybrid set-up
            bases = [os.path.join(mount, "unified"), mount]
        elif controller in controllers.split(","):
            bases = [os.path.join(mount, controller), os.path.join(mount, controllers)]
        else:
            continue
        directories += _lineage(next(filter(os.path.isdir, bases), mount), path)
    return directories


def _lineage(base: str, path: str) -> list[str]:
    """The directory of ``path`` below ``base`` and its ancestors up to ``base``.

    In a container ``path`` may be the host's while ``base`` shows only the container's part of it: leading parts are
    dropped until what is left exists, at worst ``base`` itself.
    """
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    while parts and not os.path.isdir(os.path.join(base, *parts)):
        parts = parts[1:]
    return [os.path.join(base, *parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(directory: str, name: str) -> bytes:
    """A small file's bytes, empty where it cannot be read.

    Not through ``open``: its file object takes twice as long, and a reading looks at a dozen of these.
    """
    try:
        descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
    except (OSError, ValueError):
        return b""
    try:
        return os.read(descriptor, LARGEST_FILE_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
