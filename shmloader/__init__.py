"""shmloader: a drop-in replacement for PyTorch's DataLoader on a pool of shared-memory slots."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from shmloader.late import LateBatch
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
    "LateBatch",
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

#: Where the public names are made; every other one is an error's.
_HOMES = {
    "DataLoader": "loader",
    "loaders": "loader",
    "LateBatch": "late",
    "PairedDataset": "paired",
    "patch_torch": "patching",
    "patched_torch": "patching",
    "unpatch_torch": "patching",
    "LoaderStats": "stats",
    "Memory": "stats",
    "Verdict": "verdict",
}


def __getattr__(name: str) -> object:
    """A public name, when it is first asked for (PEP 562).

    Importing them all at once would make every spawned worker, whose first batch the main process waits for, load the
    main process's half of the loader as well.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
