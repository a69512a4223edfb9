"""A net without BatchNorm that takes much memory a sample, and a launcher one of whose ranks has little.

``python -m tests.training.hungry RUN_FOLDER``: a rank, as the local launcher starts it. The last one of them
may take ``MEMORY_MB`` beyond what it has imported.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.entry import Entry
from hpc_train.launchers.local import LocalLauncher
from tests.end_to_end.parts import Net

#: For each sample, in forward alone. Never written to, so that no test takes it from the machine.
SAMPLE_MB = 96
#: Enough for 8 samples and not for 12.
MEMORY_MB = 1000


class Hungry(Net):
    """Allocates by the sample, and notes nothing."""

    def __init__(self, num_classes: int, sample_mb: int, pause_s: float) -> None:
        super().__init__(num_classes, norm=False, dropout=0.2, pause_s=pause_s)
        self.sample_mb = sample_mb

    def forward(self, images_BCHW: Tensor) -> Tensor:
        taken = torch.empty(len(images_BCHW) * self.sample_mb << 20, dtype=torch.uint8)
        out: Tensor = super().forward(images_BCHW)
        del taken
        return out


def hungry(num_classes: int, sample_mb: int = SAMPLE_MB, pause_s: float = 0.0) -> nn.Module:
    return Hungry(num_classes, sample_mb, pause_s)


class ScarceLauncher:
    """Local ranks, one of which has little memory: ``--launcher tests.training.hungry:ScarceLauncher``."""

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        command = [sys.executable, "-m", "tests.training.hungry", str(request.paths.folder)]
        return LocalLauncher(command).launch(request, poll)


def _grown_by(num_mb: int) -> int:
    """Return the limit of data, in bytes, that lets this process grow by this many MB."""
    (held_kb,) = re.findall(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(held_kb) * 1024 + (num_mb << 20)


if __name__ == "__main__":
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        import hpc_train.training.main  # noqa: F401 (what it takes is none of the growth)

        limit = _grown_by(MEMORY_MB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Entry(Path(sys.argv[1]))()
