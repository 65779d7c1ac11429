"""Python imports this module at its start, where ``shmloader run`` has put this folder on PYTHONPATH.

So it also gets to children: launchers' ranks, spawned processes. It must cost those nothing that never import torch.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Puts shmloader in torch's place as soon as torch has been imported, and before anybody else can use it."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                # Not before: in the middle of its import torch is of no use to anybody.
                from shmloader.cli.aboard import board

                board()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_one_behind() -> None:
    """There may be a sitecustomize of somebody else, which this one hides."""
    others = [entry for entry in sys.path if Path(entry).resolve() != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Where shmloader is not installed but was found in the current folder, a script elsewhere would not find it: last, so
# that nothing else there is found instead of something that is installed.
sys.path.append(str(_FOLDER.parents[2]))
sys.meta_path.insert(0, _AfterTorch())
_run_the_one_behind()
