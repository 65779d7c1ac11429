"""Whether a device graph may have been captured over a slot: every replay of such a graph reads the slot again.

What is seen are captures through torch's own classes (``torch.cuda.CUDAGraph``, which ``torch.cuda.graph``,
``make_graphed_callables`` and ``torch.compile`` use, and ``torch.accelerator.Graph``), and any capture that is under
way on the calling thread's current stream. A capture that begins and ends in foreign code is not.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: What :func:`mark` says while a capture is under way.
UNDER_WAY = -1

#: The graphs that are being captured, by id: one that is dropped in the middle stays, which errs on the safe side.
_under_way: set[int] = set()
_begun = 0
_watching: set[type] = set()
#: Held while a capture begins, and by what would break one that is under way. Reentrant: a signal handler may come.
_beginning = threading.RLock()


def watch() -> bool:
    """From now on, know of captures; whether that can be had. Safe to call again."""
    watched = [_watch_class(kind) for kind in _graph_classes()]
    return all(watched)


def count() -> int:
    """How many captures have begun since :func:`watch`."""
    return _begun


def active() -> bool:
    """Whether any capture is under way."""
    return bool(_under_way) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def mark() -> int:
    """This moment, for :func:`since`."""
    return UNDER_WAY if active() else _begun


def since(moment: int) -> bool:
    """Whether a capture was under way at ``moment``, or has begun since."""
    return moment != _begun


@contextmanager
def held_off() -> Iterator[bool]:
    """Inside, no capture begins in another thread; says whether there is none under way."""
    with _beginning:
        yield not active()


def _graph_classes() -> list[type]:
    other = getattr(torch.accelerator, "Graph", None)
    return [torch.cuda.CUDAGraph] + ([other] if isinstance(other, type) else [])


def _watch_class(kind: type) -> bool:
    if kind in _watching:
        return True
    try:
        begin, end = vars(kind)["capture_begin"], vars(kind)["capture_end"]
        kind.capture_begin, kind.capture_end = _beginner(begin), _ender(end)  # type: ignore[attr-defined]
    except (KeyError, TypeError, AttributeError):  # a class that lets nobody in
        return False
    _watching.add(kind)
    return True


def _beginner(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        global _begun
        with _beginning:
            _under_way.add(id(graph))
            _begun += 1
        try:
            return begin(graph, *args, **kwargs)
        except BaseException:
            _under_way.discard(id(graph))
            raise

    return capture_begin


def _ender(end: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(end)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(graph, *args, **kwargs)
        finally:
            _under_way.discard(id(graph))  # also after an error, which ends the capture

    return capture_end


def _forget() -> None:
    # In a forked child nothing is captured, and the thread that held the lock may not be there.
    global _beginning
    _beginning = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)
