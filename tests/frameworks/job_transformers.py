"""Transformers' Trainer on a data set of the package datasets, with its loaders patched."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import tests.frameworks.material as material
from tests.frameworks.material import BATCH, COUNT, WORKERS, compare, facts_of, outline, swapped, workers_alive

ACCUMULATED = 4


class Regression(nn.Module):
    """A model as the Trainer wants it; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.network = material.model()
        self.losses: list[float] = []
        self.outlines: list[Any] = []
        self.most_workers = 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and outputs."""
        self.outlines.append(outline({"inputs": inputs, "labels": labels}))
        self.most_workers = max(self.most_workers, workers_alive())
        made = self.network(inputs)
        loss = nn.functional.mse_loss(made, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": made}


class Watcher(TrainerCallback):
    """Looks at the loader that trains."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_end(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        """Once all epochs are over."""
        self.facts = facts_of(train_dataloader.base_dataloader)


def table(count: int) -> Dataset:
    """Rows of inputs and targets, as tensors."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(3))
    rows = {"inputs": inputs.tolist(), "labels": inputs.square().sum(1, keepdim=True).tolist()}
    return Dataset.from_dict(rows).with_format("torch")


def job(loader: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """Two epochs of training and an evaluation."""
    with swapped(loader, extras):
        watcher, model = Watcher(), Regression()
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=".",
                use_cpu=True,
                seed=13,
                num_train_epochs=2,
                per_device_train_batch_size=BATCH,
                per_device_eval_batch_size=BATCH,
                gradient_accumulation_steps=ACCUMULATED,
                dataloader_num_workers=WORKERS,
                dataloader_pin_memory=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                learning_rate=0.05,
            ),
            train_dataset=table(COUNT),
            eval_dataset=table(10),
            callbacks=[watcher],
        )
        trainer.train()
        evaluated = trainer.evaluate()
        figures = ("loss", "grad_norm", "learning_rate", "train_loss")
        return {
            "logged": [{name: entry[name] for name in figures if name in entry} for entry in trainer.state.log_history],
            "evaluated": evaluated["eval_loss"],
            "weights": [value.flatten().tolist() for value in model.state_dict().values()],
            "losses": model.losses,
            "outlines": model.outlines,
            "most_workers": model.most_workers,
            "loader": watcher.facts,
        }


if __name__ == "__main__":
    compare(job)
