"""Every figure of a demo run, as one frozen record."""

import json
from dataclasses import asdict, dataclass
from statistics import fmean

from shmloader.cli.comparison import Holding, Race


@dataclass(frozen=True)
class Training:
    """How the training went."""

    steps: int
    seconds: float
    waited_s: float  # of these, spent waiting for the next batch
    pool_bytes: int  # shared memory reserved for slots at the end
    private_copies: int  # batches that were not handed out in place


@dataclass(frozen=True)
class Restored:
    """One held-out photograph, means over its degradations."""

    photograph: str
    degraded_db: float
    restored_db: float


@dataclass(frozen=True)
class Figures:
    """The whole read-out."""

    seed: int
    device: str  # of the training
    batch_size: int
    workers: int
    compute_threads: int
    training: Training
    held_out: tuple[Restored, ...]
    batch_work_s: float  # processor time of making one batch of the job, without a loader
    job: Race
    decoded: Race
    held: dict[str, Holding] | None  # by loader; None where the system does not tell

    @property
    def degraded_db(self) -> float:
        """Mean PSNR of the inputs over the held-out photographs."""
        return fmean(each.degraded_db for each in self.held_out)

    @property
    def restored_db(self) -> float:
        """Mean PSNR of the outputs over the held-out photographs."""
        return fmean(each.restored_db for each in self.held_out)

    def as_json(self) -> str:
        """All of it, with the two means beside it."""
        means = {"degraded_db": self.degraded_db, "restored_db": self.restored_db}
        return json.dumps({**means, **asdict(self)}, indent=2) + "\n"
