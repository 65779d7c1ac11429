"""DistributedDataParallel with a DistributedSampler, one process a rank, as torchrun starts them."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tests.frameworks.material import Points, compare, facts_of, model, options, two_epochs


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, shuffled anew for each."""
    dataset = Points()
    batches = loader(dataset, sampler=DistributedSampler(dataset, seed=2), **options(**extras))
    network = DistributedDataParallel(model())
    return {**two_epochs(network, batches), "loader": facts_of(batches)}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    try:
        compare(job, rank=torch.distributed.get_rank())
    finally:
        torch.distributed.destroy_process_group()
