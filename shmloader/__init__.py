"""shmloader: a drop-in replacement for PyTorch's DataLoader on a pool of shared-memory slots."""

from shmloader.errors import (
    BatchTooLargeError,
    IteratorBrokenError,
    PlatformWarning,
    PoolMemoryError,
    PoolWarning,
    ProtocolError,
    SeedingWarning,
    UnpicklableBatchError,
    WorkerDiedError,
)
from shmloader.loader import DataLoader, loaders
from shmloader.paired import PairedDataset
from shmloader.patching import patch_torch, patched_torch, unpatch_torch
from shmloader.stats import LoaderStats, Memory
from shmloader.verdict import Verdict

__version__ = "0.1.0"

__all__ = [
    "BatchTooLargeError",
    "DataLoader",
    "IteratorBrokenError",
    "LoaderStats",
    "Memory",
    "PairedDataset",
    "PlatformWarning",
    "PoolMemoryError",
    "PoolWarning",
    "ProtocolError",
    "SeedingWarning",
    "UnpicklableBatchError",
    "Verdict",
    "WorkerDiedError",
    "loaders",
    "patch_torch",
    "patched_torch",
    "unpatch_torch",
]
