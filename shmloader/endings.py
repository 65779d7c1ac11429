"""How iterators end when nobody ends them: finalizers, forks, and the interpreter's exit."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from types import FrameType
from typing import Protocol


class Ending(Protocol):
    """What has workers to end."""

    def _shutdown_workers(self) -> None: ...

    def _disown(self) -> None: ...

    def _elsewhere(self) -> bool: ...


#: Iterators with workers.
_live: weakref.WeakSet[Ending] = weakref.WeakSet()
#: Iterators whose finalizer ran in the middle of a pump of the same thread.
_orphans: deque[Ending] = deque()
_pumping = threading.local()


def register(iterator: Ending) -> None:
    """From now on, see to it that ``iterator`` ends with the interpreter, and is left alone in forked children."""
    _live.add(iterator)


def enter() -> bool:
    """The caller pumps in this thread: until :func:`leave`, finalizers only post. Pass on what this returns."""
    outermost = not pumping()
    if outermost:
        frame = sys._getframe(1)
        _pumping.holder = id(frame), frame.f_code
    return outermost


def pumping() -> bool:
    """Whether a pump runs in this thread.

    An exception from a signal handler may keep a pump from ever saying that it has left: it is then not among the
    callers any more. Taken for one that runs, it would keep every finalizer to come from ending anything.
    """
    holder = getattr(_pumping, "holder", None)
    if holder is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (id(frame), frame.f_code) == holder:
            return True
        frame = frame.f_back
    return False


def leave(outermost: bool) -> None:
    """The pump is through; what was posted meanwhile ends now."""
    if outermost:
        _pumping.holder = None
        if _orphans:
            _serve_orphans()


def finalize(iterator: Ending) -> None:
    """Nobody refers to ``iterator`` any more: end it, now, or when the pump that this came in the middle of is through.

    A finalizer may run between any two steps of another iterator's pump, and ending workers takes steps of its own.
    """
    if pumping():
        _orphans.append(iterator)
    else:
        iterator._shutdown_workers()


def _serve_orphans() -> None:
    with contextlib.suppress(IndexError):
        while True:
            orphan = _orphans.popleft()
            try:
                orphan._shutdown_workers()
            except BaseException:
                _orphans.append(orphan)
                raise


def _disown_all() -> None:
    # In a forked child a next() would read, from the very same channels, the answers that the parent waits for.
    for iterator in tuple(_live):
        iterator._disown()


os.register_at_fork(after_in_child=_disown_all)


@atexit.register
def _shut_down_all() -> None:
    """Before multiprocessing's own hook, and while modules are still whole: nothing may be left to finalizers."""
    _serve_orphans()
    for iterator in tuple(_live):
        # A daemon thread runs on until the interpreter is gone: pulling the workers from under it would make it print
        # an error. They end by themselves with the process.
        if not iterator._elsewhere():
            iterator._shutdown_workers()
