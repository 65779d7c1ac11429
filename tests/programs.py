"""Other processes to test with: small programs in an interpreter of their own, and functions in a forked child.

Both run in a session of their own, so that whatever they leave behind is found by its session, whoever adopted it;
both are killed after a bound, so that a hang is a failure and never a wait.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.forkserver
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAUSE_S = 0.01  # between two looks at /proc


# -- processes in general -----------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _stat(pid)[0] not in ("", "Z", "X")


def session_members(session: int) -> list[int]:
    """Running processes of a session."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if alive(pid) and _stat(pid)[3] == str(session)]


def all_gone(pids: Iterable[int], within_s: float) -> bool:
    """Wait until none of the processes runs any more; False if one still does after ``within_s``."""
    left = list(pids)
    deadline = time.monotonic() + within_s
    while left := [pid for pid in left if alive(pid)]:
        if time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_S)
    return True


def children() -> set[int]:
    """Children of this process, zombies included."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread ended: its children are another's
            tasks = list(Path("/proc/self/task").iterdir())
            return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def descriptors() -> int:
    """Number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Number of mappings of this process."""
    return Path("/proc/self/maps").read_text().count("\n")


def private_bytes(pid: int) -> int:
    """Memory that a process has to itself: what would come free if it ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _kill_session(leader: int, reaped: bool) -> None:
    """Kill what is left of a session. Once its leader is reaped, that number may be somebody else's."""
    for pid in {*session_members(leader), *(() if reaped else (leader,))}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the state is empty where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ["", "", "", ""]
    return text.rpartition(") ")[2].split()


# -- programs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a program."""

    code: int  #: exit code, or minus the signal's number
    out: str
    err: str
    left: tuple[int, ...]  #: processes of its session that still ran a second after its end


class Program:
    """A program in an interpreter of its own, running.

    Args:
        source: its text, which can import shmloader and tests; or the path of a script.
        before: command that the interpreter is started with, such as ``unshare``.
        nursery: where it is born, in a tenth of the time; None: in a fresh interpreter.
        timeout_s: it is killed after this, which fails the test.
    """

    def __init__(
        self,
        source: str | Path,
        *args: str,
        before: tuple[str, ...] = (),
        nursery: Nursery | None = None,
        timeout_s: float = 40.0,
    ) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._folder = tempfile.TemporaryDirectory()
        script = source if isinstance(source, Path) else Path(self._folder.name) / "program.py"
        if isinstance(source, str):
            script.write_text(textwrap.dedent(source))
        self._err = open(Path(self._folder.name) / "err", "w+")  # noqa: SIM115 - closed in __exit__
        self._read_end, write_end = os.pipe()
        argv = [str(script), *args]
        if nursery:
            born = nursery.fork(argv, write_end, self._err.fileno())
        else:
            born = started([*before, sys.executable, *argv], write_end, self._err.fileno())
        #: The interpreter's process, which is also its session.
        self.pid, self._wait = born
        os.close(write_end)
        self._out = b""
        self._reaped = False

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _kill_session(self.pid, self._reaped)
        self._wait(10.0)
        os.close(self._read_end)
        if kind is not None:
            self._err.seek(0)
            print(self._err.read(), file=sys.stderr)
        self._err.close()
        self._folder.cleanup()

    def members(self) -> list[int]:
        """Everything that runs in its session."""
        return session_members(self.pid)

    def wait_for(self, line: str) -> str:
        """What it has printed once it has printed ``line``."""
        wanted = line.encode() + b"\n"
        while wanted not in self._out:
            assert self._read(), f"the program ended without printing {line!r}: {self._out!r}"
        return self._out.decode()

    def finish(self) -> Outcome:
        """Wait for its end, and look a second later for what is left."""
        while self._read():
            pass
        code = self._wait(max(0.1, self._deadline - time.monotonic()))
        self._reaped = True
        members = self.members()
        all_gone(members, 1.0)
        self._err.seek(0)
        return Outcome(code, self._out.decode(), self._err.read(), tuple(pid for pid in members if alive(pid)))

    def _read(self) -> bytes:
        left = self._deadline - time.monotonic()
        ready, _, _ = select.select([self._read_end], [], [], max(0.0, left))
        if not ready:
            pytest.fail(f"the program hangs; it has printed {self._out!r}")
        piece = os.read(self._read_end, 1 << 16)
        self._out += piece
        return piece


def run(source: str | Path, *args: str, timeout_s: float = 40.0, **how: Any) -> Outcome:
    """Run a program to its end."""
    with Program(source, *args, timeout_s=timeout_s, **how) as program:
        return program.finish()


def started(
    command: list[str], out: int | None, err: int | None = None, **how: Any
) -> tuple[int, Callable[[float], int]]:
    """A fresh process's pid, and what waits for its exit code."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": ""},
        cwd=ROOT,
        start_new_session=True,
        **how,
    )
    return process.pid, process.wait


class Nursery:
    """The other end of ``tests/nursery.py``: programs that begin where torch and we are imported, one at a time.

    What a program's interpreter imports first, or how, cannot be tested so; its exit can.
    """

    def __init__(self) -> None:
        self._line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, str(ROOT / "tests" / "nursery.py"), str(other.fileno())]
            _, self._ended = started(command, None, pass_fds=[other.fileno()])
        self._code: int | None = None

    def fork(self, argv: list[str], out: int, err: int) -> tuple[int, Callable[[float], int]]:
        """A program's pid, and what waits for its exit code."""
        self._code = None
        socket.send_fds(self._line, [json.dumps(argv).encode()], [out, err])
        self._line.settimeout(40.0)  # the first has to wait for the imports
        return int(self._line.recv(64)), self._wait

    def close(self) -> None:
        """End it."""
        self._line.close()
        self._ended(10.0)

    def _wait(self, timeout_s: float) -> int:
        if self._code is None:
            self._line.settimeout(timeout_s)
            self._code = int(self._line.recv(64))
        return self._code


# -- functions in a forked child ----------------------------------------------------------------------------------


class Teller:
    """The child's end of the line to the test."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def tell(self, thing: Any) -> None:
        """Send one picklable thing to the test."""
        data = pickle.dumps(thing)
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            view = view[os.write(self.fd, view) :]


class Forked:
    """``function(teller, *args)`` in a forked child, running. Its exceptions are raised in the test, as text."""

    def __init__(self, function: Callable[..., None], *args: Any, timeout_s: float = 40.0) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(function, Teller(write_end), args, timeout_s)
        os.close(write_end)
        self._reaped = False

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._read_end)
        _kill_session(self.pid, self._reaped)
        self.reap()

    def hear(self) -> Any:
        """The next thing that the child tells."""
        thing = pickle.loads(self._take(int.from_bytes(self._take(8), "little")))
        if isinstance(thing, _Failure):
            pytest.fail(f"in the forked child:\n{thing.text}")
        return thing

    def kill(self) -> None:
        """End it by SIGKILL, and reap it."""
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for its end."""
        if not self._reaped:
            os.waitpid(self.pid, 0)
            self._reaped = True

    def _take(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            ready, _, _ = select.select([self._read_end], [], [], max(0.0, self._deadline - time.monotonic()))
            if not ready:
                pytest.fail("the forked child hangs")
            piece = os.read(self._read_end, nbytes - len(data))
            if not piece:
                pytest.fail("the forked child ended without a word")
            data += piece
        return data


@dataclass(frozen=True)
class _Failure:
    text: str


def _be_child(function: Callable[..., None], teller: Teller, args: tuple[Any, ...], timeout_s: float) -> None:
    """Everything that the child does; never returns to the test's code."""
    try:
        os.setsid()
        forget_fork_server()
        # The test's own timer is not inherited, its handler is.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(timeout_s) + 1)
        function(teller, *args)
    except BaseException:
        teller.tell(_Failure(traceback.format_exc()))
    finally:
        os._exit(0)


def forget_fork_server() -> None:
    """Let multiprocessing start a fork server of this child's own, to die with it; the test's is no child of it."""
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server.__init__()  # type: ignore[misc]


def told_by(function: Callable[..., None], *args: Any, timeout_s: float = 40.0) -> Any:
    """Run ``function(teller, *args)`` in a forked child until it has told one thing; that thing."""
    with Forked(function, *args, timeout_s=timeout_s) as child:
        return child.hear()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer."""
    started = time.monotonic()
    yield
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.2f} s, longer than {seconds} s"
