"""The files that an evaluation writes to the run folder besides its ``val`` row. Rank 0 only.

A step's files are complete once its row is in ``metrics.jsonl``, and are withdrawn together with the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpc_train.paths import RunPaths
from hpc_train.run.files import remove_folder, replacing
from hpc_train.run.storage_errors import named_errors, retried


@runtime_checkable
class KeepsFiles(Protocol):
    """A task that also writes files for an evaluation."""

    def files(self, sums: dict[str, Any]) -> dict[str, bytes]:
        """Return file name → content, from the same sums as ``metrics``."""


def files_of(task: object, sums: dict[str, Any], prefix: str = "") -> dict[str, bytes]:
    """Return the task's files for an evaluation, their names with ``prefix``."""
    found = task.files(sums) if isinstance(task, KeepsFiles) else {}
    return {f"{prefix}{name}": content for name, content in found.items()}


@dataclass(frozen=True)
class EvaluationFiles:
    """Writes and withdraws ``evaluations/step-…/``. Raises StorageError or TransientStorageError."""

    paths: RunPaths

    def write(self, step: int, files: Mapping[str, bytes]) -> None:
        """Write the files of the evaluation at ``step``, each atomically."""
        for name, content in files.items():
            path = self.paths.evaluation(step) / name
            with named_errors(path):
                retried(partial(_replace, path, content), path)

    def withdraw(self, step: int) -> None:
        """Remove the files of evaluations after ``step``, from which training continues."""
        with named_errors(self.paths.evaluations):
            for evaluated_step, folder in self.paths.evaluation_folders().items():
                if evaluated_step > step:
                    remove_folder(folder)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, sync=True) as file:
        file.write(content)
