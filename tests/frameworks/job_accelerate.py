"""Accelerate, which always makes loaders of its own by torch's name: patched, in one process and in two."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.utils.data
from accelerate import Accelerator, skip_first_batches

from tests.frameworks.material import Points, compare, facts_of, model, optimizer, options, outline, swapped

SKIPPED = 2


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, and what is left of a third after some batches."""
    with swapped(loader, extras):
        run = Accelerator(cpu=True)
        given = torch.utils.data.DataLoader(Points(), shuffle=True, **options())
        network = model()
        network, stepper, batches = run.prepare(network, optimizer(network), given)
        trained, outlines = [], []

        def train(over: Any) -> None:
            for inputs, targets in over:
                loss = torch.nn.functional.mse_loss(network(inputs), targets)
                stepper.zero_grad()
                run.backward(loss)
                stepper.step()
                trained.append(loss.item())
                outlines.append(outline([inputs, targets]))

        train(batches)
        train(batches)
        rest = skip_first_batches(batches, SKIPPED)
        train(rest)
        return {
            "trained": trained,
            "outlines": outlines,
            "processes": run.num_processes,
            "is a DataLoader": isinstance(batches, torch.utils.data.DataLoader),
            "loader": [facts_of(batches.base_dataloader), facts_of(rest.base_dataloader)],
        }


if __name__ == "__main__":
    compare(job, rank=int(os.environ.get("RANK", "0")))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
