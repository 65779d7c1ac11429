"""What TARGET names, and what is said when it names nothing of use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from shmloader.cli.target import BenchError, explain, resolve

SOURCE = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, count=5):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return index

class Makers:
    @staticmethod
    def numbers():
        return Numbers(7)

def loader():
    return DataLoader(Numbers(), batch_size=2)

def listed():
    return [1, 2, 3]

def nothing():
    return None

def needy(root):
    return Numbers(root)

def raising():
    raise FileNotFoundError("no photographs here")

def quitting():
    raise SystemExit("usage: ...")

there = Numbers(4)
loader_there = DataLoader(there)
answer = 42
"""


@pytest.fixture(autouse=True)
def imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my-data.py"  # a file need not be named as a module would
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("name", "length"), [("Numbers", 5), ("Makers.numbers", 7), ("listed", 3), ("there", 4), ("loader_there", 4)]
)
def test_a_file_gives_a_dataset_whether_it_is_there_or_made(file: Path, name: str, length: int) -> None:
    assert len(resolve(f"{file}:{name}")) == length


def test_a_loader_comes_as_it_is(file: Path) -> None:
    loader = resolve(f"{file}:loader")
    assert isinstance(loader, DataLoader)
    assert loader.batch_size == 2


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").touch()
    (tmp_path / "inner" / "found_here.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    assert len(resolve("inner.found_here:Numbers")) == 5


def test_a_file_of_a_package_may_import_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "parcel"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "numbers_of_parcel.py").write_text(SOURCE)
    (folder / "entry.py").write_text("from .numbers_of_parcel import Numbers\n")
    dataset = resolve(f"{folder / 'entry.py'}:Numbers")
    assert type(dataset).__module__ == "parcel.numbers_of_parcel"


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("data.py", "'data.py' is not module:callable or path/file.py:callable"),
        (":make", "is not module:callable"),
        ("data.py:", "is not module:callable"),
        ("no/such/file.py:make", "there is no file 'no/such/file.py'"),
        ("no_such_module_anywhere:make", "there is no module 'no_such_module_anywhere'"),
        ("json.no_such_part:make", "there is no module 'json.no_such_part'"),
        ("FILE:absent", "has no 'absent'; it has Makers, Numbers, listed, loader, loader_there, needy"),
        ("FILE:answer", "is neither callable nor a Dataset or DataLoader, but an object of type builtins.int"),
        ("FILE:nothing", "returned None; a Dataset or a DataLoader is wanted"),
        ("FILE:needy", "needs arguments (missing a required argument: 'root')"),
        ("FILE:raising", "raised FileNotFoundError: no photographs here (my-data.py, line 30)"),
        ("FILE:quitting", "raised SystemExit: usage: ..."),
    ],
)
def test_a_wrong_target_is_told_what_is_wrong(file: Path, target: str, complaint: str) -> None:
    with pytest.raises(BenchError) as refused:
        resolve(target.replace("FILE", str(file)))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import a_package_that_is_missing", "raised ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
        ("def broken(:", "raised SyntaxError"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (broken_file.py, line 1)"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_its_own_error(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "broken_file.py").write_text(source)
    with pytest.raises(BenchError) as refused:
        resolve(f"{tmp_path / 'broken_file.py'}:make")
    assert complaint in str(refused.value)


def test_a_file_whose_name_is_taken_is_not_confused_with_the_other(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text(SOURCE)
    with pytest.raises(BenchError, match=r"the name 'json' stands for .*Rename the file"):
        resolve(f"{tmp_path / 'json.py'}:Numbers")


def test_a_workers_error_is_explained_by_its_last_line_and_place() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/somewhere/fetch.py", line 54, in fetch\n'
        '  File "/home/me/data.py", line 7, in __getitem__\n'
        "ValueError: no label\n"
    )
    assert explain(ValueError(text)) == "ValueError: no label (data.py, line 7)"
