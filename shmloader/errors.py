"""Every exception and warning class, sorted by who must act.

Errors that a data set or a collate function raises are not here: they arrive as their own class, as torch's loader
delivers them ("Caught X in DataLoader worker process N.").
"""

from __future__ import annotations

# -- whoever configured the loader ------------------------------------------------------------------------------


class BatchTooLargeError(RuntimeError):
    """One batch needs more bytes than ``memory_limit`` allows.

    Raise ``memory_limit`` to at least the size in the message, or make the batch smaller; other batches go on.
    """


class PoolMemoryError(MemoryError):
    """The machine, or the container, has too little memory left for the slot pool.

    Lower ``memory_limit``, ``prefetch_factor`` or ``num_workers``, or give the container more memory.
    """


# -- whoever wrote the data set or the collate function ---------------------------------------------------------


class UnpicklableBatchError(RuntimeError):
    """A batch holds something that cannot be sent to another process; the message says where in the batch.

    Return plain data from the collate function (``detach()`` tensors, open files and locks in the worker only).
    """


# -- whoever runs the job ---------------------------------------------------------------------------------------


class WorkerDiedError(RuntimeError):
    """A worker process ended without being told to; the message names the process and the signal or exit code.

    Look for the out-of-memory killer or a crash in native code; ``num_workers=0`` shows it in this process.
    """


class IteratorBrokenError(RuntimeError):
    """An exception (a Ctrl-C, a signal handler) cut an earlier ``next()`` short between two steps of its own.

    Batches may be missing from this iterator, so it refuses to go on; call ``iter(loader)`` again.
    """


# -- whoever maintains shmloader --------------------------------------------------------------------------------


class ProtocolError(RuntimeError):
    """A slot or a worker was asked for a step that its transition table does not have.

    This is a defect of shmloader; please report the message.
    """


# -- warnings ---------------------------------------------------------------------------------------------------


class PoolWarning(UserWarning):
    """The pool could not hold a batch that the consumer or the budget left no room for; it took a slower way.

    Hold fewer batches, or raise ``memory_limit`` or ``slots``.
    """


class SeedingWarning(UserWarning):
    """A data set holds a random generator object of its own, which ``seeding="batch"`` cannot reseed.

    Draw from ``torch``, ``random`` or ``numpy.random`` instead, or build the generator inside ``__getitem__``.
    """


class PlatformWarning(UserWarning):
    """The slot pool cannot be had here, and the work is done in another way that gives the same batches.

    Without anonymous shared files (other systems than Linux) torch's own loader does it; in a daemonic process, such as
    another loader's worker, which may have no children, it is done in that process itself; where the system refuses to
    page-lock memory, copies to a device take a longer way. Nothing has to be changed.
    """
