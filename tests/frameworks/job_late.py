"""What frameworks make of batches whose targets are late: `lightning` (with Fabric) or `accelerate`.

Without workers, targets are made when they are first asked for, so that it shows whether a framework asks for them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shmloader import DataLoader, PairedDataset
from tests.frameworks.material import BATCH, OURS, optimizer, swapped, tell

COUNT = 3 * BATCH


class Numbers(Dataset[Tensor]):
    """Item *i* is *i*."""

    def __init__(self) -> None:
        self.made = 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Tensor:
        self.made += 1
        return torch.tensor([float(index)])


class Watch:
    """Notes, when a loop gets its batch, of what type it is and how many targets have been made."""

    def __init__(self) -> None:
        self.targets = Numbers()
        self.pairs = PairedDataset(Numbers(), self.targets)
        self.seen: list[dict[str, Any]] = []

    def look(self, batch: Any) -> None:
        """The loop has got its batch."""
        seen = {"type": type(batch).__name__, "made": self.targets.made}
        inputs, targets = batch
        self.seen.append({**seen, "right": torch.equal(inputs, targets)})


def lightning() -> dict[str, Any]:
    """The trainer, and Fabric."""
    from lightning import LightningModule, Trainer
    from lightning.fabric import Fabric

    class Module(LightningModule):
        def __init__(self, watch: Watch) -> None:
            super().__init__()
            self.watch, self.network = watch, nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Tensor:
            self.watch.look(batch)
            loss: Tensor = self.network(batch[0]).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self)

    trained, prepared = Watch(), Watch()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_model_summary=False, **quiet).fit(
        Module(trained), DataLoader(trained.pairs, BATCH, late_targets=True)
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    for batch in fabric.setup_dataloaders(DataLoader(prepared.pairs, BATCH, late_targets=True)):
        prepared.look(batch)
    return {"trainer": trained.seen, "fabric": prepared.seen}


def accelerate() -> dict[str, Any]:
    """A loader that is prepared, and the function with which Accelerate moves batches."""
    from accelerate import Accelerator
    from accelerate.utils import send_to_device

    prepared, moved = Watch(), Watch()
    with swapped(OURS, {}):
        for batch in Accelerator(cpu=True).prepare(DataLoader(prepared.pairs, BATCH, late_targets=True)):
            prepared.look(batch)
    for batch in DataLoader(moved.pairs, BATCH, late_targets=True):
        moved.look(send_to_device(batch, torch.device("cpu")))
    return {"prepared": prepared.seen, "moved": moved.seen}


if __name__ == "__main__":
    tell({"lightning": lightning, "accelerate": accelerate}[sys.argv[1]]())
