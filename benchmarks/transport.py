"""What a loader itself costs: torch's DataLoader and shmloader's side by side in one run.

The cases stand in `shmloader/cli/cases.py`, how they are timed in `shmloader/cli/transport.py`; `shmloader bench` runs
the same ones. Here nothing but the package itself is needed (and Pillow for the case "photo").

    python benchmarks/transport.py
    python benchmarks/transport.py --only L,S,photo --rounds 5 --workers 2 --json out.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from shmloader.cli.cases import CASES
from shmloader.cli.facts import machine_facts
from shmloader.cli.transport import IN_PROCESS, OURS, TORCH, Result, Terms, run_case

HEADER = (
    *("case", "torch /s", "GB/s", "CPU ms", "no workers /s", "GB/s", "CPU ms", "shmloader /s", "GB/s", "CPU ms"),
    *("x torch", "x no workers"),
)
WIDTHS = (6, 10, 7, 8, 14, 7, 8, 13, 7, 8, 8, 13)


def line(cells: Iterable[str]) -> str:
    """One line of the table."""
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, WIDTHS))
    return " ".join([first.strip().ljust(WIDTHS[0]), *rest])


def row(result: Result) -> str:
    """A result as a line of the table."""
    cells = [result.case]
    for who in (TORCH, IN_PROCESS, OURS):
        rate = result.medians[who]
        cells.append(f"{rate.batches_per_s:,.{0 if rate.batches_per_s >= 100 else 1}f}")
        cells.append(f"{rate.gb_per_s:.2f}")
        cells.append(f"{1000 * rate.thread_cpu_s:.3f}")
    return line([*cells, f"{result.over(TORCH):.2f}", f"{result.over(IN_PROCESS):.2f}"])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="torch's DataLoader against shmloader's, in one run.")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round (default: %(default)s)")
    parser.add_argument("--start-method", choices=("fork", "spawn", "forkserver"), help="default: the platform's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write facts, medians and rounds here as well")
    parsed = parser.parse_args(argv)
    parsed.only = parsed.only.split(",")
    if unknown := [name for name in parsed.only if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}")
    return parsed


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the cases and prints a line for each as soon as it is known."""
    args, facts = arguments(argv), machine_facts()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f", workers {args.workers}")
    print("CPU ms: processor time of the training thread, a batch")
    print(line(HEADER))
    results = []
    terms = Terms(args.workers, args.rounds, args.seconds, args.start_method)
    for name in args.only:
        results.append(run_case(name, terms))
        print(row(results[-1]), flush=True)
    if args.json:
        settings = {"workers": args.workers, "rounds": args.rounds, "seconds": args.seconds}
        report = {"facts": facts | settings, "results": [result.as_json() for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
