"""DistributedDataParallel with a DistributedSampler, one process a rank, as torchrun starts them.

With ``script`` it is one that knows only torch's loader.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from tests.frameworks.material import TORCH, Points, compare, facts_of, model, options, tell, two_epochs


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs, shuffled anew for each."""
    dataset = Points()
    batches = loader(dataset, sampler=DistributedSampler(dataset, seed=2), **options(**extras))
    network = DistributedDataParallel(model())
    return {**two_epochs(network, batches), "loader": facts_of(batches)}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    try:
        if sys.argv[1:] == ["script"]:
            torch.manual_seed(5)
            tell(job(TORCH, {}), torch.distributed.get_rank())
        else:
            compare(job, torch.distributed.get_rank())
    finally:
        torch.distributed.destroy_process_group()
