"""Runs that nothing happens to, trained once for all that are compared with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.paths import RunPaths
from tests.end_to_end.runs import hpc_train, write_experiment
from tests.faults.on_slurm import submitted
from tests.slurm.experiments import ENVIRONMENT


@dataclass
class QuietRuns:
    """Below ``folder``, by file, overrides and number of ranks. Several threads may ask."""

    folder: Path
    _known: dict[tuple[str, ...], RunPaths] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, text: str, *overrides: str, ranks: int) -> RunPaths:
        key = (text, *overrides, str(ranks))
        with self._lock:
            if key not in self._known:
                self._known[key] = self._train(text, overrides, ranks)
            return self._known[key]

    def _train(self, text: str, overrides: tuple[str, ...], ranks: int) -> RunPaths:
        folder = self.folder / f"quiet-{len(self._known)}"
        experiment = write_experiment(folder, text)
        where = ("--local", "--devices", str(ranks), "--json")
        runs = {"HPC_TRAIN_RUNS": str(folder / "runs")}
        done = hpc_train("submit", experiment, *overrides, *where, **ENVIRONMENT | runs)
        assert done.code == 0, done.err
        return submitted(done)
