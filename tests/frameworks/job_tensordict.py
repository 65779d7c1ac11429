"""Batches that are TensorDicts: made by a TensorDict itself, by torch's collate function, and as a tensorclass."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, tensorclass
from torch import Tensor
from torch.utils.data import Dataset

from tests.frameworks.material import COUNT, compare, descend, facts_of, model, options, workers_alive


@tensorclass
class Pair:
    """An input and its target."""

    inputs: Tensor
    targets: Tensor


def table() -> TensorDict:
    """All samples in one, some of them a level down, some of them no tensors."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(COUNT, 6, generator=generator)
    return TensorDict(
        {
            "inputs": inputs,
            "nested": TensorDict({"targets": inputs.square().sum(1, keepdim=True)}, batch_size=[COUNT]),
            "label": torch.arange(COUNT),
        },
        batch_size=[COUNT],
    )


class Samples(Dataset[Any]):
    """One TensorDict or Pair a sample."""

    def __init__(self, pairs: bool) -> None:
        self.table = table()
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        row = self.table[index]
        if self.pairs:
            return Pair(inputs=row["inputs"], targets=row["nested", "targets"], batch_size=[])
        return row


def as_is(batch: Any) -> Any:
    """A TensorDict picks a batch's rows itself."""
    return batch


def looks(batch: Any) -> list[Any]:
    """All that can be seen of a batch."""
    kind, inner = type(batch).__qualname__, batch if isinstance(batch, TensorDictBase) else batch.to_tensordict()
    values = {
        str(key): [str(value.dtype), list(value.shape), value.tolist()]
        for key, value in sorted(inner.items(True, True), key=lambda item: str(item[0]))
    }
    return [kind, list(batch.batch_size), str(batch.device), batch.is_locked, values]


def epoch(batches: Any) -> dict[str, Any]:
    """Train on all batches."""
    network = model()
    trained, seen, most_workers = [], [], 0
    for batch in batches:
        most_workers = max(most_workers, workers_alive())
        targets = batch["nested", "targets"] if isinstance(batch, TensorDictBase) else batch.targets
        inputs = batch["inputs"] if isinstance(batch, TensorDictBase) else batch.inputs
        trained.append(descend(network, inputs, targets))
        seen.append(looks(batch))
    return {"trained": trained, "seen": seen, "most_workers": most_workers}


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Each of the three ways."""
    itself = loader(table(), shuffle=True, collate_fn=as_is, **options(**extras))
    collated = loader(Samples(pairs=False), shuffle=True, **options(**extras))
    classes = loader(Samples(pairs=True), shuffle=True, **options(**extras))
    ways = {"itself": itself, "collated": collated, "classes": classes}
    return {**{name: epoch(way) for name, way in ways.items()}, "loader": [facts_of(way) for way in ways.values()]}


if __name__ == "__main__":
    compare(job)
