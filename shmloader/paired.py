"""Pairs that stay pairs: one index stream over an input and a target data set."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, StackDataset


class PairedDataset(StackDataset[Any]):
    """Items ``(inputs[i], targets[i])`` of two map-style data sets.

    One sampler drives both, and both halves of a batch lie in one slot and are published together, so no shuffling, no
    number of workers and no restart can part them.

    Args:
        inputs, targets: map-style data sets of equal length.

    Raises:
        TypeError: one of them has no length or no ``__getitem__``.
        ValueError: the lengths differ.
    """

    def __init__(self, inputs: Dataset[Any], targets: Dataset[Any]) -> None:
        lengths = [_length(name, side) for name, side in (("inputs", inputs), ("targets", targets))]
        if lengths[0] != lengths[1]:
            raise ValueError(f"inputs has {lengths[0]} items, but targets has {lengths[1]}; pairs need equally many")
        super().__init__(inputs, targets)

    @property
    def inputs(self) -> Any:
        """The input side."""
        return self.datasets[0]

    @property
    def targets(self) -> Any:
        """The target side."""
        return self.datasets[1]


def _length(name: str, side: Any) -> int:
    if not hasattr(side, "__getitem__") or not hasattr(side, "__len__"):
        raise TypeError(f"{name} must be a map-style data set with __getitem__ and __len__, got {type(side).__name__}")
    return len(side)
