"""Accelerate, which always makes loaders of its own by torch's name: patched, in one process and in two.

With ``script`` it is one that knows only torch's loader.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.utils.data
from accelerate import Accelerator, skip_first_batches

from tests.frameworks.material import (
    SLOTS,
    TORCH,
    Points,
    compared,
    facts_of,
    model,
    optimizer,
    options,
    outline,
    swapped,
    tell,
)

SKIPPED = 2


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """With a loader that is made by torch's name."""
    with swapped(loader, extras):
        return train(torch.utils.data.DataLoader(Points(), shuffle=True, **options()))


def given(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """With a loader that says itself how many workers it is to have."""
    with swapped(loader, {"slots": SLOTS}):
        return train(loader(Points(), shuffle=True, **options(**extras)))


def train(loader: Any) -> dict[str, Any]:
    """Two epochs, and what is left of a third after some batches."""
    run = Accelerator(cpu=True)
    network = model()
    network, stepper, batches = run.prepare(network, optimizer(network), loader)
    rest = skip_first_batches(batches, SKIPPED)
    trained, outlines = [], []
    for over in (batches, batches, rest):
        for inputs, targets in over:
            loss = torch.nn.functional.mse_loss(network(inputs), targets)
            stepper.zero_grad()
            run.backward(loss)
            stepper.step()
            trained.append(loss.item())
            outlines.append(outline([inputs, targets]))
    return {
        "trained": trained,
        "outlines": outlines,
        "processes": run.num_processes,
        "is a DataLoader": isinstance(batches, torch.utils.data.DataLoader),
        "loader": [facts_of(batches.base_dataloader), facts_of(rest.base_dataloader)],
    }


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    if sys.argv[1:] == ["script"]:
        torch.manual_seed(5)
        tell(job(TORCH, {}), rank)
    else:
        automatic = {"patched": compared(job, automatic=True), "given": compared(given, automatic=True)}
        tell({**compared(job), "automatic": automatic}, rank)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
