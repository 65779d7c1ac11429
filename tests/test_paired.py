"""Pairs stay pairs, whoever shuffles, fetches and delivers them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from shmloader import DataLoader, PairedDataset
from shmloader.paired import PairedItems
from tests.datasets import Items, Rows


class Inputs(Dataset[Any]):
    """Input *i* is a page of *i*'s, which draws on the way."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full((1024,), float(index))


class Targets(Inputs):
    """Target *i* belongs to input *i*."""

    def __getitem__(self, index: int) -> Any:
        return {"label": index, "mask": np.full((64,), index, np.uint8)}


class AtOnce(Inputs):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(())


def test_an_item_is_an_input_with_its_target() -> None:
    pairs = PairedDataset(Items("abc"), [1, 2, 3])
    assert len(pairs) == 3
    assert [pairs[index] for index in range(3)] == [("a", 1), ("b", 2), ("c", 3)]
    assert isinstance(pairs, StackDataset)
    assert not isinstance(pairs, IterableDataset)
    assert pairs.inputs.items == "abc"
    assert pairs.targets == [1, 2, 3]


def test_unequal_lengths_are_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match="inputs has 3 items, but targets has 4; pairs need equally many"):
        PairedDataset(Items("abc"), Items("abcd"))


@pytest.mark.parametrize(
    ("inputs", "targets", "error"),
    [
        ({1}, Items("a"), "inputs must be a map-style data set with __getitem__ and __len__, or .*, got set"),
        (1, 2, "inputs must be a map-style .*, got int"),
        (Items("a"), iter("a"), "targets must be a map-style .*, got str_(ascii_)?iterator"),
        (Items("a"), Stream(), r"inputs must be an IterableDataset, got Items, while targets \(Stream\) is iterable"),
        (Stream(), Items("a"), r"targets must be an IterableDataset, got Items, while inputs \(Stream\) is iterable"),
    ],
)
def test_sides_of_no_kind_or_of_two_kinds_are_an_error_that_names_them(inputs: Any, targets: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        PairedDataset(inputs, targets)


@pytest.mark.parametrize(
    ("sides", "named", "kind", "error"),
    [
        ("", {}, TypeError, "pairs need two sides or more, got 0"),
        ("a", {}, TypeError, "pairs need two sides or more, got 1"),
        ("", {"inputs": "a"}, TypeError, "pairs need two sides or more, got 1"),
        ("abc", {}, TypeError, "got 3 sides; more than inputs and targets need names"),
        ("a", {"targets": "b"}, TypeError, "by position or by name, not both; got 1 by position and targets: name"),
        ("ab", {"cycle": 1}, TypeError, "cycle must be the name of a side, a list of names, or None, got 1"),
        ("ab", {"cycle": ["inputs", 1]}, TypeError, "cycle must be the name of a side"),
        ("ab", {"cycle": "labels"}, ValueError, "cycle names 'labels', but the sides are inputs, targets"),
        ("", {"a": "b", "c": "d", "cycle": "inputs"}, ValueError, "cycle names 'inputs', but the sides are a, c"),
        ("ab", {"cycle": ("inputs", "targets")}, ValueError, "cycle names all sides, but one has to say how many"),
        ("ab", {"joint_transform": 3}, TypeError, "joint_transform must be callable or None, got int"),
        (["", "a"], {"cycle": "targets"}, ValueError, "targets is to repeat, but has 1 items for 0 pairs"),
        (["a", "bc"], {"cycle": "targets"}, ValueError, "targets is to repeat, but has 2 items for 1 pairs; only a sh"),
        (["a", ""], {"cycle": "targets"}, ValueError, "targets is to repeat, but has no items"),
        (["a", "bc"], {}, ValueError, r"inputs has 1 items, but targets has 2; .*\(cycle='inputs' would repeat"),
        ("", {"a": "b", "c": "d", "e": "fg"}, ValueError, r"a has 1 items, but e has 2; .*\(cycle='a' would rep"),
        ("", {"a": "bb", "c": "dd", "e": "f", "cycle": ["c"]}, ValueError, r"a has 2 .* e has 1; .*\(cycle='e' would"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_to_change(sides: Any, named: Any, kind: Any, error: str) -> None:
    with pytest.raises(kind, match=error):
        PairedDataset(*sides, **named)


class Derived(PairedDataset[Any]):
    """Says not whether it is of items or of streams."""


class OfItems(PairedItems[Any]):
    """Pairs of items with a method of their own."""

    def swapped(self, index: int) -> Any:
        x, y = self[index]
        return y, x


def test_own_classes_derive_from_one_of_the_two_kinds() -> None:
    assert OfItems("ab", "cd").swapped(1) == ("d", "b")
    assert type(pickle.loads(pickle.dumps(OfItems("ab", "cd")))) is OfItems
    with pytest.raises(TypeError, match=r"Derived must derive from shmloader\.paired\.PairedItems, not from PairedD"):
        Derived("ab", "cd")
    with pytest.raises(TypeError, match=r"Derived must derive from shmloader\.paired\.PairedStream"):
        Derived(Stream(), Stream())
    with pytest.raises(TypeError, match="inputs must be a map-style data set"):
        PairedItems(Stream(), Stream())


def test_empty_pairs_are_pairs() -> None:
    assert len(PairedDataset(Items(""), Items(""))) == 0


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("kind", [Inputs, AtOnce])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_no_shuffling_and_no_number_of_workers_parts_them(workers: int, kind: type[Inputs], seeding: str) -> None:
    pairs = PairedDataset(kind(50), Targets(50))
    loader = DataLoader(pairs, batch_size=4, shuffle=True, num_workers=workers, seeding=seeding)
    seen: list[int] = []
    for x, y in loader:
        assert x[:, 0].tolist() == x[:, -1].tolist() == y["label"].tolist() == y["mask"][:, 5].tolist()
        seen += y["label"].tolist()
    assert sorted(seen) == list(range(50))
    assert seen != list(range(50))


def test_both_halves_of_a_batch_lie_in_one_slot() -> None:
    loader = DataLoader(PairedDataset(Inputs(8), Targets(8)), batch_size=4, num_workers=1)
    x, y = next(iter(loader))
    ends = [x.data_ptr(), y["label"].data_ptr(), y["mask"].data_ptr()]
    assert loader.stats().slots["LEASED"] == 1
    assert max(ends) - min(ends) < max(loader.stats().slot_bytes.values())


def test_pairs_can_be_pickled_and_taken_apart() -> None:
    pairs = PairedDataset(Rows(5), Rows(5))
    again = pickle.loads(pickle.dumps(pairs))
    assert type(again) is type(pairs)
    assert isinstance(again, PairedDataset)
    assert len(again.inputs) == 5
    assert Subset(pairs, [3])[0][1][1] == 3


def test_pairs_come_in_the_same_order_as_torchs_stack_of_the_two() -> None:
    x, y = TensorDataset(torch.arange(20)), TensorDataset(torch.arange(20) * 10)

    def batches(dataset: Any, kind: Any) -> list[Any]:
        torch.manual_seed(0)
        return [[half[0].tolist() for half in batch] for batch in kind(dataset, 3, shuffle=True, num_workers=2)]

    assert batches(PairedDataset(x, y), DataLoader) == batches(StackDataset(x, y), torch.utils.data.DataLoader)


# -- by name ---------------------------------------------------------------------------------------------------


def test_sides_with_names_give_dicts_as_torchs_stack_does() -> None:
    sides = {"inputs": "abc", "targets": [1, 2, 3], "weights": (0.1, 0.2, 0.3)}
    pairs, torchs = PairedDataset(**sides), StackDataset(**sides)
    assert [pairs[i] for i in range(3)] == [torchs[i] for i in range(3)] == pairs.__getitems__([0, 1, 2])
    assert list(pairs[0]) == list(sides)
    assert pairs.datasets == sides
    assert (pairs.inputs, pairs.targets) == ("abc", [1, 2, 3])


def test_two_sides_with_names_give_dicts_even_under_the_names_of_the_positions() -> None:
    assert PairedDataset(inputs="ab", targets="cd")[1] == {"inputs": "b", "targets": "d"}
    assert PairedDataset(targets="cd", self="ab")[1] == {"targets": "d", "self": "b"}


def test_a_side_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no side is named 'inputs'; they are a, targets"):
        PairedDataset(a="b", targets="c").inputs  # noqa: B018
    assert not hasattr(PairedDataset(a="b", c="d"), "targets")


# -- indices and repeating -------------------------------------------------------------------------------------


@given(count=st.integers(0, 12), short=st.integers(1, 12), data=st.data())
def test_every_index_gives_the_pair_that_counting_gives(count: int, short: int, data: st.DataObject) -> None:
    short = min(short, count)
    by_position = PairedDataset(range(count), range(short), cycle="targets")
    by_name = PairedDataset(a=range(short), b=range(count), c=AtOnce(short), cycle=["a", "c"])
    assert len(by_position) == len(by_name) == count
    index = data.draw(st.integers(-count - 3, count + 2))
    if -count <= index < count:
        i = range(count)[index]
        assert by_position[index] == by_position[np.int64(index)] == (i, i % short)
        assert by_position.__getitems__([index, torch.tensor(index)]) == [(i, i % short)] * 2
        item = by_name.__getitems__([index])[0]
        assert (item["a"], item["b"], item["c"][0]) == (i % short, i, i % short)
    else:
        for ask in (by_position.__getitem__, by_name.__getitem__, lambda index: by_name.__getitems__([index])):
            with pytest.raises(IndexError, match=f"index {index} is out of range for {count} pairs"):
                ask(index)


@given(lengths=st.lists(st.integers(0, 6), min_size=2, max_size=4), cycled=st.sets(st.integers(0, 3)))
def test_lengths_fit_or_are_refused(lengths: list[int], cycled: set[int]) -> None:
    sides = {f"s{i}": range(length) for i, length in enumerate(lengths)}
    cycle = [f"s{i}" for i in sorted(cycled) if i < len(lengths)]
    leading = {len(side) for name, side in sides.items() if name not in cycle}
    repeating = [len(sides[name]) for name in cycle]
    if len(leading) == 1 and all(0 < length <= max(leading) or length == max(leading) for length in repeating):
        pairs = PairedDataset(**sides, cycle=cycle)
        assert [pairs[i] for i in range(len(pairs))] == [
            {name: i % len(side) for name, side in sides.items()} for i in range(max(leading))
        ]
    else:
        with pytest.raises(ValueError, match=r"pairs need equally many|is to repeat|cycle names all sides"):
            PairedDataset(**sides, cycle=cycle)


def test_keys_that_are_no_integers_reach_the_sides_as_they_are_unless_one_repeats() -> None:
    assert PairedDataset("abcd", "efgh")[1:3] == ("bc", "fg")
    assert PairedDataset({"k": 1}, {"k": 2})["k"] == (1, 2)
    pairs = PairedDataset("abcd", "ef", cycle="targets")
    for ask in (pairs.__getitem__, lambda key: pairs.__getitems__([key])):
        with pytest.raises(TypeError, match="targets repeats, so indices must be integers, got slice"):
            ask(slice(2))


# -- whole batches ---------------------------------------------------------------------------------------------


class Asked(Dataset[Any]):
    """Answers whole batches by ``answer``, and remembers the calls."""

    def __init__(self, answer: Callable[[list[int]], Any]) -> None:
        self.answer, self.calls = answer, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("not asked for, where there is __getitems__")

    def __getitems__(self, indices: list[int]) -> Any:
        self.calls.append(list(indices))
        return self.answer(indices)


def test_a_side_that_gives_whole_batches_is_asked_once_a_batch_and_the_other_item_by_item() -> None:
    whole = Asked(lambda indices: [f"t{index}" for index in indices])
    pairs = PairedDataset(range(10), whole)
    assert pairs.__getitems__([3, -1, 3]) == [(3, "t3"), (9, "t9"), (3, "t3")]
    assert pairs.__getitems__([]) == []
    assert whole.calls == [[3, 9, 3], []]


def test_a_side_that_sorts_its_indices_in_place_parts_nothing() -> None:
    def sort(indices: list[int]) -> list[int]:
        given = tuple(indices)
        indices.sort()
        return list(given)

    assert PairedDataset(Asked(sort), Asked(list)).__getitems__([5, 2]) == [(5, 5), (2, 2)]


@pytest.mark.parametrize("answer", [lambda indices: indices[1:], lambda indices: [*indices, 0]])
def test_a_side_that_gives_too_few_or_too_many_is_an_error_that_names_it(answer: Any) -> None:
    count = len(answer([1, 2]))
    error = rf"__getitems__ of targets \(Asked\) returned {count} items for 2 indices"
    with pytest.raises(ValueError, match=error):
        PairedDataset(range(10), Asked(answer)).__getitems__([1, 2])
    with pytest.raises(ValueError, match=error):
        list(DataLoader(PairedDataset(range(10), Asked(answer)), 2, num_workers=1))


def test_whatever_has_a_length_will_do_for_a_whole_batch() -> None:
    pairs = PairedDataset(Asked(torch.tensor), Asked(lambda indices: (index for index in indices)))
    assert pairs.__getitems__([4, 5]) == [(torch.tensor(4), 4), (torch.tensor(5), 5)]


# -- joint transforms ------------------------------------------------------------------------------------------


def crop(x: torch.Tensor, y: Any) -> Any:
    """The same random piece of both."""
    start = int(torch.randint(1000, ()))
    return x[start : start + 8], y[start : start + 8]


def crop_all(item: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(item, crop(*item.values())))


class Ramp(Inputs):
    """Item *i* counts up from 2000 *i*."""

    def __getitem__(self, index: int) -> Any:
        return torch.arange(1024) + 2000 * index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_crop_is_the_same_crop_on_both_sides(workers: int) -> None:
    pairs = PairedDataset(Ramp(20), Ramp(20), joint_transform=crop)
    by_name = PairedDataset(a=Ramp(20), b=Ramp(20), joint_transform=crop_all)
    starts = set()
    for x, y in DataLoader(pairs, 4, shuffle=True, num_workers=workers):
        assert torch.equal(x, y)
        starts |= {int(start) % 2000 for start in x[:, 0]}
    assert len(starts) > 10
    for batch in DataLoader(by_name, 4, shuffle=True, num_workers=workers):
        assert list(batch) == ["a", "b"]
        assert torch.equal(batch["a"], batch["b"])
    assert torch.equal(*pairs[3])


@pytest.mark.parametrize(
    ("made", "kind", "error"),
    [
        (None, TypeError, r"joint_transform must return a tuple \(input, target\), got NoneType"),
        ([1, 2], TypeError, r"got list"),
        (torch.zeros(2), TypeError, r"got Tensor"),
        ((1, 2, 3), ValueError, r"joint_transform must return a tuple \(input, target\), got one of 3 parts"),
    ],
)
def test_a_joint_transform_of_two_that_returns_no_two_is_an_error(made: Any, kind: Any, error: str) -> None:
    pairs = PairedDataset("ab", "cd", joint_transform=lambda *_: made)
    with pytest.raises(kind, match=error):
        pairs[0]
    with pytest.raises(kind, match=error):
        pairs.__getitems__([0])


@pytest.mark.parametrize(
    ("made", "kind", "error"),
    [
        (None, TypeError, "joint_transform must return a dict with x, y, got NoneType"),
        ((1, 2), TypeError, "got tuple"),
        ({"x": 1}, ValueError, "joint_transform must return a dict with x, y, got one with x$"),
        ({}, ValueError, "got one with nothing"),
        ({"x": 1, "y": 2, "z": 3}, ValueError, "got one with x, y, z"),
    ],
)
def test_a_joint_transform_of_a_dict_that_returns_no_such_dict_is_an_error(made: Any, kind: Any, error: str) -> None:
    with pytest.raises(kind, match=error):
        PairedDataset(x="ab", y="cd", joint_transform=lambda _: made)[0]


def test_a_joint_transform_that_raises_stop_iteration_does_not_shorten_the_batch() -> None:
    def stop(*_: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        PairedDataset("ab", "cd", joint_transform=stop).__getitems__([0, 1])


# -- delivered by loaders --------------------------------------------------------------------------------------


def labels(batch: Any) -> list[int]:
    """The labels of a batch of (Inputs, Targets), after a look at whether they belong to the inputs."""
    x, y = batch
    assert x[:, 0].tolist() == x[:, -1].tolist() == y["label"].tolist() == y["mask"][:, 5].tolist()
    return list(y["label"].tolist())


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_samplers_and_early_breaks_part_nothing(workers: int) -> None:
    pairs = PairedDataset(AtOnce(30), Targets(30))
    weighted = WeightedRandomSampler([1.0, *[0.1] * 29], 40)
    with DataLoader(pairs, 4, sampler=weighted, num_workers=workers) as loader:
        for stop in (1, 3, 99):
            kept = [batch for batch, _ in zip(loader, range(stop))]
            assert len([label for batch in kept for label in labels(batch)]) == 4 * min(stop, 10)


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_halves_of_a_distributed_sampler_are_pairs_and_together_all(workers: int) -> None:
    pairs = PairedDataset(Inputs(20), Targets(20))
    seen: list[int] = []
    for rank in range(2):
        sampler: Any = DistributedSampler(pairs, 2, rank, seed=3)
        sampler.set_epoch(1)
        for batch in DataLoader(pairs, 4, sampler=sampler, num_workers=workers):
            seen += labels(batch)
    assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_shorter_side_repeats_under_workers(workers: int) -> None:
    pairs = PairedDataset(Inputs(20), Rows(6), cycle="targets")
    for x, (row, index) in DataLoader(pairs, 4, shuffle=True, num_workers=workers):
        assert (x[:, 0] % 6).tolist() == row[:, 0].tolist() == index.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_pairs_in_subsets_splits_and_concatenations_are_pairs(workers: int) -> None:
    pairs = PairedDataset(AtOnce(20), Targets(20))
    left, right = random_split(pairs, [12, 8], torch.Generator().manual_seed(1))
    joined: Any = ConcatDataset([right, left, Subset(pairs, [0, -1])])
    seen = [label for batch in DataLoader(joined, 3, shuffle=True, num_workers=workers) for label in labels(batch)]
    assert sorted(seen) == sorted([*range(20), 0, 19])
    assert isinstance(pairs + pairs, ConcatDataset)
    nested = PairedDataset(pairs, Targets(20))
    assert nested[7][1]["label"] == nested[7][0][1]["label"] == 7


@pytest.mark.slow
def test_spawned_workers_get_pairs_with_all_their_options() -> None:
    pairs = PairedDataset(a=Ramp(12), b=Ramp(3), joint_transform=crop_all, cycle="b")
    for batch in DataLoader(pairs, 4, shuffle=True, num_workers=1, multiprocessing_context="spawn"):
        a, b = batch["a"], batch["b"]
        assert torch.equal(a % 2000, b % 2000)
        assert torch.equal((a // 2000) % 3, b // 2000)


def test_copies_are_pairs_with_all_their_options() -> None:
    pairs = PairedDataset[Any](Ramp(6), Ramp(3), joint_transform=crop, cycle="targets", collate=(None, list))
    for again in (copy.copy(pairs), copy.deepcopy(pairs), pickle.loads(pickle.dumps(pairs))):
        assert type(again) is type(pairs)
        assert (again.cycle, again.joint_transform, again.collate_fn) == (("targets",), crop, pairs.collate_fn)
        assert len(again) == 6
        x, y = again[-1]
        assert torch.equal(x % 2000, y % 2000)


# -- why -------------------------------------------------------------------------------------------------------


class Noisy(Inputs):
    """Draws one number more for each item, from the generator that shuffles."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        super().__init__(count)
        self.generator = generator

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand((), generator=self.generator) / 2


def test_two_loaders_with_equal_seeds_part_the_pairs_once_one_side_draws_a_number_more() -> None:
    """The recipe that pairs are to replace: it holds for one epoch."""

    def two(kind: Callable[[torch.Generator], Any]) -> list[bool]:
        left, right = (torch.Generator().manual_seed(0) for _ in range(2))
        inputs = torch.utils.data.DataLoader(kind(left), 5, shuffle=True, generator=left)
        targets = torch.utils.data.DataLoader(range(20), 5, shuffle=True, generator=right)  # type: ignore[arg-type]
        # As lists: zip() leaves the second loader before its sampler's last draw, which parts them even without noise.
        return [all(torch.equal(x.long(), y) for x, y in zip(list(inputs), list(targets))) for _ in range(3)]

    assert two(lambda _: range(20)) == [True, True, True]
    assert two(lambda generator: Noisy(20, generator)) == [True, False, False]

    generator = torch.Generator().manual_seed(0)
    pairs: Any = PairedDataset(Noisy(20, generator), range(20))
    loader = DataLoader(pairs, 5, shuffle=True, generator=generator)
    assert [all(torch.equal(x.long(), y) for x, y in loader) for _ in range(3)] == [True, True, True]
