"""The main job: a restorer trained on real photographs that worker processes degrade, then both loaders compared."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean, median
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.utils.data import default_collate

from shmloader import DataLoader, PairedDataset
from shmloader.cli import footprint
from shmloader.cli.comparison import KINDS, Holding, hold, race
from shmloader.cli.figures import Figures, Restored, Training
from shmloader.cli.photographs import HELD_OUT, TRAINING, Clean, Degraded, Patches, Rows, Views, WholePhotographs
from shmloader.cli.readout import show
from shmloader.cli.restorer import Restorer, Trainer, psnr_db, restore
from shmloader.device import accelerator

Pairs = PairedDataset[tuple[Tensor, Tensor]]

BATCHES_OF_WORK = 7  # made without a loader, to tell what the work itself costs
REFRESH_S = 0.1  # between two drawings of the progress bar


@dataclass(frozen=True)
class Scale:
    """How much of everything a run does."""

    epochs: int
    patches: int  # training pairs, read once an epoch
    degradations: int  # of each held-out photograph
    rounds: int  # of each race
    job_batches: int  # in one round
    decoded_batches: int  # in one round
    decoded_batch_size: int = 256
    decoded_pairs: int = 1024  # that lie in memory
    kept_batches: int = 100
    kept_batch_size: int = 32


FULL = Scale(epochs=4, patches=2048, degradations=3, rounds=15, job_batches=32, decoded_batches=24)
QUICK = Scale(epochs=1, patches=1024, degradations=1, rounds=5, job_batches=24, decoded_batches=16)


@dataclass(frozen=True)
class Settings:
    """What the user chose."""

    scale: Scale = FULL
    epochs: int | None = None  # None: the scale's
    seconds: float | None = None  # None: no limit
    workers: int | Literal["auto"] = "auto"
    batch_size: int = 8
    seed: int = 0
    device: str = "cpu"  # or "auto": the accelerator, if there is one


def run(settings: Settings, console: Console) -> Figures:
    """Trains, evaluates, compares and prints; all the figures come back."""
    _leave_cores_to_the_workers()
    torch.manual_seed(settings.seed)
    device = device_of(settings.device)
    model = Restorer().to(device)
    console.print(f"training on {_list(TRAINING)}\nholding out {_list(HELD_OUT)}", soft_wrap=True)
    console.print(f"on {device}")
    with _training_loader(settings, device) as loader:
        workers = max(1, int(loader.num_workers))
        training = train(model, loader, settings, console)
    held_out = evaluate(model, settings, workers)
    console.print("comparing the loaders ...")
    figures = _compare(settings, str(device), workers, training, held_out)
    show(figures, console)
    return figures


def device_of(wanted: str) -> torch.device:
    """The device to train on.

    Raises:
        RuntimeError, ValueError: there is none of that name.
    """
    if wanted == "auto":
        wanted = "cpu" if not torch.accelerator.is_available() else str(torch.accelerator.current_accelerator())
    there = accelerator.find(wanted)
    return there.device if there is not None else torch.device("cpu")


def pairs_of(views: Views, seed: int) -> Pairs:
    """(degraded, clean) pairs, each (3, height, width) uint8."""
    return PairedDataset(Degraded(views, seed), Clean(views))


def train(model: Restorer, loader: DataLoader[tuple[Tensor, Tensor]], settings: Settings, console: Console) -> Training:
    """Trains until the epochs or the seconds are spent, whichever comes first."""
    epochs = settings.epochs or settings.scale.epochs
    trainer = Trainer(model)
    clock = _Clock(epochs * len(loader), settings.seconds)
    waited_s, private_copies = 0.0, 0
    with _Bar(console) as bar:
        while (progress := clock.progress(trainer.steps)) < 1:
            for degraded, clean in loader:
                loss = trainer.step(degraded, clean, progress)
                progress = clock.progress(trainer.steps)
                bar.show(progress, loss)
                if progress >= 1:
                    break
            stats = loader.stats()
            waited_s += stats.wait_s
            private_copies += stats.private_copies
    return Training(trainer.steps, clock.elapsed_s(), waited_s, stats.pool_bytes, private_copies)


def evaluate(model: Restorer, settings: Settings, workers: int) -> tuple[Restored, ...]:
    """PSNR on whole photographs that the training has never seen, each at `degradations` random strengths."""
    views = WholePhotographs(HELD_OUT, settings.scale.degradations)
    figures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    device = next(model.parameters()).device
    with DataLoader(pairs_of(views, settings.seed), num_workers=workers) as loader:
        for name, (degraded, clean) in zip(views.names, loader):
            restored = restore(model, degraded.to(device)).cpu()
            figures[name].append((psnr_db(degraded, clean), psnr_db(restored, clean)))
    return tuple(Restored(name, *map(fmean, zip(*pairs))) for name, pairs in figures.items())


def _training_loader(settings: Settings, device: torch.device) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(
        pairs_of(Patches(TRAINING, settings.scale.patches, settings.seed), settings.seed),
        batch_size=settings.batch_size,
        shuffle=True,
        num_workers=settings.workers,
        drop_last=True,
        generator=torch.Generator().manual_seed(settings.seed),
        persistent_workers=True,
        device=device,
    )


def _list(photographs: Sequence[str]) -> str:
    return ", ".join(PurePath(name).stem for name in photographs)


def _leave_cores_to_the_workers() -> None:
    """Half of the compute threads stay.

    With all of them, each step waits in a barrier for the one thread whose core a worker has: ten times as long.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))


def _compare(
    settings: Settings, device: str, workers: int, training: Training, held_out: tuple[Restored, ...]
) -> Figures:
    scale = settings.scale
    images = _decoded(settings, workers)

    def job(count: int) -> Pairs:
        return pairs_of(Patches(TRAINING, count, settings.seed), settings.seed)

    def rows(count: int) -> Pairs:
        degraded, clean = images
        return PairedDataset(Rows(degraded, count), Rows(clean, count))

    return Figures(
        seed=settings.seed,
        device=device,
        batch_size=settings.batch_size,
        workers=workers,
        compute_threads=torch.get_num_threads(),
        training=training,
        held_out=held_out,
        batch_work_s=_batch_work_s(job(BATCHES_OF_WORK * settings.batch_size), settings.batch_size),
        job=race(job, settings.batch_size, workers, scale.job_batches, scale.rounds),
        decoded=race(rows, scale.decoded_batch_size, workers, scale.decoded_batches, scale.rounds),
        held=_hold_both(rows(scale.kept_batches * scale.kept_batch_size), scale.kept_batch_size, workers),
    )


def _decoded(settings: Settings, workers: int) -> tuple[Tensor, Tensor]:
    """The job's first pairs as they come from the workers: two (n, 3, PATCH, PATCH) uint8 tensors."""
    pairs = pairs_of(Patches(TRAINING, settings.scale.decoded_pairs, settings.seed), settings.seed)
    with DataLoader(pairs, batch_size=settings.batch_size, num_workers=workers) as loader:
        degraded, clean = zip(*loader)
        return torch.cat(degraded), torch.cat(clean)


def _hold_both(pairs: Pairs, batch_size: int, workers: int) -> dict[str, Holding] | None:
    if not footprint.readable():
        return None
    return {kind: hold(kind, pairs, batch_size, workers) for kind in KINDS}


def _batch_work_s(pairs: Pairs, batch_size: int) -> float:
    """Processor seconds that one batch costs whoever makes it, without a loader: median over the dataset."""
    seconds = []
    for first in range(0, len(pairs), batch_size):
        start = time.process_time()
        default_collate([pairs[index] for index in range(first, first + batch_size)])
        seconds.append(time.process_time() - start)
    return median(seconds)


class _Clock:
    """How far the training has come, by steps and by time."""

    def __init__(self, steps: int, seconds: float | None) -> None:
        self._steps = steps
        self._seconds = seconds
        self._start = time.perf_counter()
        self._first_step_s = 0.0

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def progress(self, steps: int) -> float:
        """0 at the start, 1 when the steps or the seconds are spent.

        The seconds run from the first step: under spawn, starting the workers might use them up.
        """
        if steps <= 1:
            self._first_step_s = self.elapsed_s()
        trained_s = self.elapsed_s() - self._first_step_s
        return max(steps / self._steps, trained_s / self._seconds if self._seconds else 0.0)


class _Bar:
    """Progress and loss, drawn by the training thread.

    Rich's own refreshing thread may hold the output's lock at the moment when a worker is forked.
    """

    def __init__(self, console: Console) -> None:
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("error {task.fields[loss]:.4f}"), TimeElapsedColumn())
        self._bar = Progress(TextColumn("training"), *columns, console=console, auto_refresh=False)
        self._task = self._bar.add_task("training", total=1.0, loss=float("nan"))
        self._drawn_at = 0.0

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: float, loss: float) -> None:
        """`loss`: mean absolute error, of 1. Draws at most every `REFRESH_S`."""
        self._bar.update(self._task, completed=progress, loss=loss)
        if time.perf_counter() - self._drawn_at > REFRESH_S:
            self._drawn_at = time.perf_counter()
            self._bar.refresh()
