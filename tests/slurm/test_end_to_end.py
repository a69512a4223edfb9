"""Runs on a real Slurm, disturbed in every way that Slurm knows: each ends by itself as a quiet one does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpc_train.launchers.slurm import commands, queue
from hpc_train.loggers.wandb import _named
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import EVENTS, exit_codes
from hpc_train.run.metric_rows import iter_rows
from tests.cli.commands import hpc_train
from tests.end_to_end.holding import Hold, held_compiler
from tests.end_to_end.runs import (
    OWN_TASK,
    PLANTED,
    SECRETS,
    assert_equal_to_the_bit,
    files_that_hold,
    found_runs,
    last_step,
    wait_for,
)
from tests.loggers.wandb_files import offline_rows, without_images
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.slurm.experiments import (
    ENVIRONMENT,
    EXPERIMENT,
    LIMIT_S,
    TWO_RANKS,
    account,
    command,
    job_of,
    job_states,
    records,
    see_it_preempted,
    standing,
    standing_of,
    start_now,
    submit,
    submit_one,
    succeed,
    wait_for_attempt_end,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.ordinary_user import OrdinaryUser
from tests.slurm.runs import high_job
from tests.waiting import HANG_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Four ranks, two by two. tests/end_to_end/test_replay.py continues from a checkpoint of each.
SHARED = (
    pytest.param("{strategy: hsdp, replicate: 2}", marks=pytest.mark.soak),
    pytest.param("{strategy: tensor, tensor: 2, shard: 2}", marks=pytest.mark.soak),
    "{strategy: pipeline, pipeline: 2, replicate: 2}",
)


@dataclass(frozen=True)
class Quiet:
    """Runs that nothing happened to, of the files of this page."""

    runs: QuietRuns

    def four(self, *overrides: str) -> RunPaths:
        return self.runs.of(*overrides, text=EXPERIMENT, ranks=4, environment=ENVIRONMENT)

    def two(self, *overrides: str) -> RunPaths:
        return self.runs.of(*overrides, text=TWO_RANKS, ranks=2, environment=ENVIRONMENT)


@pytest.fixture
def quiet(quiet_runs: QuietRuns) -> Quiet:
    return Quiet(quiet_runs)


def preempting(cluster: Cluster, paths: RunPaths) -> AbstractContextManager[str]:
    """A while in which the run's nodes are wanted by a job of the higher partition."""
    return high_job(cluster, records(paths)[-1].hosts)


def state(paths: RunPaths) -> str:
    """Return the run's state as ``status`` tells it."""
    return str(standing_of(paths)["state"])


def see_it_complete(paths: RunPaths, quiet: RunPaths, limit_s: float = LIMIT_S) -> None:
    ends = ("completed", "failed", "cancelled")
    assert wait_for_state(paths, *ends, limit_s=limit_s) == "completed", account(paths)
    wait_for_attempt_end(paths, paths.attempt_folders()[-1].number)
    assert_equal_to_the_bit(quiet, paths)
    wait_for(lambda: state(paths) == "completed", "status's word")


@dataclass
class Disturbed:
    """A run of two ranks that waits at a step until something is done to it, and begins again by itself."""

    cluster: Cluster
    paths: RunPaths
    hold: Hold

    @property
    def number(self) -> int:
        return len(self.paths.attempt_folders())

    def reach(self, step: int) -> None:
        self.hold.at(step)
        wait_for_step(self.paths, step)

    def see_the_end(self, *causes: str) -> None:
        assert wait_for_attempt_end(self.paths, self.number).cause in causes, account(self.paths)

    def see_the_next(self, number: int) -> None:
        wait_for(lambda: self.number > number, f"another attempt\n{account(self.paths)}", LIMIT_S)

    def is_preempted(self) -> None:
        """The run resumes on the other two nodes while the preempting job uses the first two."""
        number = self.number
        with preempting(self.cluster, self.paths):
            self.see_the_end("preemption")
            self.see_the_next(number)

    def reaches_the_time_limit(self) -> None:
        """Slurm looks each half a minute, and signals jobs that end within the lead and half a minute."""
        number, job = self.number, f"JobId={job_of(self.paths)}"
        begin = datetime.fromisoformat(records(self.paths)[-1].events["begin"])
        minutes = 1 + int((datetime.now(UTC) - begin).total_seconds() + 35) // 60
        self.cluster.run("scontrol", "update", job, f"TimeLimit={minutes}")
        self.see_the_end("time limit")
        self.cluster.run("scontrol", "update", job, "TimeLimit=30")
        self.see_the_next(number)

    def is_requeued_by_hand(self) -> None:
        number, job = self.number, job_of(self.paths)
        self.cluster.run("scontrol", "requeue", job)
        wait_for(lambda: job_states(self.cluster, job) == ["PENDING"], "the requeue", LIMIT_S)
        self.see_the_next(number)  # by itself, after the time for which Slurm holds it
        assert records(self.paths)[number - 1].cause == "requeue", account(self.paths)

    def loses_a_node(self) -> None:
        """The ranks live on without their daemons, and may save when Slurm ends what is left of the job."""
        number = self.number
        self.cluster.kill_node(records(self.paths)[-1].hosts[-1])
        start_now(self.cluster, self.paths)
        self.see_the_next(number)
        assert records(self.paths)[number - 1].cause in {"lost", "crash", "preemption"}, account(self.paths)

    def is_cancelled_and_resumed(self) -> None:
        folder = self.paths.folder
        assert command(folder.parents[2], "cancel", folder).code == 0
        assert state(self.paths) == "cancelled"
        done = command(folder.parents[2], "resume", folder)
        assert done.code == 0, done.err


@pytest.mark.fault(1, 14)
@pytest.mark.parametrize(
    ("strategy", "fixture", "disturbances"),
    [
        (
            "ddp",
            "cluster",
            (
                Disturbed.is_preempted,
                Disturbed.reaches_the_time_limit,
                Disturbed.is_preempted,
                Disturbed.is_requeued_by_hand,
                Disturbed.is_cancelled_and_resumed,
                Disturbed.loses_a_node,
            ),
        ),
        (
            "fsdp",
            "cluster_without_accounting",
            (Disturbed.is_preempted, Disturbed.loses_a_node),
        ),
    ],
    ids=["ddp with accounting", "fsdp without accounting"],
)
def test_whatever_slurm_does_to_a_job_changes_no_bit(
    strategy: str,
    fixture: str,
    disturbances: tuple[Callable[[Disturbed], None], ...],
    quiet: Quiet,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    cluster: Cluster = request.getfixturevalue(fixture)
    parallel = f"parallel.strategy={strategy}"
    own = ("checkpoint.every_steps=7", "slurm.signal_lead_s=30")
    with Hold(tmp_path, 5) as hold:
        paths = submit_one(tmp_path, parallel, *own, hold.override, text=TWO_RANKS)
        run = Disturbed(cluster, paths, hold)
        for step, disturb in enumerate(disturbances, start=1):
            run.reach(7 * step + 2)
            disturb(run)
    see_it_complete(paths, quiet.two(parallel))
    first = records(paths)[0]
    assert list(first.events) == list(EVENTS), "every part, in order"
    times = [datetime.fromisoformat(time) for time in first.events.values()]
    assert times == sorted(times)
    took_s = (times[EVENTS.index("saved")] - times[EVENTS.index("signal")]).total_seconds()
    assert first.save_s is not None and 0 < first.save_s <= took_s + 1
    assert first.exit_codes == [75] * first.ranks
    assert exit_codes(paths.attempt(1)) == {0: 75}, "a thousand ranks need not all say so"
    assert first.reason == f"preempted at step {first.saved_step}"
    is_cancelled = Disturbed.is_cancelled_and_resumed in disturbances
    assert len({record.job for record in records(paths)}) == 1 + is_cancelled, account(paths)
    assert records(paths)[-1].cause == "completed"
    assert "submitit" not in paths.attempt_folders()[-1].log(0).read_text()


def test_an_extended_run_that_is_preempted_equals_one_of_the_full_length(
    cluster: Cluster, quiet: Quiet, tmp_path: Path
) -> None:
    settings = ("optimization.schedule={name: constant}", "evaluation.every_steps=7")
    short, long = (f"optimization.steps={steps}" for steps in (7, 14))
    old = submit_one(tmp_path, *settings, short, text=TWO_RANKS)
    wait_for_state(old, "completed")
    with Hold(tmp_path, 10) as hold:
        succeed(tmp_path, "resume", old.folder, long, hold.override)
        (paths,) = set(found_runs(tmp_path)) - {old}
        wait_for_step(paths, 10)
        see_it_preempted(cluster, paths)
    see_it_complete(paths, quiet.two(*settings, long))


@pytest.mark.fault(55)
def test_a_preemption_during_compilation_is_requeued(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in test_signals_everywhere.py: make test compiles each kernel once.
    model = 'model={name: "tests.end_to_end.parts:layered"}'
    with held_compiler(tmp_path) as (compiler, is_called):
        monkeypatch.setenv("CXX", str(compiler))
        short = ("optimization.steps=4", "optimization.schedule={name: constant}", "evaluation=null")
        paths = submit_one(tmp_path, model, "compile=true", *short, text=TWO_RANKS)
        wait_for(is_called, account(paths), LIMIT_S)
        first = see_it_preempted(cluster, paths)
    assert "first_step" not in first.events, account(paths)
    wait_for_state(paths, "completed")
    assert wait_for_attempt_end(paths, 2).cause == "completed", account(paths)


@pytest.mark.fault(1)
@pytest.mark.parametrize("parallel", SHARED, ids=lambda keys: keys.partition(",")[0].partition(" ")[2])
def test_a_preemption_changes_no_bit_of_a_shared_model(
    parallel: str, cluster: Cluster, quiet: Quiet, tmp_path: Path
) -> None:
    # Few blocks and steps, as tensor's take tenths of a second of both cores.
    model = 'model={name: "tests.end_to_end.paced:vit", args: {depth: 2}}'
    steps = ("optimization.steps=10", "optimization.schedule.warmup_steps=4", "evaluation.every_steps=8")
    overrides = (model, f"parallel={parallel}", *steps)
    with Hold(tmp_path, 5) as hold:
        paths = submit_one(tmp_path, *overrides, hold.override)
        wait_for_step(paths, 5)
        see_it_preempted(cluster, paths)
    see_it_complete(paths, quiet.four(*overrides))
    assert [record.cause for record in records(paths)] == ["preemption", "completed"]


SWEEP = (
    TWO_RANKS.replace("nodes: 2", "nodes: 1").replace("steps: 60", "steps: 21")
    + "sweep: {grid: {seed: [1, 2, 3, 4, 5]}, max_parallel: 1}\n"
)


def test_a_sweep_is_one_throttled_array(cluster: Cluster, tmp_path: Path) -> None:
    """Five runs of a node each, of four: one at a time, then, throttled to two, two at a time."""
    told = submit(tmp_path, text=SWEEP, pace_s=0.05)
    runs = found_runs(tmp_path)
    (array,) = {job_of(paths).partition("_")[0] for paths in runs}
    assert array in told.err and sorted(job_of(paths) for paths in runs) == [f"{array}_{n}" for n in range(5)]
    seen: list[int] = []

    def running() -> int:
        seen.append(job_states(cluster, array).count("RUNNING"))
        return seen[-1]

    def completed() -> int:
        return sum(json.loads(paths.status.read_text())["state"] == "completed" for paths in runs)

    wait_for(lambda: running() > 0 and completed() >= 2, "two runs done", LIMIT_S)
    assert max(seen) == 1
    states = {run["state"] for run in standing(tmp_path)}
    assert states <= {"pending", "running", "completed"} and "completed" in states
    cluster.run("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=2", check=False)
    wait_for(lambda: running() >= 0 and completed() == 5, "all runs done", LIMIT_S)
    assert max(seen) == 2
    assert {run["state"] for run in standing(tmp_path)} == {"completed"}


def test_status_is_right_in_every_state(cluster: Cluster, tmp_path: Path) -> None:
    hold = Hold(tmp_path, 3)
    with high_job(cluster, NODES) as blocker:
        wait_for(lambda: job_states(cluster, blocker) == ["RUNNING"], "the blocker")
        paths = submit_one(tmp_path, hold.override, text=TWO_RANKS)
        assert state(paths) == "pending"
        cluster.run("scontrol", "hold", job_of(paths))
        wait_for(lambda: "eld" in str(standing(tmp_path)[0]["reason"]), "the word held")
        assert state(paths) == "pending"
        cluster.run("scontrol", "release", job_of(paths))
    wait_for_step(paths, 3)
    wait_for(lambda: state(paths) == "running", "running")
    with preempting(cluster, paths):
        wait_for_attempt_end(paths, 1)
        wait_for(lambda: state(paths) == "requeued", "requeued")
    hold.release()
    wait_for_state(paths, "completed")
    wait_for(lambda: state(paths) == "completed", "completed")


@pytest.mark.fault(46)
def test_scancel_is_final_in_every_state(
    cluster_without_accounting: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scancel itself while running, held and pending; by ``cancel`` while running and requeued.

    Nobody knows the last task then; with accounting test_status.py holds it.
    """
    cluster = cluster_without_accounting
    monkeypatch.setattr(queue, "SECOND_LOOK_S", 3.0)  # rather than a minute; in this process alone
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    commands.config.cache_clear()

    def state(paths: RunPaths) -> str:
        commands.forget_answer()
        return str(json.loads(hpc_train("status", "--json", paths.folder).out)["runs"][0]["state"])

    text = TWO_RANKS.replace("nodes: 2", "nodes: 1")
    text += "sweep: {grid: {seed: [1, 2, 3, 4, 5]}, max_parallel: 3}\n"
    submit(tmp_path, text=text, pace_s=0.5)
    runs = sorted(found_runs(tmp_path), key=job_of)
    for paths in runs[:3]:
        wait_for_step(paths, 2)
    cluster.run("scancel", job_of(runs[0]))  # running: an array's task
    cluster.run("scancel", job_of(runs[4]))  # pending; the array's last task
    state(runs[4])  # the first of two looks: Slurm forgets such a task at once
    cluster.run("scontrol", "requeue", job_of(runs[1]))
    wait_for(lambda: job_states(cluster, job_of(runs[1])) == ["PENDING"], "the requeue")
    cluster.run("scancel", job_of(runs[1]))  # requeued
    succeed(tmp_path, "cancel", runs[2].folder)  # running
    for paths in (runs[0], runs[1], runs[2], runs[4]):
        wait_for(lambda paths=paths: not job_states(cluster, job_of(paths)), "its end")
        wait_for(
            lambda paths=paths: state(paths) == "cancelled", f"cancelled\n{account(paths)}", HANG_LIMIT_S
        )
        assert last_step(paths) < 60
    wait_for_step(runs[3], 2)  # the one that nobody cancelled
    succeed(tmp_path, "cancel", "digits")
    assert state(runs[3]) == "cancelled"
    again = command(tmp_path, "submit", tmp_path / "exp.yaml")
    assert again.code == 1 and "cancelled" in again.err
    assert not cluster.run("squeue", "--noheader").strip()


CRASHING = TWO_RANKS.replace("tests.end_to_end.paced:net", "tests.slurm.crashing:net")


@pytest.mark.fault(16, 36, 56)
def test_of_three_more_attempts_after_a_crash_the_first_is_in_place(cluster: Cluster, tmp_path: Path) -> None:
    paths = submit_one(tmp_path, "slurm.nodes=1", text=CRASHING)
    assert wait_for_state(paths, "failed", "completed") == "failed"
    assert [record.cause for record in records(paths)] == ["crash"] * 4
    assert [record.in_place for record in records(paths)] == [False, True, False, False]
    wait_for(lambda: not job_states(cluster, job_of(paths)), "the job's end")
    shown = command(tmp_path, "status", paths.folder)
    assert "Traceback of your code (most recent call last)" in shown.out
    assert "tests/slurm/crashing.py" in shown.out and "ValueError: on purpose" in shown.out
    (run,) = standing(tmp_path)
    assert run["state"] == "failed" and "ValueError: on purpose" in run["reason"]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        pytest.param("model.args={no_such_argument: 1}", "no_such_argument", id="file"),
        pytest.param("data={name: imagefolder, root: /not/here}", "/not/here", id="data"),
    ],
)
def test_a_bad_file_is_not_requeued(override: str, named: str, cluster: Cluster, tmp_path: Path) -> None:
    paths = submit_one(tmp_path, override, text=TWO_RANKS)
    assert wait_for_state(paths, "failed", "completed") == "failed"
    assert [record.cause for record in records(paths)] == ["user error"]
    assert named in standing(tmp_path)[0]["reason"]


NET = """\
import os
import time
from torch import nn


class Net(nn.Sequential):
    def forward(self, images):
        if os.environ.get("HPC_TRAIN_ATTEMPT") == "1":
            time.sleep(0.15)
        return super().forward(images)


def net(num_classes):
    return Net(nn.Flatten(), nn.Linear(1024, num_classes))
"""


@pytest.mark.fault(39)
def test_an_ordinary_user_is_preempted_and_edits_code_meanwhile(
    cluster: Cluster, ordinary_user: OrdinaryUser
) -> None:
    """In a home of mode 0700, without git, with relative paths; the snapshot keeps the edit out."""
    if ordinary_user.python is None:
        pytest.skip("this machine has no Python that an ordinary user may execute")
    home, name = ordinary_user.home, ordinary_user.name
    text = TWO_RANKS.replace("tests.end_to_end.paced:net", "net:net").replace("steps: 60", "steps: 30")
    text = text.replace("nodes: 2", "nodes: 1")  # no rank of another user can be forked
    for file, content in {"exp.yaml": text, "net.py": NET}.items():
        (home / file).write_text(content)
        shutil.chown(home / file, name)

    def hpc_train(*words: str) -> str:
        command = ["env", "-C", str(home), str(ordinary_user.python), "-m", "hpc_train", *words]
        own = {"HPC_TRAIN_RUNS": "runs", "HPC_TRAIN_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
        variables = ordinary_user.environment | own
        return cluster.run(*command, user=name, variables=variables)

    hpc_train("submit", "exp.yaml")
    (paths,) = found_runs(home)
    wait_for_step(paths, 3)
    (home / "net.py").write_text("raise RuntimeError('edited after submit')\n")
    with preempting(cluster, paths):
        wait_for_attempt_end(paths, 1)
    wait_for_state(paths, "completed", "failed")
    (run,) = json.loads(hpc_train("status", "--json"))["runs"]
    assert (run["state"], run["attempt"]) == ("completed", 2), account(paths)
    assert run["restart"]["cause"] == "preemption"
    assert paths.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.fault(1, 30, 45)
def test_wandb_keeps_one_run_over_attempts_without_a_network(
    cluster: Cluster, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is a user's own; the preempted run is bitwise identical to an uninterrupted one."""
    steps = ("optimization.steps=12", "optimization.schedule.warmup_steps=4", "evaluation.every_steps=8")
    own = (*OWN_TASK, *steps)
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    wandb = "logging={every_steps: 1, wandb: {project: slurm}}"
    with Hold(tmp_path, 5) as hold:
        paths = submit_one(tmp_path, *own, wandb, hold.override, text=TWO_RANKS)
        wait_for_step(paths, 5)
        wait_for(lambda: any(paths.wandb.rglob("offline-run-*")), "wandb's start", LIMIT_S)
        with preempting(cluster, paths):
            wait_for_attempt_end(paths, 1)
    see_it_complete(paths, quiet.two(*own))
    run_id = json.loads(paths.run.read_text())["wandb_id"]
    offline = sorted(path.name for path in paths.wandb.rglob("offline-run-*") if path.is_dir())
    assert len(offline) == 2 and all(name.endswith(f"-{run_id}") for name in offline), offline
    file = paths.wandb / offline[-1] / f"run-{run_id}.wandb"
    assert without_images(offline_rows(file)) == [_named(row) for row in iter_rows(paths.metrics)]
    assert {path.suffix for path in paths.siblings.submissions.rglob("*")} >= {".pkl", ".sh", ".out"}
    assert files_that_hold(paths.siblings.folder.parent, PLANTED) == []
