"""An interpreter that has imported torch and us, and forks a child for each program that it is asked for.

It is run as a script, by :class:`tests.programs.Nursery`. The child leaves the loop below and becomes the program: its
main module, its arguments, its session, and from the program's last line on the interpreter's ordinary exit.
"""

from __future__ import annotations

import json
import os
import socket
import sys

import shmloader  # noqa: F401 - what takes most of a program's time
import tests.datasets
import tests.equal
import tests.faulty  # noqa: F401


def next_program() -> str:
    """Serve until this process is a program itself; its file."""
    line = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, fds, _, _ = socket.recv_fds(line, 1 << 16, 2)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        line.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())
    line.close()
    os.setsid()
    for fd, standard in zip(fds, (1, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    sys.argv[:] = json.loads(request)
    sys.path[0] = os.path.dirname(sys.argv[0])
    return sys.argv[0]


if __name__ == "__main__":
    __file__ = next_program()
    with open(__file__) as file:
        source = file.read()
    exec(compile(source, __file__, "exec"))
