"""Lightning's Trainer and Fabric: ``one`` process, ``two`` of them, or a ``script`` that knows only torch's loader."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from tests.frameworks.material import (
    TORCH,
    Points,
    compared,
    facts_of,
    model,
    optimizer,
    options,
    outline,
    tell,
    workers_alive,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Regression(LightningModule):
    """Remembers every loss."""

    def __init__(self, make_loader: Any = None) -> None:
        super().__init__()
        self.network = model()
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.outlines: list[Any] = []
        self.most_workers = 0
        if make_loader is not None:
            self.train_dataloader = make_loader

    def training_step(self, batch: Any, _: int) -> Tensor:
        """One batch's loss."""
        loss = self.loss(batch)
        self.trained.append(loss.item())
        self.outlines.append(outline(batch))
        self.most_workers = max(self.most_workers, workers_alive())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        """One batch's loss."""
        self.validated.append(self.loss(batch).item())

    def predict_step(self, batch: Any, _: int) -> Tensor:
        """What the network makes of a batch."""
        made: Tensor = self.network(batch[0])
        return made

    def loss(self, batch: Any) -> Tensor:
        """How far off the network is."""
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The jobs' optimizer."""
        return optimizer(self)

    def seen(self) -> dict[str, Any]:
        """All of it."""
        return {
            "trained": self.trained,
            "validated": self.validated,
            "outlines": self.outlines,
            "most_workers": self.most_workers,
        }


class Writer(BasePredictionWriter):
    """Remembers the predictions and which samples they are of."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        *_: Any,
    ) -> None:
        """A batch's."""
        self.batches.append([prediction.flatten().tolist(), list(batch_indices or [])])

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """An epoch's."""
        self.epochs.append([[each.flatten().tolist() for each in predictions], batch_indices])


def fit(loader: Any, extras: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Two epochs, with validation after each and a sanity check before them."""
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=2, **{**QUIET, **how})
    module = Regression()
    trainer.fit(
        module,
        loader(Points(), shuffle=True, **options(**extras)),
        loader(Points(10), persistent_workers=True, **options(**extras)),
    )
    used = trainer.train_dataloader
    validating = trainer.val_dataloaders
    return {
        **module.seen(),
        "loader": facts_of(used),
        "validating loader": facts_of(validating),
        "iterators": [used._iterator is None, validating._iterator is None],
    }


def hooks(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """The loader is made in a hook, where Lightning wraps its class."""
    trainer = Trainer(max_epochs=2, overfit_batches=3, **QUIET)  # makes Lightning build the loader once more
    module = Regression(lambda: loader(Points(), shuffle=True, **options(**extras)))
    trainer.fit(module)
    return {**module.seen(), "loader": facts_of(trainer.train_dataloader)}


def overfit(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """The loader is made outside of hooks, so that Lightning builds it once more from its attributes."""
    trainer = Trainer(max_epochs=2, overfit_batches=3, **QUIET)
    module = Regression()
    trainer.fit(module, loader(Points(), shuffle=True, **options(**extras)))
    return {**module.seen(), "loader": facts_of(trainer.train_dataloader)}


def predict(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Lightning always builds the loader once more, around a batch sampler that remembers indices."""
    writer = Writer()
    trainer = Trainer(callbacks=[writer], **QUIET)
    trainer.predict(Regression(), loader(Points(), **options(**extras)))
    return {"batches": writer.batches, "epochs": writer.epochs, "loader": facts_of(trainer.predict_dataloaders)}


def ddp(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two processes; Lightning builds the loaders once more, with its own sampler."""
    return fit(loader, extras, strategy="ddp", devices=2)


def fabric(loader: Any, extras: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A loop of one's own."""
    run = Fabric(accelerator="cpu", **{"devices": 1, **how})
    run.launch()
    network = model()
    prepared, stepper = run.setup(network, optimizer(network))
    batches = run.setup_dataloaders(loader(Points(), shuffle=True, **options(**extras)))
    trained, outlines = [], []
    for _ in range(2):
        for inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(prepared(inputs), targets)
            run.backward(loss)
            stepper.step()
            stepper.zero_grad()
            trained.append(loss.item())
            outlines.append(outline([inputs, targets]))
    weights = [value.flatten().tolist() for value in network.state_dict().values()]
    return {"trained": trained, "outlines": outlines, "weights": weights, "loader": facts_of(batches._dataloader)}


def fabric_ddp(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two processes; Fabric builds the loader once more, with its own sampler."""
    return fabric(loader, extras, strategy="ddp", devices=2)


def all_of(*jobs: Any, automatic: tuple[Any, ...]) -> dict[str, Any]:
    """Each job, and some of them once more with an automatic number of workers."""
    given = {job.__name__: compared(job) for job in jobs}
    return {**given, "automatic": {job.__name__: compared(job, automatic=True) for job in automatic}}


if __name__ == "__main__":
    rank = int(os.environ.get("LOCAL_RANK", "0"))  # the launcher starts this script once more for the second
    if sys.argv[1] == "one":
        facts = all_of(fit, hooks, overfit, predict, fabric, automatic=(hooks, overfit, predict))
    elif sys.argv[1] == "two":
        facts = all_of(ddp, fabric_ddp, automatic=(ddp, fabric_ddp))
    else:
        torch.manual_seed(5)
        facts = ddp(TORCH, {})
    tell(facts, rank)
