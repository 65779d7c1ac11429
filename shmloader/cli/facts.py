"""What figures depend on besides the code."""

import os
import platform
from typing import Any

import torch

import shmloader


def machine_facts() -> dict[str, Any]:
    """Cores, load and versions, for the head of a report."""
    return {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: above 0.5 others are being measured as well
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shmloader": shmloader.__version__,
    }
