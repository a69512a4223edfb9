"""Every command that acts on what a run's files name refuses a run that another user could have written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.files import write_text
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import _COMMAND, hpc_train
from tests.cli.launchers import FAILING
from tests.run.runs import small_run

#: Import or publish code, signal processes, cancel jobs, send credentials, or write into folders that the
#: files name.
ACTING = {
    "cancel": ["cancel", "RUN"],
    "evaluate": ["evaluate", "RUN"],
    "export": ["export", "RUN", "-o", "model.onnx"],
    "predict": ["predict", "RUN", "-o", "predictions.csv"],
    "replay": ["replay", "RUN", "--step", "1"],
    "bisect": ["bisect", "RUN"],
    "bundle": ["bundle", "RUN", "-o", "run.tar.gz"],
    "resume": ["resume", "RUN", "--local"],
    "submit": ["submit", "exp.yaml", "--local"],
    "sync": ["sync", "RUN", "--to", "tensorboard"],
    "verify": ["verify", "RUN", "--replay"],
}
#: Read an experiment file, or nothing of a run.
OF_NO_RUN = {"doctor", "init", "notify", "plan", "prepare", "reproduce", "schema", "validate"}
#: Only read a run, remove files of it by their own names, or start one of the commands above (`watch`).
READING = {"clean", "compare", "logs", "report", "rm", "search", "status", "watch"}


def test_each_command_is_known_to_act_on_runs_or_not() -> None:
    assert {*ACTING, *OF_NO_RUN, *READING} == {*_COMMAND.commands}  # type: ignore[attr-defined]


@contextmanager
def _writable(paths: RunPaths) -> Iterator[None]:
    """Let others write the run's folder within this context."""
    paths.folder.chmod(0o777)
    try:
        yield
    finally:
        paths.folder.chmod(0o700)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.chdir(tmp_path)
    run = small_run(tmp_path / "runs")
    write_status(run, RunStatus("failed", 4, 10, attempt=1, reason="x"))
    write_text(run.metrics, '{"split": "train", "step": 4, "loss": 1.0, "time": 1.0, "attempt": 1}\n')
    return run


@pytest.mark.parametrize("command", sorted({*ACTING} - {"submit"}))
def test_a_run_that_others_may_write_is_refused(run: RunPaths, command: str) -> None:
    words = [str(run.folder) if word == "RUN" else word for word in ACTING[command]]
    before = sorted(run.folder.rglob("*"))
    with _writable(run):
        done = hpc_train(*words)
    assert done.code == 1, done
    assert f"{run.folder}: group or others may write it, so it is not trusted" in done.err
    assert sorted(run.folder.rglob("*")) == before


def test_a_run_that_others_may_write_is_not_started_again(file: Path) -> None:
    """``submit`` continues a run that ended before it saved anything."""
    command = ("submit", file, "--local", "--launcher", FAILING)
    hpc_train(*command)
    (run,) = find_runs([])
    before = sorted(run.folder.rglob("*"))
    with _writable(run):
        done = hpc_train(*command)
    assert done.code == 1, done
    assert f"{run.folder}: group or others may write it, so it is not trusted" in done.err
    assert sorted(run.folder.rglob("*")) == before
    hpc_train(*command)
    assert len(run.attempt_folders()) == 2, "it would have been started"
