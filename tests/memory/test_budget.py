"""Limits as people write them, the default budget, and slot capacities."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmloader.memory.budget import (
    CLASSES_PER_OCTAVE,
    MIB,
    PAGE_BYTES,
    check_slots,
    default_budget,
    parse_memory_limit,
    size_class,
)

GIB = 1 << 30


def not_asked() -> int:
    raise AssertionError("available memory was read without need")


# ---- memory_limit ----


@pytest.mark.parametrize(
    ("limit", "size_bytes"),
    [
        (None, None),
        (MIB, MIB),
        (np.int64(3 * MIB), 3 * MIB),
        (10**15, 10**15),
        ("512MiB", 512 * MIB),
        ("512mib", 512 * MIB),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5 GiB", 3 * GIB // 2),
        (".5GiB", GIB // 2),
        ("2048kB", 2_048_000),
        ("2048KB", 2_048_000),
        ("2048KiB", 2 * MIB),
        ("1TB", 10**12),
        ("1 TiB", 1 << 40),
        ("1048576B", MIB),
        ("\t64 MB\n", 64 * 10**6),
        ("0.1GB", 10**8),
        ("0.07GiB", 7 * GIB // 100),
        ("1.0000000001MiB", MIB),
    ],
)
def test_limit_is_read_exactly(limit: object, size_bytes: int | None) -> None:
    assert parse_memory_limit(limit, not_asked) == size_bytes


@pytest.mark.parametrize(
    ("limit", "size_bytes"),
    [("25%", GIB), ("100%", 4 * GIB), (" 12.5 % ", GIB // 2), ("33.3%", 4 * GIB * 333 // 1000)],
)
def test_a_share_is_of_what_is_available(limit: str, size_bytes: int) -> None:
    assert parse_memory_limit(limit, lambda: 4 * GIB) == size_bytes


@pytest.mark.parametrize(
    "limit",
    ["2 bananas", "", " ", "12", "1e9", "-1GB", "+1GB", "1,5GB", "1GB 2", "GB", "%", "1 G", "1ib", "nan%", "1..5GB",
     "\uff11GB", "1\u212ab", "9" * 5000 + "GB", "0x10MB", "1_000MB"],
)  # fmt: skip
def test_text_that_is_no_size_is_refused_with_the_accepted_forms(limit: str) -> None:
    with pytest.raises(ValueError, match=r"is no size; it must be an int .*'512MiB'.*'25%'.*None"):
        parse_memory_limit(limit, not_asked)


@pytest.mark.parametrize("limit", ["0%", "0.0%", "101%", "100.001%"])
def test_a_share_outside_its_range_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match="above 0% and at most 100%"):
        parse_memory_limit(limit, not_asked)


@pytest.mark.parametrize("limit", [True, False, 1.5, 2.0**30, b"1GB", [1], {}, 1j])
def test_other_types_are_refused_with_the_accepted_forms(limit: object) -> None:
    with pytest.raises(TypeError, match=r"memory_limit must be an int .*'512MiB'.*'25%'.*None.*; got "):
        parse_memory_limit(limit, not_asked)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (512, "did you mean '512MiB'?"),
        (10_000, "did you mean '10000MiB'?"),
        (65_536, "did you mean '65536KiB'?"),
        (MIB - 1, "did you mean"),
        (0, "must be positive"),
        (-5, "must be positive"),
    ],
)
def test_a_bare_small_number_is_refused_with_a_unit_to_try(limit: int, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_memory_limit(limit, not_asked)


@pytest.mark.parametrize("limit", ["64kB", "0MB", "1MB", "0.9MiB", "1B"])
def test_a_size_below_one_mebibyte_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=r"is \d+ bytes; it must be 1 MiB or more"):
        parse_memory_limit(limit, not_asked)


def test_a_share_below_one_mebibyte_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"'1%' of the 2097152 bytes available now is 20971 bytes"):
        parse_memory_limit("1%", lambda: 2 * MIB)


@given(number=st.integers(1, 10**6), unit=st.sampled_from(["MB", "MiB", "GB", "GiB", "TB", "TiB"]), space=st.booleans())
def test_every_written_size_is_read_back(number: int, unit: str, space: bool) -> None:
    base, power = (1024 if "i" in unit else 1000), "KMGT".index(unit[0]) + 1
    text = f"{number + 1}{' ' * space}{unit}"
    assert parse_memory_limit(text, not_asked) == (number + 1) * base**power


@given(st.text("0123456789.%kKMmGgTtIiBb +-e_", max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    size_bytes: int | None = MIB
    with contextlib.suppress(ValueError):
        size_bytes = parse_memory_limit(text, lambda: GIB)
    assert size_bytes is not None
    assert size_bytes >= MIB


# ---- default budget and slots ----


def test_default_budget_is_half_of_what_is_available() -> None:
    assert default_budget(8 * GIB, 1) == 4 * GIB


def test_default_budget_is_shared_among_ranks_in_whole_pages() -> None:
    budget = default_budget(8 * GIB, 3)
    assert budget % PAGE_BYTES == 0
    assert 0 <= 4 * GIB - 3 * budget < 3 * PAGE_BYTES + 3


def test_default_budget_is_never_less_than_one_mebibyte() -> None:
    assert default_budget(0, 1) == default_budget(8 * MIB, 64) == MIB


@pytest.mark.parametrize("slots", [None, 1, 2, 1000, np.int32(4)])
def test_positive_slots_are_accepted(slots: object) -> None:
    checked = check_slots(slots)
    assert checked == slots
    assert checked is None or type(checked) is int


@pytest.mark.parametrize(
    ("slots", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("4", TypeError), ([], TypeError)],
)
def test_slots_that_are_no_positive_int_are_refused(slots: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="slots must be"):
        check_slots(slots)


# ---- capacities ----

SIZES = st.one_of(
    st.integers(0, 1 << 46),
    st.builds(lambda power, offset: max(0, (1 << power) + offset), st.integers(0, 46), st.integers(-2, 2)),
)


@given(SIZES)
def test_capacity_holds_the_batch_and_wastes_less_than_an_eighth_or_a_page(nbytes: int) -> None:
    capacity = size_class(nbytes)
    assert capacity >= max(nbytes, PAGE_BYTES)
    assert capacity % PAGE_BYTES == 0
    assert capacity - nbytes < max(PAGE_BYTES, nbytes / 8) or nbytes == 0


@given(SIZES)
def test_capacity_of_a_capacity_is_itself(nbytes: int) -> None:
    assert size_class(size_class(nbytes)) == size_class(nbytes)


@given(SIZES, SIZES)
def test_capacity_grows_with_the_batch(one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert size_class(small) <= size_class(large)


@given(st.integers(16, 40), st.lists(st.floats(0, 1, exclude_max=True), max_size=50))
def test_capacities_are_few_per_power_of_two(power: int, places: list[float]) -> None:
    octave = 1 << power
    capacities = {size_class(octave + 1 + int(place * (octave - 1))) for place in places}
    assert len(capacities) <= CLASSES_PER_OCTAVE


def test_nine_thousand_ragged_sizes_need_few_capacities() -> None:
    capacities = {size_class(100_000 + 997 * step) for step in range(9_000)}
    assert len(capacities) <= 7 * CLASSES_PER_OCTAVE


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        size_class(-1)
