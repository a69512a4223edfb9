"""Run folders that 0.2 wrote, kept as an archive: what was trained then must stay usable.

``end_to_end/kept_0_2.tar.xz`` has what hpc-train 0.2.0 left after ``submit --local --devices 1``: an
experiment with its model, a completed run, a run that SIGINT interrupted in its second epoch, and the
snapshot of the code, with the modules of 0.2 that ranks use. Both runs train the same experiment under two
names. Host, boot id and PID namespace were replaced.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from hpc_train.paths import RunPaths

_ARCHIVE = Path(__file__).parent / "end_to_end" / "kept_0_2.tar.xz"


@dataclass(frozen=True)
class Kept:
    """The unpacked archive: ``folder`` is where the experiment was submitted from."""

    folder: Path
    run_id: str = "fbc8bc7b3c"
    total_steps: int = 60
    interrupted_at: int = 34

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def experiment(self) -> Path:
        return self.folder / "experiment.yaml"

    @property
    def completed(self) -> RunPaths:
        return RunPaths(self.runs / "completed" / self.run_id)

    @property
    def interrupted(self) -> RunPaths:
        return RunPaths(self.runs / "interrupted" / self.run_id)


def unpack(folder: Path) -> Kept:
    """Unpack the archive into ``folder``."""
    with tarfile.open(_ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return Kept(folder)
