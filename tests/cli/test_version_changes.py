"""A resume with other versions than the run had: said, noted, and refused where that is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

import pytest

from hpc_train.cli.changes import other_python
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.run.versions import versions
from tests.cli.commands import hpc_train, stderr_of
from tests.cli.launchers import FAILING, QUEUE, queued, requests
from tests.run.runs import change_facts, small_experiment

pytestmark = pytest.mark.fault(41)


TORCH = versions()["torch"]


@pytest.fixture
def failed(file: Path) -> RunPaths:
    """A run whose first attempt broke, with another torch."""
    hpc_train("submit", file, "--local", "--launcher", FAILING)
    (paths,) = find_runs([])
    _age(paths)
    return paths


@pytest.fixture
def cancelled(file: Path) -> list[RunPaths]:
    """Two runs of a queue that somebody cancelled, submitted with another torch."""
    hpc_train("submit", file, "--launcher", QUEUE, "sweep.grid={seed: [1, 2]}")
    for paths in find_runs([]):
        write_status(paths, RunStatus("cancelled"))
        _age(paths)
    return find_runs([])


def _age(paths: RunPaths) -> None:
    created = (read_json(paths.run) or {})["versions"]
    change_facts(paths, versions=created | {"torch": "1.0.0", "hpc-train": "0.0.1"})


def _noted(paths: RunPaths) -> dict[str, dict[str, str]]:
    return cast("dict[str, dict[str, str]]", (read_json(paths.run) or {}).get("versions_by_attempt", {}))


def test_other_versions_are_said_once_and_noted_with_their_attempt(failed: RunPaths) -> None:
    done = hpc_train("resume", "tiny")
    told = f"versions: torch 1.0.0 → {TORCH}; the weights may differ in the last bit"
    assert f"{failed.folder.name}: {told}\n" in done.err
    assert _noted(failed) == {"2": versions() | {"hpc-train": "0.0.1"}}, "the snapshot's hpc-train goes on"
    assert "versions:" not in hpc_train("resume", "tiny").err
    assert list(_noted(failed)) == ["2"]


def test_with_new_code_hpc_train_is_another_one_too(failed: RunPaths) -> None:
    done = hpc_train("resume", "tiny", "--code", "new")
    assert f"versions: hpc-train 0.0.1 → {versions()['hpc-train']}, torch 1.0.0 → {TORCH};" in done.err


def test_strict_env_refuses_before_anything_is_changed(failed: RunPaths) -> None:
    before = failed.run.read_text()
    error = stderr_of(2, "resume", "tiny", "--strict-env", "data.workers=2")
    assert f"other versions than the run had: torch 1.0.0 → {TORCH}; --strict-env refuses" in error
    assert (failed.run.read_text(), newest_number(failed), len(requests)) == (before, 1, 1)


def test_strict_env_goes_on_with_the_same_versions_and_is_heeded_on_the_nodes(failed: RunPaths) -> None:
    hpc_train("resume", "tiny")
    hpc_train("resume", "tiny", "--strict-env")
    assert [request.experiment.environment.strict for request in requests] == [False, False, True]


def test_a_file_that_asks_for_it_refuses_without_the_option(file: Path) -> None:
    hpc_train("submit", file, "--local", "--launcher", FAILING, "environment.strict=true")
    _age(find_runs([])[0])
    assert "environment.strict: true refuses that" in stderr_of(2, "resume", "tiny")
    assert hpc_train("resume", "tiny", "environment.strict=false").code == 1
    assert len(requests) == 2


def test_runs_of_a_queue_are_told_of_together_and_noted(cancelled: list[RunPaths]) -> None:
    done = hpc_train("resume", "tiny", "--strict-env")
    assert (done.code, len(queued)) == (2, 1)
    assert hpc_train("resume", "tiny").err.count("2 runs: versions: torch 1.0.0 → ") == 1
    assert [list(_noted(paths)) for paths in cancelled] == [["1"], ["1"]]


@pytest.mark.parametrize("override", ["environment.python=/opt/bin/python", "environment.container=/a.sif"])
def test_another_interpreter_is_not_asked(cancelled: list[RunPaths], override: str) -> None:
    error = stderr_of(0, "resume", "tiny", override, "--strict-env")
    assert f"versions: not compared, because of {override.replace('=', ' ')}" in error
    assert _noted(cancelled[0]) == {}
    for paths in cancelled:
        write_status(paths, RunStatus("cancelled"))
    done = hpc_train("resume", "tiny", "environment={}")
    assert "not compared, because of environment." in done.err and "which the run had" in done.err


def test_this_interpreter_is_known_by_any_name_in_its_folder(tmp_path: Path) -> None:
    folder, name = os.path.split(sys.executable)
    other = next(alias for alias in ("python3", "python") if alias != name)
    for python, is_this in (
        (sys.executable, True),
        (f"{folder}/{other}", True),
        (str(tmp_path / name), False),
        (name, False),
    ):
        experiment = small_experiment(environment={"python": python})
        assert (other_python("slurm", experiment) is None) == is_this, python
        assert other_python("local", experiment) is None
    (tmp_path / name).symlink_to(sys.executable)
    linked = small_experiment(environment={"python": str(tmp_path / name)})
    assert other_python("slurm", linked), "a virtual environment's Python is a link to another's"
