"""What the README says in code: that it runs, and that its translation says the same."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

from tests.datasets import Made
from tests.test_packaging import README, ROOT, block_after

BLOCK = re.compile(r"```(\w+)\n(.*?)\n```", re.DOTALL)
TRANSLATED = ROOT / "README.zh.md"


def rows(index: int) -> torch.Tensor:
    return torch.full((4,), float(index))


@pytest.fixture
def names() -> dict[str, Any]:
    """What the blocks take as given."""
    model = torch.nn.Linear(4, 4)
    return {
        "asyncio": asyncio,
        "inputs": Made(64, rows),
        "targets": Made(64, rows),
        "model": model,
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), 1e-6),
        "other_work": lambda: None,
    }


def test_the_answer_runs_also_asynchronously_and_when_it_is_asked_first(names: dict[str, Any]) -> None:
    before = names["model"].weight.clone()
    exec(block_after("test:pairs"), names)
    assert not torch.equal(names["model"].weight, before)
    assert type(names["batch"]).__name__ == "LateBatch"
    exec(block_after("test:async"), names)
    asyncio.run(names["train"]())
    exec(block_after("test:ready"), names)
    assert torch.equal(*names["batch"])
    names["loader"].close()
    names.clear()  # the functions that were made there refer to it


def test_every_block_of_the_translation_stands_in_the_readme_as_well() -> None:
    blocks = BLOCK.findall(TRANSLATED.read_text())
    assert len(blocks) >= 7
    for found in blocks:
        assert found in BLOCK.findall(README)


def test_every_table_row_of_figures_is_the_same_in_both() -> None:
    figures = re.compile(r"^\|[^|]*\|( [\d.]+ ms \|){3}$", re.MULTILINE)
    mine, its = (
        [re.findall(r"[\d.]+ ms", row.group()) for row in figures.finditer(text)]
        for text in (README, TRANSLATED.read_text())
    )
    assert len(its) == 3
    assert mine == its
