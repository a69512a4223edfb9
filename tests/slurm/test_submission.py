"""``submit`` and ``resume`` on a real Slurm, up to the queue: what runs there is tested elsewhere.

The partition is down meanwhile, so that jobs wait.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from hpc_train.launchers.entry import Entry
from hpc_train.paths import RunPaths
from hpc_train.run.run_status import read_status
from tests.end_to_end.runs import wait_for
from tests.plan.files import EXPERIMENT
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.submitters import Halt, start
from tests.waiting import HANG_LIMIT_S

pytestmark = [pytest.mark.slow]

_LIMIT_S = HANG_LIMIT_S
_SWEEP = "sweep={grid: {seed: [1, 2, 3]}, max_parallel: 2}"
_EXPERIMENT = (
    EXPERIMENT
    + """\
slurm:
  partition: low
  nodes: 2
  ranks_per_node: 2
  time_limit: 10min
"""
)


class Place:
    """A folder to submit from, and what is in it and in the queue of its cluster."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        folder.mkdir()
        (folder / "exp.yaml").write_text(_EXPERIMENT)

    def run(self, *arguments: str, halt: Halt | None = None, program: Path | None = None) -> tuple[int, str]:
        """Run ``hpc-train`` to its end; return its code and what it said."""
        process = start(self.folder, *arguments, halt=halt, program=program)
        said = process.communicate(timeout=_LIMIT_S)[1]
        return process.returncode, said

    def submit(self, *arguments: str, halt: Halt | None = None) -> tuple[int, str]:
        return self.run("submit", "exp.yaml", *arguments, halt=halt)

    def queue(self, form: str = "%i %r", *options: str) -> list[str]:
        return sorted(self.cluster.run("squeue", "--noheader", f"--format={form}", *options).splitlines())

    def runs(self) -> list[RunPaths]:
        return [RunPaths(path.parent) for path in sorted((self.folder / "runs").glob("tiny/[!.]*/run.json"))]

    def jobs(self) -> dict[str, list[str]]:
        """Run id → its jobs, as its folder says."""
        return {run.folder.name: json.loads(run.run.read_text())["slurm_job_ids"] for run in self.runs()}

    def records(self) -> list[dict[str, Any]]:
        found = (self.folder / "runs/tiny/.slurm").glob("*/submission.json")
        return [json.loads(path.read_text()) for path in found]


def _place(folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(folder / "place/runs"))
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(folder / "cache"))
    cluster.run("scontrol", "update", "PartitionName=low", "State=DOWN")
    yield Place(folder / "place", cluster)
    cluster.clear()
    cluster.run("scontrol", "update", "PartitionName=low", "State=UP")


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield from _place(tmp_path, cluster, monkeypatch)


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A folder with an sbatch that counts its submissions in ``calls`` and does as Slurm's own."""
    return _wrapped_sbatch(tmp_path / "counted", 'exec "$real" "$@"')


def _wrapped_sbatch(folder: Path, body: str) -> Path:
    folder.mkdir()
    real = 'real=$(PATH=${PATH#*:} command -v sbatch)\n[ "$1" != --test-only ] || exec "$real" "$@"\n'
    real += f"echo call >> {folder}/calls\n"
    (folder / "sbatch").write_text(f"#!/bin/bash\n{real}{body}\n")
    (folder / "sbatch").chmod(0o755)
    return folder


def _calls(program: Path) -> int:
    path = program / "calls"
    return path.read_text().count("call") if path.exists() else 0


def _assert_one_array(place: Place) -> str:
    """See one released array that holds each of the three runs once; return its number."""
    (line,) = place.queue("%i|%r")
    job, reason = line.split("|")
    number, tasks = job.split("_")
    assert tasks == "[0-2%2]", line
    assert "Held" not in reason
    jobs = place.jobs()
    assert sorted(jobs.values()) == [[f"{number}_{task}"] for task in range(3)]
    assert all(read_status(run).state == "pending" for run in place.runs())
    (record,) = place.records()
    assert (record["state"], record["job_id"]) == ("released", number)
    for task, run_id in enumerate(record["runs"]):
        assert jobs[run_id] == [f"{number}_{task}"]
        pickle = place.folder / f"runs/tiny/.slurm/{record['token']}/{number}_{task}_submitted.pkl"
        entry = DelayedSubmission.load(pickle).function
        assert entry == Entry(place.folder / "runs/tiny" / run_id)
    return number


def test_a_sweep_is_one_throttled_array_from_one_sbatch(place: Place, counted: Path) -> None:
    code, said = place.run("submit", "exp.yaml", _SWEEP, program=counted)
    assert code == 0, said
    number = _assert_one_array(place)
    assert _calls(counted) == 1
    assert f"job {number}: an array of 3 runs, 2 at a time" in said
    assert "hpc-train status tiny" in said
    (record,) = place.records()
    folder = place.folder / "runs/tiny/.slurm" / record["token"]
    private = [folder, *folder.glob("*.pkl")]
    assert not any(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) for path in private)


def test_one_run_is_a_plain_job(place: Place) -> None:
    code, said = place.submit()
    assert code == 0, said
    (line,) = place.queue("%i|%D|%r")
    number, nodes, reason = line.split("|")
    assert (nodes, "Held" in reason) == ("2", False)
    assert list(place.jobs().values()) == [[number]]


def test_what_is_asked_to_stay_held_is_not_released(place: Place) -> None:
    code, said = place.submit("slurm.extra={hold: true}")
    assert (code, "held" in said) == (0, True), said
    (line,) = place.queue("%r")
    assert line == "JobHeldUser"


@pytest.mark.fault(37)
def test_twenty_submits_at_once_make_one_array(place: Place, counted: Path) -> None:
    processes = [start(place.folder, "submit", "exp.yaml", _SWEEP, program=counted) for _ in range(20)]
    ends = [(process.communicate(timeout=_LIMIT_S)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0] * 20, ends
    _assert_one_array(place)
    assert _calls(counted) == 1
    assert sum("pending already" in said for said, _ in ends) == 19


_STEPS = [
    ("hpc_train.cli.submit:create_run", 1),
    ("hpc_train.cli.submit:create_run", 2),
    ("hpc_train.launchers.slurm.submission:write", 1),
    ("hpc_train.launchers.slurm.sbatch:sbatch", 1),
    ("hpc_train.launchers.slurm.submission:place_pickle", 2),
    ("hpc_train.launchers.slurm.submission:note_job", 2),
    ("hpc_train.launchers.slurm.submission:write", 2),
    ("hpc_train.launchers.slurm.commands:release", 1),
    ("hpc_train.launchers.slurm.submission:write", 3),
]


#: After these ``make test`` kills, too. After others all is as before the next step, or as with one run less.
_AFTER = {
    ("hpc_train.cli.submit:create_run", 2),
    ("hpc_train.launchers.slurm.sbatch:sbatch", 1),
    ("hpc_train.launchers.slurm.submission:write", 3),
}


@pytest.mark.fault(49)
@pytest.mark.parametrize(
    ("step", "call", "when"),
    [
        *((*step, "before") for step in _STEPS),
        *(pytest.param(*step, "after", marks=[] if step in _AFTER else pytest.mark.soak) for step in _STEPS),
    ],
)
def test_a_submitter_killed_anywhere_leaves_one_array_to_the_next(
    place: Place, step: str, call: int, when: str
) -> None:
    code, _ = place.submit(_SWEEP, halt=Halt(step, call, when))
    assert code == -9
    code, said = place.submit(_SWEEP)
    assert code == 0, said
    _assert_one_array(place)


@pytest.mark.fault(49)
def test_a_submitter_killed_inside_sbatch_leaves_one_array_to_the_next(place: Place, tmp_path: Path) -> None:
    """submitit has moved neither script nor pickles then."""
    deadly = _wrapped_sbatch(tmp_path / "deadly", '"$real" "$@"\nkill -KILL $PPID')
    code, _ = place.run("submit", "exp.yaml", _SWEEP, program=deadly)
    assert code == -9
    assert [line.split()[1] for line in place.queue()] == ["JobHeldUser"]
    code, said = place.submit(_SWEEP)
    assert code == 0, said
    _assert_one_array(place)


@pytest.mark.fault(49)
@pytest.mark.parametrize("command", ["submit", "search"])
def test_a_search_killed_inside_sbatch_is_finished_though_no_trial_may_start(
    place: Place, tmp_path: Path, command: str
) -> None:
    """The trial that was not submitted counts as running, so that nothing is proposed."""
    parameters = "{seed: {int: [0, 99]}}"
    section = f"{{trials: 3, max_concurrent: 1, metric: accuracy, mode: max, parameters: {parameters}}}"
    words = ("exp.yaml", f"sweep={{search: {section}}}")
    deadly = _wrapped_sbatch(tmp_path / "deadly", "kill -KILL $PPID")
    assert place.run("submit", *words, program=deadly)[0] == -9
    assert place.queue() == []
    process = start(place.folder, command, *words)
    assert process.stderr is not None
    assert any("finished what another command had begun to submit" in line for line in process.stderr)
    if command == "search":  # it waits for the trial
        process.terminate()
    process.communicate(timeout=_LIMIT_S)
    (line,) = place.queue()
    assert "Held" not in line


def test_a_killed_submitter_whose_held_job_somebody_cancelled_is_done_again(place: Place) -> None:
    place.submit(_SWEEP, halt=Halt("hpc_train.launchers.slurm.sbatch:sbatch", 1, "after"))
    place.cluster.run("scancel", *place.queue("%F"))
    code, said = place.submit(_SWEEP)
    assert code == 0, said
    _assert_one_array(place)


def test_a_waiting_submit_says_for_whom(place: Place, tmp_path: Path) -> None:
    go = tmp_path / "go"
    halt = Halt("hpc_train.launchers.slurm.sbatch:sbatch", 1, "before", str(go))
    first = start(place.folder, "submit", "exp.yaml", _SWEEP, halt=halt)
    wait_for(Path(f"{go}.there").exists, "the first submit")
    second = start(place.folder, "submit", "exp.yaml", _SWEEP)
    assert second.stderr is not None
    said = second.stderr.readline()
    go.touch()
    assert f"waits for process {first.pid}" in said
    assert (first.wait(_LIMIT_S), second.wait(_LIMIT_S)) == (0, 0)
    for process in (first, second):
        process.communicate()
    _assert_one_array(place)


@pytest.mark.fault(33)
@pytest.mark.parametrize("trouble", ["without", "frozen"])
def test_a_controller_that_goes_and_comes_back_makes_one_array(
    place: Place, tmp_path: Path, trouble: str
) -> None:
    """Frozen, it hears sbatch and makes the job later, when nobody waits for its answer any more."""
    go = tmp_path / "go"
    halt = Halt("hpc_train.launchers.slurm.sbatch:sbatch", 1, "before", str(go))
    submit = start(place.folder, "submit", "exp.yaml", _SWEEP, halt=halt)
    wait_for(Path(f"{go}.there").exists, "the submit before sbatch")
    assert submit.stderr is not None
    with getattr(place.cluster, trouble)("slurmctld"):
        go.touch()
        said = submit.stderr.readline()
        assert "Slurm does not answer" in said and "tries again" in said
    said += submit.communicate(timeout=_LIMIT_S)[1]
    assert submit.returncode == 0, said
    _assert_one_array(place)


@pytest.mark.fault(35)
def test_what_slurm_refuses_is_placed_in_the_file_and_leaves_nothing(place: Place) -> None:
    code, said = place.submit(_SWEEP, "slurm.nodes=1-2", "slurm.dependency=nope")
    assert code == 65
    assert "command line: slurm.dependency: Slurm refuses it" in said
    assert "dependency problem" in said
    assert (place.runs(), place.queue(), place.records()) == ([], [], [])
    (place.folder / "exp.yaml").write_text(f"{_EXPERIMENT}  dependency: nope\n")
    code, said = place.submit()
    assert code == 65
    assert "exp.yaml:16:15: slurm.dependency: Slurm refuses it" in said
    (place.folder / "exp.yaml").write_text(_EXPERIMENT)
    assert place.submit()[0] == 0


def test_changes_of_runs_in_the_queue_are_tried_and_applied_by_the_printed_commands(place: Place) -> None:
    assert place.submit(_SWEEP)[0] == 0
    code, message = place.submit(_SWEEP, "slurm.dependency=nope")
    assert code == 65
    assert "3 runs: the file has changed since:" in message and "dependency problem" in message
    code, message = place.submit(_SWEEP, "slurm.time_limit=20min")
    commands = "hpc-train cancel tiny && hpc-train resume tiny slurm.time_limit=20min"
    assert (code, f"`{commands}`" in message) == (0, True), message
    for command in commands.split(" && "):
        code, message = place.run(*command.split()[1:])
        assert code == 0, message
    assert place.queue("%l") == ["20:00"]
    assert "to apply" not in place.submit(_SWEEP, "slurm.time_limit=20min")[1]


@pytest.mark.fault(35)
def test_a_job_that_can_never_start_is_withdrawn(place: Place) -> None:
    """By the disks of nodes, which only Slurm knows."""
    code, message = place.submit("slurm.partition=short", "slurm.extra={tmp: 999G}")
    assert code == 65
    assert "slurm: Slurm accepts the job, but never starts it: BadConstraints" in message
    assert "slurm.extra.tmp: 999G" in message
    assert (place.runs(), place.queue(), place.records()) == ([], [], [])


def test_more_runs_than_an_array_may_hold_make_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Settings(accounting=False, max_array_size=2)) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        for place in _place(tmp_path, cluster, monkeypatch):
            code, said = place.submit("sweep={grid: {seed: [1, 2, 3, 4, 5]}, max_parallel: 1}")
            assert code == 0, said
            ids = [line.partition("_")[2] for line in place.queue("%i")]
            assert sorted(ids) == ["", "[0-1%1]", "[0-1%1]"]
            assert "max_parallel applies to each of the 3 jobs separately" in said
            assert len({jobs[0] for jobs in place.jobs().values()}) == 5


def test_runs_that_have_ended_go_on_in_one_array_as_they_are_asked_to(place: Place) -> None:
    assert place.submit(_SWEEP)[0] == 0
    first = _assert_one_array(place)
    code, said = place.run("resume", "tiny")
    assert (code, "is pending on Slurm" in said) == (1, True), said
    assert place.run("cancel", "tiny")[0] == 0
    code, said = place.run("resume", "tiny", "slurm.nodes=1", "slurm.time_limit=20min")
    assert code == 0, said
    assert "attempt 1 starts at step 0" in said
    (line,) = place.queue("%i %D %l")
    job, nodes, limit = line.split()
    second = job.partition("_")[0]
    assert (job, nodes, limit) == (f"{second}_[0-2%2]", "1", "20:00")
    jobs = list(place.jobs().values())  # in the order of ids, which is resume's
    assert sorted(each[0] for each in jobs) == [f"{first}_{task}" for task in range(3)]
    assert [each[1] for each in jobs] == [f"{second}_{task}" for task in range(3)]
    assert not any(run.cancelled.exists() for run in place.runs())
    assert {read_status(run).state for run in place.runs()} == {"pending"}
    code, said = place.submit(_SWEEP)
    assert (code, said.count("pending already")) == (0, 3), said


def test_a_refused_resume_leaves_runs_as_they_were(place: Place) -> None:
    assert place.submit()[0] == 0
    assert place.run("cancel", "tiny")[0] == 0
    (run,) = place.runs()
    before = [path.read_text() for path in (run.run, run.status, run.cancelled)]
    for change, words in (
        ("slurm.dependency=nope", "command line: slurm.dependency: Slurm refuses it"),
        (
            "slurm.partition=lo",
            "command line: slurm.partition: Slurm refuses it: invalid partition specified: lo",
        ),
    ):
        code, said = place.run("resume", "tiny", change)
        assert (code, words in said) == (65, True), said
    assert [path.read_text() for path in (run.run, run.status, run.cancelled)] == before
    assert place.queue() == []
    code, said = place.submit("slurm.time_limit=30min")
    assert code == 1
    assert f"hpc-train resume {run.folder.name} slurm.time_limit=30min" in said


@pytest.mark.fault(49)
def test_a_resume_killed_before_sbatch_is_finished_by_the_next_command(place: Place) -> None:
    assert place.submit(_SWEEP)[0] == 0
    assert place.run("cancel", "tiny")[0] == 0
    sbatch = "hpc_train.launchers.slurm.sbatch:sbatch"
    assert place.run("resume", "tiny", halt=Halt(sbatch, 1, "before"))[0] == -9
    code, said = place.submit(_SWEEP)
    assert (code, said.count("pending already")) == (0, 3), said
    (line,) = place.queue("%i")
    assert line.endswith("_[0-2%2]")
    assert [len(jobs) for jobs in place.jobs().values()] == [2, 2, 2]


def test_variables_of_sbatch_and_of_a_job_do_not_reach_the_new_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "high")
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "7")
    code, said = place.submit()
    assert code == 0, said
    (line,) = place.queue("%i %P")
    number, partition = line.split()
    assert partition == "low"
    assert "Requeue=1" in place.cluster.run("scontrol", "show", "job", number)
    assert os.environ["SLURM_JOB_ID"] == "77"
