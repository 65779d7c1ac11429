"""Base seed, per-worker seeds as torch makes them, and per-batch seeds that depend on no worker.

Under ``seeding="worker"`` a worker is seeded once, with ``base_seed + worker_id``, as in torch: augmentations are
bit-identical to its loader's. Under ``seeding="batch"`` torch's CPU generator, ``random`` and numpy's legacy generator
are seeded from (base seed, epoch, batch index), and each half of a batch with late targets from that and which half it
is, before every fetch, so that data depend neither on the number of workers
nor on which of them makes a batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import numpy.random  # here, because numpy would load it only when a worker is seeded: 6 ms in each of them
import torch
from torch.utils.data import Dataset

_MASK64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # splitmix64's


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed this process as torch seeds its worker ``worker_id``; returns the worker's seed."""
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    # Not `seed`: torch spreads it first, so that random's and numpy's Mersenne twisters do not run in step.
    entropy = [worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
    return seed


def batch_seed(base_seed: int, epoch: int, batch: int, half: int | None = None) -> int:
    """64 bits for one batch, or for a half of it, by rounds of splitmix64's mixing (Steele, Lea, Flood 2014)."""
    seed = _mix(_mix(base_seed + _STEP * (epoch + 1)) + _STEP * (batch + 1))
    return seed if half is None else _mix(seed + _STEP * (half + 2))


def _mix(z: int) -> int:
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def seed_batch(base_seed: int, epoch: int, batch: int, half: int | None = None) -> None:
    """Seed torch's CPU generator, ``random`` and numpy's legacy generator for one batch, or for a half of it."""
    seed = batch_seed(base_seed, epoch, batch, half)
    # Not torch.manual_seed: it also goes through every accelerator and takes a hundred times as long.
    torch.default_generator.manual_seed(seed & (_MASK64 >> 1))
    random.seed(seed)
    # Not `seed`: random's and numpy's Mersenne twisters would run in step.
    other = _mix(seed + _STEP)
    np.random.seed([other & 0xFFFFFFFF, other >> 32])


@contextmanager
def isolated() -> Iterator[None]:
    """Put the three generators' states back at the end: a fetch in the training process must not move them."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


#: Data sets keep what they wrap in short lists or dicts; the first few entries say what is in a long one.
_LOOKED_AT = 16


def own_generators(dataset: Any) -> list[str]:
    """Names of attributes of ``dataset``, or of data sets that it wraps, that are random generator objects.

    No seeding here can reach those.
    """
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    found: list[str] = []
    ahead, seen = [("", dataset)], {id(dataset)}
    while ahead:
        prefix, holder = ahead.pop(0)
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, kinds):
                found.append(prefix + name)
            parts = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
            )
            for wrapped in islice(parts, _LOOKED_AT):
                if isinstance(wrapped, Dataset) and id(wrapped) not in seen:
                    seen.add(id(wrapped))
                    ahead.append((f"{prefix}{name}.", wrapped))
    return found
