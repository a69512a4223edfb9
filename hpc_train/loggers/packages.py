"""The oldest versions of the trackers' packages that work."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from hpc_train.errors import UserError

#: Tracker → (package, oldest version) as in pyproject.toml; the first one that is installed counts.
OLDEST = {
    "wandb": (("wandb", "0.20"),),
    "mlflow": (("mlflow", "3"), ("mlflow-skinny", "3")),
    "tensorboard": (("tensorboard", "2.15"),),
}


class TooOldPackageError(UserError):
    """A package is older than the oldest version that works."""


def check_version(tracker: str) -> None:
    """Raise TooOldPackageError if the tracker's package is too old; a missing one raises nothing here."""
    for package, oldest in OLDEST[tracker]:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if _release(installed) < _release(oldest):
            remedy = f"type pip install -U '{package}>={oldest}'"
            raise TooOldPackageError(f"{package} {installed} is too old; {remedy}")
        return


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+-]", text)[0]))
