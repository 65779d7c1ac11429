"""Exits: of forked children, and of the interpreter with a loader in any state."""

from __future__ import annotations

import os
import signal

import pytest

from tests.programs import Nursery, Program, run, within

# -- 22: forks that exit normally -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["exit", "_exit", "process"])
def test_a_child_that_exits_leaves_its_parents_workers_alone(nursery: Nursery, way: str) -> None:
    outcome = run(
        """
        import multiprocessing, os, sys
        from shmloader import DataLoader
        from tests.faulty import Numbers

        way = sys.argv[1]
        iterator = iter(DataLoader(Numbers(40), num_workers=2))
        next(iterator)
        if way == "process":
            process = multiprocessing.get_context("fork").Process(target=print, args=("in the child",))
            process.start()
            process.join()
        elif (child := os.fork()) == 0:
            (sys.exit if way == "exit" else os._exit)(0)
        else:
            assert os.waitpid(child, 0)[1] == 0
        assert [int(batch[0, 0]) for batch in iterator] == list(range(1, 40))
        print("done", flush=True)
        """,
        way,
        nursery=nursery,
    )
    assert (outcome.code, outcome.err, outcome.left) == (0, "", ())
    assert outcome.out.endswith("done\n")


# -- 24: the interpreter's exit -------------------------------------------------------------------------------------


EXITS = {
    "persistent, mid-epoch": "iterator = iter(source); next(iterator)",
    "with held batches": "held = [batch for batch in source]; kept = held[0].numpy()",
    "held by a cycle": "iterator = iter(source); cycle = [iterator]; cycle.append(cycle); del iterator, cycle",
    "held by a module": "import json; json.iterator = iter(source); json.batch = next(json.iterator)",
    "in an exception": "iterator = iter(source); next(iterator); raise SystemExit(0)",
    # Of numbers, not of tensors: torch gives up the interpreter's lock while it frees one, and a daemon thread that
    # wants it back when the interpreter has ended is unwound through torch's destructors, which aborts the process.
    "in a daemon thread": (
        "import threading, time\\n"
        "source = DataLoader(range(40), num_workers=2, collate_fn=tuple)\\n"
        "def work():\\n"
        "    while True:\\n"
        "        for batch in source: print(end='')\\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start(); time.sleep(0.3)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("situation", "method"),
    [*((situation, "fork") for situation in EXITS), ("persistent, mid-epoch", "forkserver")],
)
def test_the_interpreters_exit_is_silent_and_leaves_no_process(nursery: Nursery, situation: str, method: str) -> None:
    outcome = run(
        f"""
        import sys
        from shmloader import DataLoader
        from tests.faulty import Numbers

        if __name__ == "__main__":
            source = DataLoader(
                Numbers(40), num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[2]
            )
            exec({EXITS[situation]!r}.replace("\\\\n", "\\n"))
        """,
        situation,
        method,
        nursery=nursery if method == "fork" else None,
    )
    assert outcome.err == ""
    assert (outcome.code, outcome.left) == (0, ())


@pytest.mark.slow
def test_an_uncaught_error_ends_the_program_with_one_traceback(nursery: Nursery) -> None:
    outcome = run(
        """
        from shmloader import DataLoader
        from tests.faulty import Trap

        for batch in DataLoader(Trap("raise", "fetch"), num_workers=2, persistent_workers=True):
            pass
        """,
        nursery=nursery,
    )
    assert (outcome.code, outcome.left) == (1, ())
    assert outcome.err.count("Traceback (most recent call last)") == 2  # ours, and within its message the worker's
    assert "ValueError: Caught ValueError in DataLoader worker process 1." in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ctrl_c_to_the_whole_group_prints_one_traceback(nursery: Nursery, method: str) -> None:
    with Program(
        """
        import sys
        from shmloader import DataLoader
        from tests.faulty import Sleepy

        if __name__ == "__main__":
            source = DataLoader(Sleepy(at=30), num_workers=2, multiprocessing_context=sys.argv[1])
            for number, batch in enumerate(source):
                if number == 20:
                    print("going", flush=True)
        """,
        method,
        nursery=nursery,
    ) as program:
        program.wait_for("going")
        os.killpg(program.pid, signal.SIGINT)
        with within(5.0):
            outcome = program.finish()
    assert outcome.err.count("Traceback (most recent call last)") == 1
    assert outcome.err.rstrip().endswith("KeyboardInterrupt")
    assert (outcome.code, outcome.left) == (-signal.SIGINT, ())
