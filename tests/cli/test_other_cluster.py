"""Commands on a run whose job belongs to another Slurm cluster that shares the folder of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.launchers.slurm import commands
from hpc_train.paths import ExperimentPaths, RunPaths
from hpc_train.run.attempts import job_ids, newest_number
from hpc_train.run.files import read_json
from hpc_train.run.run_status import read_status
from tests.cli.commands import hpc_train, stderr_of, succeeded
from tests.launchers.slurm.programs import Programs, put_programs_first
from tests.launchers.slurm.queued import add_job, begin
from tests.launchers.slurm.test_submission import _runs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """The Slurm of cluster ``here``, which knows no job."""
    found = put_programs_first(tmp_path, monkeypatch)
    for name, script in {
        "sbatch": "echo Submitted batch job 34",
        "squeue": "true",
        "scontrol": 'printf "ClusterName = Here\\nMaxArraySize = 1001\\n"',
        "sacct": "exit 1",
        "srun": "true",
        "scancel": "true",
    }.items():
        found.put(name, script)
    for cached in (commands.config, commands._cluster_name):
        cached.cache_clear()
    yield found
    for cached in (commands.config, commands._cluster_name):
        cached.cache_clear()


@pytest.fixture
def run(tmp_path: Path, programs: Programs) -> RunPaths:
    """A run that cluster ``there`` runs as job 12."""
    (request,) = _runs(tmp_path, ExperimentPaths(tmp_path / "runs/tiny"), seeds="[1]")
    add_job(request.paths, "12", "there")
    begin(request.paths, "12", step=3)
    return request.paths


def test_it_is_shown_as_its_folder_has_it_and_left_alone(run: RunPaths, programs: Programs) -> None:
    assert "job 12 belongs to cluster there, this is here" in hpc_train("status", run.folder).out
    error = stderr_of(1, "cancel", run.folder)
    assert "its job belongs to cluster there; cancel it there; nothing done" in error
    assert not programs.calls("scancel") and not run.cancelled.exists()
    error = stderr_of(1, "resume", run.folder)
    assert "is running on cluster there: resume or cancel it there; if there is gone, " in error
    assert f"`hpc-train resume {run.folder.name} --take-over` continues it here" in error
    assert not programs.calls("sbatch") and newest_number(run) == 1
    assert read_status(run).state == "running", "a queue without the job proves nothing"


def test_with_take_over_it_is_submitted_here(run: RunPaths, programs: Programs) -> None:
    succeeded("resume", run.folder, "--take-over")
    assert [call.startswith("--test-only") for call in programs.calls("sbatch")] == [True, False]
    facts = read_json(run.run) or {}
    assert (job_ids(facts), facts["slurm_clusters"]) == (["12", "34"], ["there", "here"])
    assert not programs.calls("scancel"), "job 12 is not a job of this cluster"


def test_its_own_clusters_run_is_not_taken_over(run: RunPaths, programs: Programs) -> None:
    programs.put("scontrol", 'printf "ClusterName = there\\nMaxArraySize = 1001\\n"')
    programs.put("squeue", "printf '%s\\x1f' 12 RUNNING None 0 '' '' 0 n1 tiny /x.sh")
    assert "`hpc-train cancel" in stderr_of(1, "resume", run.folder, "--take-over")
    assert not programs.calls("sbatch")
