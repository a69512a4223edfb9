"""What Slurm 22.05, 24.11 and 26.05 printed on the test cluster is read alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launchers.slurm import commands, queue
from hpc_train.launchers.slurm.commands import NoAnswerError
from hpc_train.launchers.slurm.queue import JobState

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded.json").read_text())
VERSIONS = pytest.mark.parametrize("version", RECORDED)


@VERSIONS
def test_an_array_of_which_two_tasks_were_cancelled(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 0 while it ran; task 4, which waited, leaves no trace. Its exit code is 15, 0:15 or 143:0."""
    monkeypatch.setattr(queue, "run", lambda *_, **__: "\n".join(RECORDED[version]["squeue"]))
    found = {job: replace(state, ended=None) for job, state in queue._squeue("--user=0").items()}
    exit_code = "143:0" if version.startswith("26.") else "0:15"
    shared = {"restarts": 0, "exit_code": "0:0", "name": "exp", "script": "(null)"}
    running = {job: JobState(job, "RUNNING", nodes="n1", **shared) for job in ("1_1", "1_2")}
    assert found == running | {
        "1_0": JobState("1_0", "CANCELLED", nodes="n1", **shared | {"exit_code": exit_code}),
        "1_3": JobState("1_3", "PENDING", "JobArrayTaskLimit", **shared),
    }


@VERSIONS
def test_limits_of_the_cluster_and_its_partition(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RECORDED[version]
    text = {"config": "\n".join(recorded["config"]), "partition": recorded["partition"]}
    monkeypatch.setattr(commands, "run", lambda argv, **_: next(text[word] for word in argv if word in text))
    config = commands.config.__wrapped__()
    assert (config["MaxArraySize"], config["KillWait"], config["JobRequeue"]) == ("1001", "10 sec", "1")
    assert config["PreemptMode"] == "REQUEUE"
    partition = commands.partition.__wrapped__("low")
    assert (partition["GraceTime"], partition["PreemptMode"]) == ("60", "REQUEUE")


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("22.05.8", "missing_file"),
        ("24.11.5", "missing_file"),
        ("24.11.5", "no_configuration"),
        ("26.05.3", "missing_file"),
        ("26.05.3", "no_configuration"),
    ],
)
def test_a_machine_without_a_configuration_is_not_answered_by_slurm(version: str, kind: str) -> None:
    """Several lines, none of which is a refusal of what was asked."""
    error = commands.failure(["squeue"], "\n".join(RECORDED[version][kind]))
    assert isinstance(error, NoAnswerError)
    assert "\n" not in str(error)
