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
from shmloader.loader import DataLoader
from shmloader.paired import PairedDataset
from shmloader.stats import LoaderStats

__version__ = "0.1.0"

__all__ = [
    "BatchTooLargeError",
    "DataLoader",
    "IteratorBrokenError",
    "LoaderStats",
    "PairedDataset",
    "PlatformWarning",
    "PoolMemoryError",
    "PoolWarning",
    "ProtocolError",
    "SeedingWarning",
    "UnpicklableBatchError",
    "WorkerDiedError",
]
