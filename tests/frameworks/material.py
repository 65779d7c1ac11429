"""What the jobs train on, and how they say what they saw."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor, nn
from torch.utils.data import Dataset

import shmloader

#: Set for all processes of a job: the folder for what they tell.
FOLDER = "SHMLOADER_JOB_FOLDER"

TORCH: Any = torch.utils.data.DataLoader
OURS: Any = shmloader.DataLoader
SLOTS = 7  # an option that only a loader of ours has
COUNT, BATCH, WORKERS = 24, 4, 2
RATE = 0.05

#: From a loader class and options for it to what was seen with it.
Job = Callable[[Any, dict[str, Any]], dict[str, Any]]


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points and what a model is to make of them; with ``noise``, a draw from the worker's own generator is added."""

    noise = True  # of those that are made from now on

    def __init__(self, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(count, 6, generator=generator)
        self.noise = Points.noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        target = inputs.square().sum(0, keepdim=True)
        return (inputs + 0.1 * torch.randn(6) if self.noise else inputs), target


def model() -> nn.Sequential:
    """A small network, the same at every call."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    """For frameworks that want one; the first of a process takes torch seconds of imports."""
    return torch.optim.SGD(of.parameters(), lr=RATE)


def descend(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Train on a batch, with as little of torch as that needs; the loss."""
    loss = nn.functional.mse_loss(network(inputs), targets)
    network.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weights in network.parameters():
            assert weights.grad is not None
            weights -= RATE * weights.grad
    return loss.item()


def two_epochs(network: nn.Module, batches: Any) -> dict[str, Any]:
    """Train on all batches of a loader twice; its sampler is told of the epochs."""
    trained, outlines = [], []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for inputs, targets in batches:
            trained.append(descend(network, inputs, targets))
            outlines.append(outline([inputs, targets]))
    weights = [value.flatten().tolist() for value in network.state_dict().values()]
    return {"trained": trained, "outlines": outlines, "weights": weights}


def options(**more: Any) -> dict[str, Any]:
    """What all loaders of the jobs are given."""
    return {"batch_size": BATCH, "num_workers": WORKERS, **more}


def swapped(loader: Any, extras: dict[str, Any]) -> AbstractContextManager[None]:
    """While it lasts, what frameworks make by torch's name is a loader of this class, with these options."""
    return shmloader.patched_torch(**extras) if loader is OURS else nullcontext()


def outline(batch: Any) -> Any:
    """Types, dtypes and shapes of a batch, as JSON."""
    name = f"{type(batch).__module__}.{type(batch).__qualname__}"
    if isinstance(batch, Tensor):
        return [name, str(batch.dtype), list(batch.shape)]
    if hasattr(batch, "items"):
        return [name, {key: outline(value) for key, value in batch.items()}]
    return [name, [outline(part) for part in batch]]


def workers_alive() -> int:
    """Loader workers among this process's children."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread, or the child, ended meanwhile
            for pid in (task / "children").read_text().split():
                with suppress(OSError):
                    count += Path(f"/proc/{pid}/comm").read_text().strip() == "pt_data_worker"
    return count


def facts_of(loader: Any) -> dict[str, Any]:
    """What a framework made of a loader."""
    ours = isinstance(loader, OURS)
    return {
        "class": f"{type(loader).__module__}.{type(loader).__qualname__}",
        "slots": getattr(loader, "slots", None),
        "num_workers": type(loader.num_workers).__name__,
        "batches": loader.stats(lifetime=True).batches if ours else None,
    }


def compare(job: Job, rank: int = 0) -> None:
    """Do a job with torch's loader and with ours, and tell the test what this process saw."""
    tell(compared(job), rank)


def compared(job: Job, *, noise: bool = True, automatic: bool = False) -> dict[str, Any]:
    """What a job saw with torch's loader and with ours.

    With ``automatic`` ours chooses the number of its workers; no noise then, for it seeds batches and not workers.
    """
    Points.noise = noise and not automatic
    options = {"slots": SLOTS, "num_workers": "auto"} if automatic else {"slots": SLOTS}
    seen: dict[str, Any] = {}
    for name, loader, extras in (("torch", TORCH, {}), ("ours", OURS, options)):
        torch.manual_seed(5)
        seen[name] = job(loader, extras)
        gc.collect()
        seen[name]["workers_left"] = workers_alive()
    return seen


def tell(facts: dict[str, Any], rank: int = 0) -> None:
    """Tell the test what this process saw."""
    (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(json.dumps(facts))
