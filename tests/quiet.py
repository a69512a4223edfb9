"""Uninterrupted runs, trained once for all that are compared with them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from filelock import FileLock

from hpc_train.paths import RunPaths
from tests import warm
from tests.end_to_end.runs import EXPERIMENT, hpc_train, only_run, write_experiment

_NOTHING: Mapping[str, str] = MappingProxyType({})
#: In ``make test-full``; else they are forked, also for a test whose own ranks are fresh.
_ARE_FRESH = warm.FRESH in os.environ


@dataclass(frozen=True)
class QuietRuns:
    """Below ``folder``, which several processes and threads may share. Nobody may change what it holds."""

    folder: Path

    def of(
        self,
        *overrides: str,
        text: str = EXPERIMENT,
        ranks: int = 2,
        environment: Mapping[str, str] = _NOTHING,
    ) -> RunPaths:
        """Return the run of this file on this machine: a second one would be bitwise identical."""
        asked = json.dumps([text, overrides, ranks, sorted(environment.items())])
        folder = self.folder / hashlib.sha256(asked.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                where = ("--local", "--devices", str(ranks))
                own = {**environment, "HPC_TRAIN_RUNS": str(folder / "runs")}
                with pytest.MonkeyPatch.context() as patch:
                    if not _ARE_FRESH:
                        patch.delenv(warm.FRESH, raising=False)
                    done = hpc_train("submit", write_experiment(folder, text), *overrides, *where, **own)
                assert done.code == 0, done.err
                (folder / "done").touch()
        return only_run(folder)


@pytest.fixture(scope="session")
def quiet_runs(tmp_path_factory: pytest.TempPathFactory) -> QuietRuns:
    """One set for all workers of pytest-xdist, whose own folders are siblings."""
    own = tmp_path_factory.getbasetemp()
    return QuietRuns((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "quiet-runs")
