"""``status``, ``logs`` and ``cancel`` on a real Slurm. Jobs are scripts; run folders are made by hand."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import ExitCode
from hpc_train.launchers.slurm import commands, queue, queue_status
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from hpc_train.run.files import write_json
from hpc_train.run.run_status import read_status
from tests.cli.commands import hpc_train, python
from tests.launchers.slurm.queued import add_job, begin, queued_run
from tests.slurm.cluster import Cluster
from tests.slurm.host import program_path, slurm_version
from tests.waiting import HANG_LIMIT_S, came_true

pytestmark = [pytest.mark.slow]

#: On a machine that is busy with other tests.
_LIMIT_S = HANG_LIMIT_S
_SLEEPS = "sleep 600"
#: As a rank whose save takes too long: only SIGKILL ends it.
_STUBBORN = "trap '' TERM; for second in $(seq 600); do sleep 1; done"


@pytest.fixture(autouse=True)
def _own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    commands.config.cache_clear()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def _sbatch(cluster: Cluster, folder: Path, body: str, *options: str) -> str:
    """Submit a script from a submission's folder, as submitit would; return the job's number."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "script.sh"
    script.write_text(f"#!/bin/bash\n{body}\n")
    output = "%A_%a" if any(option.startswith("--array") for option in options) else "%j"
    said = cluster.run(
        "sbatch", "--parsable", "--job-name=small", f"--output={folder}/{output}_0_log.out", "--mem=100",
        "--ntasks=1", *options, str(script),
    )  # fmt: skip
    return said.strip()


def _submitted(cluster: Cluster, runs: Path, body: str, *options: str) -> RunPaths:
    """Return a run whose job is queued."""
    paths = queued_run(runs, None)
    job = _sbatch(cluster, paths.siblings.submissions / "t1", body, *options)
    write_json(paths.siblings.submission("t1").record, {"job_id": job, "state": "released"})
    add_job(paths, job)
    return paths


def _array(cluster: Cluster, runs: Path, body: str, count: int, *options: str) -> list[RunPaths]:
    """Return runs that are the tasks of one array."""
    found = [queued_run(runs, None, run_id=f"r{task}") for task in range(count)]
    folder = found[0].siblings.submissions / "t1"
    job = _sbatch(cluster, folder, body, f"--array=0-{count - 1}", *options)
    for task, paths in enumerate(found):
        add_job(paths, f"{job}_{task}")
    return found


def _status(*words: str | Path) -> list[dict[str, Any]]:
    done = hpc_train("status", "--json", *words)
    assert done.code == 0
    found = json.loads(done.out)["runs"]
    assert isinstance(found, list)
    return found


def _fresh(*words: str | Path) -> list[dict[str, Any]]:
    from hpc_train.launchers.slurm import commands

    commands.forget_answer()
    return _status(*words)


def _wait(is_so: Callable[[], object], what: str) -> None:
    assert came_true(is_so, _LIMIT_S), f"no {what} within {_LIMIT_S:g} s"


def _state(cluster: Cluster, job: str) -> str:
    return cluster.run("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%T", check=False).strip()


def _job(paths: RunPaths) -> str:
    return str(json.loads(paths.run.read_text())["slurm_job_ids"][-1])


def _wait_for(cluster: Cluster, paths: RunPaths, state: str) -> None:
    _wait(lambda: _state(cluster, _job(paths)) == state, f"{state} job")


def _start_soon(cluster: Cluster, paths: RunPaths) -> None:
    """Lift the two minutes for which Slurm holds what it has requeued.

    Not at once: a node refuses a job that starts anew in the second in which it ended ("Job credential
    revoked"), and Slurm fails it for good then.
    """
    cluster.run("scontrol", "update", f"JobId={_job(paths)}", "StartTime=now+3")
    _wait_for(cluster, paths, "RUNNING")


def _show(run: dict[str, Any]) -> tuple[str, str | None]:
    return run["state"], run["reason"]


def test_a_held_array_waits_is_throttled_and_starts(cluster: Cluster, runs: Path) -> None:
    paths = _array(cluster, runs, _SLEEPS, 3, "--array=0-2%1", "--hold")
    number = _job(paths[0]).partition("_")[0]
    held = _fresh("small")
    assert [run["job"] for run in held] == [f"{number}_{task}" for task in range(3)]
    assert {_show(run) for run in held} == {
        ("pending", f"held; `scontrol release {number}_{task}` lets it start") for task in range(3)
    }
    commands.release(number)
    _wait_for(cluster, paths[0], "RUNNING")
    assert _fresh("small")[0]["reason"].startswith("starting on n")
    waiting = [("pending", "waits: JobArrayTaskLimit")] * 2
    _wait(lambda: [_show(run) for run in _fresh("small")[1:]] == waiting, "reason")
    begin(paths[0], _job(paths[0]))
    assert _show(_fresh("r0")[0]) == ("running", None)


@pytest.mark.fault(35)
def test_a_job_that_can_never_start_says_so(cluster: Cluster, runs: Path) -> None:
    paths = _submitted(cluster, runs, _SLEEPS, "--partition=short", "--time=60")
    words = "never starts: PartitionTimeLimit; cancel it, then resume it with another slurm.time_limit"
    # For a moment Slurm only says PartitionConfig.
    _wait(lambda: _show(_fresh(paths.folder)[0]) == ("pending", words), "reason")


def test_a_job_that_fails_before_any_rank_ends_the_run_and_its_output_is_shown(
    cluster: Cluster, runs: Path
) -> None:
    paths = _submitted(cluster, runs, "echo 'no such module: cuda/99'; exit 3")
    _wait(lambda: _fresh(paths.folder)[0]["state"] == "failed", "verdict")
    reason = read_status(paths).reason
    assert reason is not None and reason.startswith(f"job {_job(paths)} ended before any rank started")
    assert "exit code 3" in reason
    done = python("-m", "hpc_train", "logs", "-f", "abc")
    assert (done.code, done.out) == (0, "no such module: cuda/99\n")


def test_scancel_and_requeue_by_hand_are_seen(cluster: Cluster, runs: Path) -> None:
    paths = _submitted(cluster, runs, _SLEEPS)
    _wait_for(cluster, paths, "RUNNING")
    begin(paths, _job(paths), step=4)
    cluster.run("scontrol", "requeue", _job(paths))
    _wait_for(cluster, paths, "PENDING")
    assert _fresh(paths.folder)[0]["state"] == "requeued"
    words = "requeued by hand at step 4; starts "
    # For a moment Slurm says Priority, before it has put the start off.
    _wait(lambda: _fresh(paths.folder)[0]["reason"].startswith(words), "reason")
    _start_soon(cluster, paths)
    assert "starting on n" in _fresh(paths.folder)[0]["reason"]
    begin(paths, _job(paths), restart=1, step=4)
    assert _show(_fresh(paths.folder)[0]) == ("running", None)
    cluster.run("scancel", _job(paths))
    _wait(lambda: _fresh(paths.folder)[0]["state"] != "running", "end")
    assert _show(_status(paths.folder)[0]) == ("cancelled", "scancel")
    record = read_record(paths.attempt(2))
    assert record is not None and (record.cause, record.reason) == ("cancelled", "scancel")


@pytest.mark.fault(14)
def test_a_node_that_dies_makes_the_run_wait_and_never_fail(cluster: Cluster, runs: Path) -> None:
    paths = _submitted(cluster, runs, _SLEEPS)
    _wait_for(cluster, paths, "RUNNING")
    begin(paths, _job(paths), step=4)
    node = cluster.run("squeue", "-h", "-j", _job(paths), "-o", "%N").strip()
    cluster.kill_node(node, with_jobs=True)
    try:
        _wait(lambda: _fresh(paths.folder)[0]["state"] != "running", "verdict")
        assert read_status(paths).state == "requeued"
        assert read_status(paths).reason == "ended without a word at step 4"
    finally:
        cluster.start_node(node)


# Without accounting test_end_to_end.py holds it in make test.
@pytest.mark.fault(46)
@pytest.mark.parametrize(
    "any_cluster", ["accounting", pytest.param("no accounting", marks=pytest.mark.soak)], indirect=True
)
def test_cancel_is_final_in_every_state(any_cluster: Cluster, runs: Path) -> None:
    """Held, waiting, running (and deaf to SIGTERM), requeued; the array's last task, and not its siblings."""
    held, waiting, running, requeued, sibling, last = _array(any_cluster, runs, _STUBBORN, 6, "--hold")
    for paths in (running, requeued, sibling, last):
        commands.release(_job(paths))
    any_cluster.run("scontrol", "update", f"JobId={_job(waiting)}", "StartTime=now+1hour")
    commands.release(_job(waiting))
    for paths in (running, requeued, sibling, last):
        _wait_for(any_cluster, paths, "RUNNING")
        begin(paths, _job(paths), step=4)
    any_cluster.run("scontrol", "requeue", _job(requeued))
    _wait_for(any_cluster, requeued, "PENDING")

    # All others have been split off it: newer ones show a cancelled rest by the array's number, as no task.
    is_shown = slurm_version() < (25, 5) or any_cluster.settings.accounting
    last_of_array = "CANCELLED" if is_shown else queue.FORGOTTEN

    done = hpc_train("cancel", "r0", "r1", "r2", "r3", "r5")
    assert (done.code, done.out) == (0, ""), done.err
    for paths in (held, waiting, running, requeued, last):
        assert (read_status(paths).state, read_status(paths).reason) == ("cancelled", "hpc-train cancel")
        expected = last_of_array if paths == held else "CANCELLED"
        key = (_job(paths), None)
        assert queue.ask([key])[key].state == expected
    record = read_record(last.attempt(1))
    assert record is not None and record.cause == "cancelled"
    assert _state(any_cluster, _job(sibling)) == "RUNNING"
    assert _show(_fresh("r4")[0]) == ("running", None)

    again = hpc_train("cancel", "small")
    assert again.code == 0
    assert again.err.count("cancelled already; nothing to cancel") == 5
    assert read_status(sibling).state == "cancelled"


def test_a_job_of_the_same_number_that_is_not_the_runs_is_left_alone(
    cluster: Cluster, runs: Path, tmp_path: Path
) -> None:
    paths = queued_run(runs, None)
    other = cluster.run("sbatch", "--parsable", "--job-name=precious", "-o", "/dev/null", "--wrap", _SLEEPS)
    add_job(paths, other.strip())
    done = hpc_train("cancel", "abc")
    assert "is not its own, but precious: it is left alone" in done.err
    assert _state(cluster, other.strip()) in {"PENDING", "RUNNING"}


@pytest.mark.fault(33)
def test_without_slurmctld_status_gives_the_folders_word_and_cancel_is_kept_for_later(
    cluster: Cluster, runs: Path
) -> None:
    paths = _submitted(cluster, runs, _SLEEPS)
    _wait_for(cluster, paths, "RUNNING")
    begin(paths, _job(paths), step=4)
    with cluster.without("slurmctld"):
        done = hpc_train("status")
        assert done.code == 0
        assert "running" in done.out
        assert done.err.count("Slurm does not answer") == 1
        refused = hpc_train("cancel", "abc")
        assert refused.code == ExitCode.NO_SCHEDULER
        assert "abc: marked as cancelled" in refused.err and f"scancel {_job(paths)}" in refused.err
        assert paths.cancelled.exists() and read_status(paths).state == "running"
    assert hpc_train("cancel", "abc").code == 0
    assert read_status(paths).state == "cancelled"


@pytest.mark.fault(34)
def test_what_slurmctld_has_dropped_is_known_by_accounting(cluster: Cluster, runs: Path) -> None:
    ran, waited, *_ = _array(cluster, runs, "exit 3", 4, "--array=0-3%1", "--hold")
    commands.release(_job(ran))
    _wait_for(cluster, ran, "FAILED")
    number = _job(ran).partition("_")[0]

    def told() -> str:
        return cluster.run("sacct", "--allocations", "--noheader", f"--jobs={number}", "--format=state")

    # Accounting hears of all a moment later; what it has not heard of before it is cancelled, it may never.
    _wait(lambda: {"FAILED", "PENDING"} <= set(told().split()), "word of accounting")
    cluster.run("scancel", number)
    ids = {_job(ran), _job(waited), f"{number}_3"}

    def ended() -> dict[str, str]:
        return {job: state.state for job, state in queue._sacct(ids)[0].items()}

    _wait(lambda: sorted(ended().values()) == ["CANCELLED", "CANCELLED", "FAILED"], "word of accounting")


@pytest.mark.fault(34)
def test_a_job_that_nobody_knows_any_more_ends_its_run(
    any_cluster: Cluster, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = queued_run(runs, "987654")
    begin(paths, "987654")
    (run,) = _status(paths.folder)
    assert run["state"] == "running" and "Slurm does not list job 987654 now" in run["reason"]
    monkeypatch.setattr(queue, "SECOND_LOOK_S", 0.0)  # a minute later
    monkeypatch.setattr(queue_status, "_ALIVE_S", -1.0)  # no heartbeat for two minutes
    (run,) = _status(paths.folder)
    assert run["state"] == "failed"
    assert "job 987654: the job is gone, and Slurm has forgotten how it ended" in run["reason"]


def test_a_watch_over_many_runs_is_one_squeue(
    cluster: Cluster, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _array(cluster, runs, _SLEEPS, 50, "--hold")
    calls = tmp_path / "calls"
    counting = tmp_path / "bin" / "squeue"
    counting.parent.mkdir()
    counting.write_text(f'#!/bin/bash\necho >> {calls}\nexec {program_path("squeue")} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{counting.parent}:{os.environ['PATH']}")
    start = time.monotonic()
    for _ in range(5):
        assert len(_status("small")) == 50
    periods = 1 + int((time.monotonic() - start) // 10)
    assert len(calls.read_text().splitlines()) <= periods
