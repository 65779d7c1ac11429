"""A job that leaves a process behind, in a session of its own."""

from __future__ import annotations

import subprocess

if __name__ == "__main__":
    subprocess.Popen(["sleep", "60"], start_new_session=True)
