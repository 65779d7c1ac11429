"""DistributedDataParallel with a DistributedSampler, one process a rank, as torchrun starts them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tests.frameworks.material import Points, compare, facts_of, model, optimizer, options, outline


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, shuffled anew for each."""
    dataset = Points()
    sampler: Any = DistributedSampler(dataset, seed=2)
    batches = loader(dataset, sampler=sampler, **options(**extras))
    network = DistributedDataParallel(model())
    stepper = optimizer(network)
    trained, outlines = [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(network(inputs), targets)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            trained.append(loss.item())
            outlines.append(outline([inputs, targets]))
    weights = [value.flatten().tolist() for value in network.state_dict().values()]
    return {"trained": trained, "outlines": outlines, "weights": weights, "loader": facts_of(batches)}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    try:
        compare(job, rank=torch.distributed.get_rank())
    finally:
        torch.distributed.destroy_process_group()
