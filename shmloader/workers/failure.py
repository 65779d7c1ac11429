"""A worker's error on its way to the main process, in torch's form: "Caught X in DataLoader worker process N."."""

from __future__ import annotations

import pickle

from torch._utils import ExceptionWrapper

from shmloader.memory import codec


def pack_failure(error: ExceptionWrapper) -> bytes:
    """The error's class, traceback text and origin, as bytes; whatever its size."""
    try:
        kind = pickle.dumps(error.exc_type)
    except Exception:
        kind = b""  # a class that cannot be found by its name
    return codec.pack((kind, error.exc_type.__name__, error.exc_msg, error.where))


def unpack_failure(body: bytes) -> BaseException:
    """The error as torch raises it: of its own class if one text is enough to build it, else a RuntimeError."""
    kind, name, text, where = codec.unpack(body)
    message = f"Caught {name} {where}.\nOriginal {text}"
    try:
        wrapper = ExceptionWrapper((pickle.loads(kind), None, None), where)
    except Exception:
        return RuntimeError(message)
    wrapper.exc_msg = text
    try:
        wrapper.reraise()
    except Exception as error:
        if isinstance(error, (wrapper.exc_type, RuntimeError)):
            return error.with_traceback(None)
        # A class with a `message` attribute and a constructor of its own: torch calls it wrongly and hides the cause.
        hidden = RuntimeError(message)
        hidden.__cause__ = error.with_traceback(None)
        return hidden
    raise AssertionError("reraise() raises")
