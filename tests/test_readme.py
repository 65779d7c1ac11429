"""What the README says in code: that it runs, and that its translation says the same."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
import torch

from tests.datasets import Made
from tests.test_packaging import CHINESE, README, ROOT, TEXTS, block_after

COMMENT = re.compile(r"(?:^|[ \t]+)#.*$", re.MULTILINE)


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


# -- the translation --------------------------------------------------------------------------------------------


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a text, each with its language, without comments."""
    found = re.findall(r"^```(\w+)\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    return [(language, COMMENT.sub("", block)) for language, block in found]


def figures(text: str) -> list[list[str]]:
    """The rows of figures in a text's tables, without what the rows are called."""
    cells = [row.strip("| ").split(" | ")[1:] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    return [row for row in cells if row and re.match(r"\d", row[0])]


def anchor_of(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_block_of_the_translation_is_one_of_the_readmes_but_for_its_comments() -> None:
    mine, its = blocks(README), blocks(CHINESE)
    assert [block for block in its if block not in mine] == []
    assert {language for language, _ in its} == {"sh", "python"}


@pytest.mark.parametrize("marker", ["test:pairs", "test:async", "test:ready"])
def test_the_translation_has_the_readmes_answers(marker: str) -> None:
    assert ("python", COMMENT.sub("", block_after(marker))) in blocks(CHINESE)


def test_the_translation_sets_up_in_two_commands_and_has_one_for_the_demo_and_one_for_the_tests() -> None:
    commands = next(block for language, block in blocks(CHINESE) if language == "sh").splitlines()
    environment, install, demo, tests = commands
    assert block_after("ci:demo") == f"{environment} && {install.replace('[test]', '[demo]')} && {demo}"
    assert block_after("ci:test") == f"{environment} && {install} && {tests}"


def test_every_table_row_of_figures_in_the_translation_is_one_of_the_readmes() -> None:
    mine, its = figures(README), figures(CHINESE)
    assert len(its) == 2
    assert [row for row in its if row not in mine] == []


@TEXTS
def test_links_lead_somewhere(text: str) -> None:
    anchors = {"#" + anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert {"README.md", "README.zh.md"} & set(links)
    assert [link for link in links if link not in anchors and not (ROOT / link).is_file()] == []
