"""Ray Train's recipe: two workers, each with a DistributedSampler of its own making, on a local Ray."""

from __future__ import annotations

import os
from typing import Any

import ray
import ray.train
import ray.train.torch
from torch.utils.data import DistributedSampler

from tests.frameworks.material import FOLDER, Points, compare, facts_of, model, options, two_epochs


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs. A loader that has a DistributedSampler already is left as it is."""
    dataset = Points()
    given = loader(dataset, sampler=DistributedSampler(dataset, seed=2), **options(**extras))
    batches = ray.train.torch.prepare_data_loader(given)
    network = ray.train.torch.prepare_model(model())
    inner = getattr(batches, "_dataloader", batches)  # below the wrapper that moves batches to the device
    return {**two_epochs(network, batches), "loader": facts_of(inner)}


def in_each_worker() -> None:
    """What Ray runs in its worker processes."""
    compare(job, rank=ray.train.get_context().get_world_rank())


if __name__ == "__main__":
    folder = os.environ[FOLDER]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=folder)
    try:
        trainer = ray.train.torch.TorchTrainer(
            in_each_worker,
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        trainer.fit()
    finally:
        ray.shutdown()
