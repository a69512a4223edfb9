"""Launchers by name, and those that have runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError, UsageError
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL, FollowingLauncher
from hpc_train.launchers.local import LocalLauncher
from hpc_train.launchers.lookup import by_launcher, launcher_of, load_launcher
from hpc_train.launchers.slurm.job_arrays import prepared
from hpc_train.paths import RunPaths
from hpc_train.registry import parts
from hpc_train.run.attempts import claim_attempt, read_record
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json, write_json
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.cli.launchers import COMPLETING, QUEUE
from tests.run.runs import small_experiment


def _run(folder: Path, launcher: str, run_id: str = "abc") -> RunPaths:
    paths = RunPaths(folder / "small" / run_id)
    assert create_run(paths, small_experiment(), run_id, 10, launcher=launcher)
    return paths


@pytest.mark.parametrize("name", [*sorted(parts("launchers")), COMPLETING, QUEUE])
def test_every_launcher_has_the_whole_protocol(name: str) -> None:
    """``Completing`` and the local launcher have a ``launch`` alone."""
    assert isinstance(load_launcher(name), Launcher)


def test_a_launcher_with_launch_alone_starts_runs_one_by_one() -> None:
    local, queue = load_launcher(LOCAL), load_launcher(QUEUE)
    assert isinstance(local, FollowingLauncher) and isinstance(local.plugin, LocalLauncher)
    assert (local.is_queue, queue.is_queue) == (False, True)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean slurm"):
        load_launcher("slurmm")


def test_what_is_not_a_launcher_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"neither launch\(\) nor all"):
        load_launcher("builtins:dict")


def test_runs_are_asked_of_their_launchers_once(tmp_path: Path) -> None:
    names = ["slurm", LOCAL, "slurm", "no.such.module:Launcher"]
    runs = [_run(tmp_path, name, f"r{number}") for number, name in enumerate(names)]
    groups = [[paths.folder.name for paths in some] for _, some in by_launcher(runs)]
    assert groups[0] == ["r0", "r2"]
    assert not launcher_of(runs[3]).is_queue, "its folder tells where it stands"


def test_a_run_that_others_can_write_names_no_code(tmp_path: Path) -> None:
    paths = _run(tmp_path, QUEUE)
    assert launcher_of(paths).is_queue
    paths.folder.chmod(0o777)
    assert not launcher_of(paths).is_queue


def test_what_a_refused_start_had_changed_is_undone(tmp_path: Path) -> None:
    paths = _run(tmp_path, QUEUE)
    write_status(paths, RunStatus("failed", reason="before"))
    write_json(paths.cancelled, {"version": 1})
    facts = read_json(paths.run)
    assert facts is not None

    def prepare(attempt: int) -> None:
        write_json(paths.run, facts | {"changes": {str(attempt): ["data.workers=1"]}})
        write_status(paths, RunStatus("pending"))

    request = StartRequest(paths, small_experiment(), prepare=prepare)
    with pytest.raises(BadFileError), prepared([request]):
        assert (read_json(paths.run) or {})["changes"] == {"1": ["data.workers=1"]}
        assert not paths.cancelled.exists()
        raise BadFileError("refused")
    assert read_json(paths.run) == facts
    assert (read_status(paths).reason, paths.cancelled.exists()) == ("before", True)


def test_a_job_has_its_own_key_in_the_record(tmp_path: Path) -> None:
    paths = _run(tmp_path, "slurm")
    attempt = paths.attempt(claim_attempt(paths, "slurm", job="12_3"))
    written = json.loads(attempt.record.read_text())
    assert written["slurm_job"] == "12_3" and "job" not in written
    record = read_record(attempt)
    assert record is not None and record.job == "12_3"
