"""Checks the file that ``-o`` names: never in a run's folder, never over anything but a file."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_train.errors import StorageError, UsageError
from hpc_train.paths import RunPaths
from hpc_train.run.find import is_run


def refuse_target(target: Path) -> None:
    """Raise UserError if ``target`` can't be written, or it exists and is not a regular file.

    StorageError if its folder is missing, or it is a link, a folder or a device; UsageError if it is inside a
    run's folder.
    """
    if not target.parent.is_dir():
        raise StorageError(f"{target}: there is no folder {target.parent}; make the folder first")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise StorageError(f"{target}: exists and is not a plain file; give the name of a file to write")
    real = target.parent.resolve()
    for folder in (real, *real.parents):
        if is_run(RunPaths(folder)):
            raise UsageError(f"-o: {target} is inside run folder {folder}; write the file outside of it")
