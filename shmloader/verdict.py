"""The verdict: what limits a job, in one word and one sentence, told from a read-out's figures alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

#: Below this share of the time, waiting (or handing over) does not limit the job.
LITTLE = 0.03
#: From this share on, it does.
MUCH = 0.10
#: A worker that is at work for this share of its time has no time left.
BUSY = 0.80
#: A batch that is made faster than this is not worth a worker (benchmarks/transport.py, cases M, S and XS).
WORTH_A_WORKER_S = 300e-6
#: Fewer batches say nothing yet.
LEAST_BATCHES = 8


class Figures(Protocol):
    """What is judged: see :class:`~shmloader.stats.LoaderStats`."""

    @property
    def batches(self) -> int: ...
    @property
    def wait_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def hand_over_s(self) -> float: ...
    @property
    def workers(self) -> int: ...
    @property
    def worked_s(self) -> float: ...
    @property
    def idle_s(self) -> float: ...
    @property
    def held_up_s(self) -> float: ...
    @property
    def private_copies(self) -> int: ...
    @property
    def oversize_batches(self) -> int: ...
    @property
    def late_copies(self) -> int: ...
    @property
    def copy_wait_s(self) -> float: ...
    @property
    def cores(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the job.

    ``kind`` is ``"loader"`` (making batches), ``"copy"`` (handing them over, room for them, or
    their way to the device), ``"step"`` (the
    consumer's own work) or ``"balanced"``; ``text`` says so with the figures, and what to change.
    """

    kind: Literal["loader", "copy", "step", "balanced"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def judge(seen: Figures) -> Verdict:
    """The verdict on an epoch."""
    whole_s = seen.wait_s + seen.step_s + seen.hand_over_s
    if seen.batches < LEAST_BATCHES or not whole_s:
        return Verdict("balanced", f"too few batches to judge by ({seen.batches}); ask again later.")
    waited, handed = seen.wait_s / whole_s, seen.hand_over_s / whole_s
    if seen.copy_wait_s / whole_s >= max(MUCH, waited):
        return _judge_transfer(seen, seen.copy_wait_s / whole_s)
    if not seen.workers:
        return _judge_in_process(seen, waited)
    if _copies(seen, waited, handed):
        return _judge_copies(seen, waited, handed)
    if waited >= MUCH:
        return _judge_loader(seen, waited)
    if waited <= LITTLE:
        return _judge_step(seen, waited)
    return Verdict(
        "balanced",
        f"{_waited(seen, waited)}, and the workers had work for {_percent(_at_work(seen))} of theirs; neither side "
        "would gain much from changing the loader.",
    )


def _copies(seen: Figures, waited: float, handed: float) -> bool:
    held_up = seen.held_up_s / max(seen.worked_s + seen.idle_s + seen.held_up_s, 1e-9)
    moved = seen.private_copies + seen.oversize_batches
    return (handed >= MUCH and handed > waited) or (held_up >= MUCH and waited >= LITTLE and moved > 0)


def _judge_copies(seen: Figures, waited: float, handed: float) -> Verdict:
    moved = seen.private_copies + seen.oversize_batches
    each_us = seen.hand_over_s / max(seen.batches - 1, 1) * 1e6
    text = f"handing batches over took {_percent(handed)} of the time ({each_us:.0f} µs a batch)"
    if moved > seen.batches // 10:
        return Verdict(
            "copy",
            f"{text}: {moved} of {seen.batches} batches were copied to, or came in, memory of their own; raise "
            "memory_limit or slots, or hold fewer batches.",
        )
    return Verdict(
        "copy", f"{text}, because steps and batches are so short; larger batches need fewer of them (batch_size)."
    )


def _judge_transfer(seen: Figures, waited: float) -> Verdict:
    each_ms = seen.copy_wait_s / max(seen.batches - 1, 1) * 1e3
    text = f"the step waited {_percent(waited)} of the time for copies to the device ({each_ms:.3g} ms a batch)"
    if seen.workers and seen.late_copies > seen.batches // 10:
        return Verdict(
            "copy",
            f"{text}: {seen.late_copies} of {seen.batches} batches were ready too late to be copied ahead; let more "
            "workers make them, or call poke() of the iterator during a long step.",
        )
    if not seen.workers:
        return Verdict("copy", f"{text}: let workers make batches, and they are copied ahead (num_workers='auto').")
    return Verdict("copy", f"{text}: copy less, such as uint8 that the device turns into floats.")


def _judge_loader(seen: Figures, waited: float) -> Verdict:
    at_work, made_ms = _at_work(seen), seen.worked_s / seen.batches * 1e3
    text = f"{_waited(seen, waited)}; making one takes a worker {made_ms:.3g} ms"
    if at_work < BUSY:
        advice = (
            f"but the workers had work for only {_percent(at_work)} of theirs, so batches are needed in bursts: raise "
            "prefetch_factor."
        )
        return Verdict("loader", f"{text}, {advice}")
    if seen.workers < seen.cores:
        return Verdict("loader", f"{text}: raise num_workers from {seen.workers} (there are {seen.cores} cores).")
    return Verdict(
        "loader",
        f"{text}, and {seen.workers} workers on {seen.cores} cores have no time left: make the data set or the collate "
        "function cheaper (decode smaller images, cache, move work to the accelerator); more workers pay only where "
        "they wait for a disk or the network.",
    )


def _judge_step(seen: Figures, waited: float) -> Verdict:
    each_ms = seen.step_s / max(seen.batches - 1, 1) * 1e3
    text = f"the loader keeps up: {_waited(seen, waited)}, the step takes {each_ms:.3g} ms a batch"
    at_work = _at_work(seen)
    enough = max(1, round(seen.workers * at_work * 1.25 + 0.5))
    if enough < seen.workers:
        return Verdict(
            "step",
            f"{text}; the workers had work for {_percent(at_work)} of their time, so num_workers={enough} would do.",
        )
    return Verdict("step", f"{text}; only a faster step makes the job faster.")


def _judge_in_process(seen: Figures, waited: float) -> Verdict:
    made_s = seen.wait_s / max(seen.batches - 1, 1)
    text = f"{_percent(waited)} of the time went into making batches in the training process"
    if waited >= MUCH and made_s < WORTH_A_WORKER_S:
        return Verdict(
            "loader",
            f"{text}, {made_s * 1e6:.0f} µs each: workers would take longer to hand them over; make samples cheaper, "
            "or fetch a batch of them at a time (__getitems__).",
        )
    if waited >= MUCH:
        return Verdict("loader", f"{text}: let workers make them (num_workers='auto', or 1 and more).")
    kind: Literal["step", "balanced"] = "step" if waited <= LITTLE else "balanced"
    return Verdict(kind, f"{text}; workers would gain no more than that.")


def _waited(seen: Figures, share: float) -> str:
    each_ms = seen.wait_s / max(seen.batches - 1, 1) * 1e3
    return f"the consumer waited {_percent(share)} of the time ({each_ms:.3g} ms a batch)"


def _at_work(seen: Figures) -> float:
    whole_s = seen.worked_s + seen.idle_s + seen.held_up_s
    return seen.worked_s / whole_s if whole_s else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else "less than 1 %"
