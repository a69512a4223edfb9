"""A launcher one of whose ranks has little memory on its device, the stand-in for a GPU.

``python -m tests.gpu.scarce RUN_FOLDER``: a rank, as the local launcher starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.entry import Entry
from hpc_train.launchers.local import LocalLauncher

#: Of which 90 % is enough for 8 samples of 96 MiB and not for 12.
DEVICE_MIB = 1100


class ScarceLauncher:
    """Local ranks, the last of which has little memory: ``--launcher tests.gpu.scarce:ScarceLauncher``."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        command = [sys.executable, "-m", "tests.gpu.scarce", str(request.paths.folder)]
        return LocalLauncher(command).launch(request, poll)


if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.environ["FAKE_CUDA_MIB"] = str(DEVICE_MIB)
    Entry(Path(sys.argv[1]))()
