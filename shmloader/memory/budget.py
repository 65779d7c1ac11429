"""How many bytes the slot pool may take, how many slots, and how large a slot is."""

from __future__ import annotations

import mmap
import operator
import re
from collections.abc import Callable

MIB = 1 << 20
LEAST_LIMIT_BYTES = MIB  # less holds no useful pool; a smaller number is nearly always one whose unit was forgotten
PAGE_BYTES = mmap.PAGESIZE  # pages are what can be reserved and given back; 4096 on most machines
DEFAULT_SHARE = 2  # the default budget is one part in this many of what is available: the rest is the training's
CLASSES_PER_OCTAVE = 8  # slot capacities per power of two: bounds waste (1/8) and the number of ctypes array types
LARGEST_MIB_GUESS = 10_000  # a number without a unit up to here was probably meant in MiB, above it in KiB

UNITS_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
ACCEPTED = (
    "an int (bytes), text with a unit (B, kB, MB, GB, TB or KiB, MiB, GiB, TiB) such as '512MiB' or '1.5 GB', "
    "a share of the available memory such as '25%', or None for the default"
)
# Bounded digits: Python refuses to read thousands of them, with a message about something else.
_LIMIT_TEXT = re.compile(r"\s*(\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})\s*(%|[kmgt]?i?b)\s*", re.ASCII | re.IGNORECASE)


def parse_memory_limit(limit: object, available: Callable[[], int]) -> int | None:
    """The user's ``memory_limit`` in bytes.

    Args:
        limit: None, bytes as an int, text with a unit (decimal ``kB MB GB TB``, binary ``KiB MiB GiB TiB``, ``B``, in
            upper or lower case), or a share of the available memory (``"25%"``). Fractions of a byte are dropped.
        available: gives the available memory in bytes; called only for a share.

    Returns:
        Bytes, at least 1 MiB, or None for None.

    Raises:
        TypeError: ``limit`` is neither None, int nor str (a bool is no int here).
        ValueError: it reads as no size, or as less than 1 MiB.
    """
    if limit is None:
        return None
    if isinstance(limit, str):
        return _parse_text(limit, available)
    if isinstance(limit, bool) or not hasattr(limit, "__index__"):
        raise TypeError(f"memory_limit must be {ACCEPTED}; got {limit!r}")
    size_bytes = operator.index(limit)
    if size_bytes < LEAST_LIMIT_BYTES:
        raise ValueError(_too_small(size_bytes))
    return size_bytes


def _parse_text(text: str, available: Callable[[], int]) -> int:
    match = _LIMIT_TEXT.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit not in UNITS_BYTES and unit != "%"):
        raise ValueError(f"memory_limit={text!r} is no size; it must be {ACCEPTED}")
    # Exact, as an int over a power of ten: as a float, '0.07GiB' may come out a byte off.
    whole, _, decimals = match[1].partition(".")
    number = int(whole + decimals)
    scale: int = 10 ** len(decimals)
    if unit != "%":
        size_bytes, note = number * UNITS_BYTES[unit] // scale, ""
    elif 0 < number <= 100 * scale:
        whole_bytes = available()
        size_bytes, note = number * whole_bytes // (100 * scale), f" of the {whole_bytes} bytes available now"
    else:
        raise ValueError(f"memory_limit={text!r} must be above 0% and at most 100% of the available memory")
    if size_bytes < LEAST_LIMIT_BYTES:
        raise ValueError(f"memory_limit={text!r}{note} is {size_bytes} bytes; it must be 1 MiB or more")
    return size_bytes


def _too_small(size_bytes: int) -> str:
    if size_bytes < 1:
        return f"memory_limit={size_bytes} must be positive; it may be {ACCEPTED}"
    unit = "MiB" if size_bytes <= LARGEST_MIB_GUESS else "KiB"
    return (
        f"memory_limit={size_bytes} means {size_bytes} bytes, less than the least pool of 1 MiB; "
        f"did you mean '{size_bytes}{unit}'?"
    )


def default_budget(available_bytes: int, ranks: int) -> int:
    """Bytes for the pool without a ``memory_limit``: half of what is available, shared among ``ranks`` local ranks.

    Rounded down to whole pages, at least 1 MiB.
    """
    share_bytes = available_bytes // DEFAULT_SHARE // ranks
    return max(LEAST_LIMIT_BYTES, share_bytes // PAGE_BYTES * PAGE_BYTES)


def check_slots(slots: object) -> int | None:
    """The user's ``slots`` as a plain int, or None for as many as the loader finds useful.

    Raises:
        TypeError: it is not an int (a bool is not).
        ValueError: it is below 1.
    """
    if slots is None:
        return None
    if isinstance(slots, bool) or not hasattr(slots, "__index__"):
        raise TypeError(f"slots must be an int of 1 or more, or None; got {slots!r}")
    count = operator.index(slots)
    if count < 1:
        raise ValueError(f"slots must be 1 or more, or None to let the loader choose; got {count}")
    return count


def size_class(nbytes: int) -> int:
    """The capacity in bytes of a slot for a batch of ``nbytes``.

    Rounded up to a multiple of an eighth of the largest power of two not above ``nbytes``, and to whole pages: batches
    of many different sizes share few capacities, and less than an eighth (or a page) of a slot is wasted.

    Raises:
        ValueError: ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"a batch cannot have {nbytes} bytes")
    octave = 1 << max(0, nbytes.bit_length() - 1)
    step = max(PAGE_BYTES, octave // CLASSES_PER_OCTAVE)
    return max(step, -(-nbytes // step) * step)
