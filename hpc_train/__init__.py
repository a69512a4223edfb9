"""One YAML file in, a trained model out, on a laptop or on Slurm, whatever interrupts it.

Importing this package imports nothing else: the names of ``__all__`` are loaded when they are used.
"""

__version__ = "0.2.0"

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if os.environ.get("HPC_TRAIN_LATE_PATH"):
    from hpc_train.package_path import add_late_places

    add_late_places()

if TYPE_CHECKING:
    from hpc_train.api import Run, Runs, load_model, plan, runs, submit

__all__ = ["Run", "Runs", "load_model", "plan", "runs", "submit"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("hpc_train.api"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "errors", "plugins"]


class _Package(ModuleType):
    """Keeps the function ``plan`` when the subpackage of that name is imported, which would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
