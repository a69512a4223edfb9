"""The scripts of ``examples/programs`` on two nodes of a real Slurm survive all that Slurm does to a run.

Each runs unchanged, with ``resume`` alone, and with a session. They run side by side under the same faults,
one after the other, since most of the time is Slurm's. They end with the weights of the plain script under
torchrun, without hpc-train.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.checkpoints import committed
from hpc_train.run.metric_rows import iter_rows
from tests.end_to_end.runs import found_runs, hpc_train, last_step, wait_for
from tests.loggers.wandb_files import read_run
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    LIMIT_S,
    account,
    job_of,
    records,
    start_now,
    wait_for_attempt_end,
    wait_for_state,
)
from tests.slurm.runs import high_job
from tests.waiting import HANG_LIMIT_S
from tests.workloads.examples import MODES, NAMES, copied, same_weights, torchrun, weights
from tests.workloads.programs import HELD, forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, SAVE_EVERY = 50, 5
OVERRIDES = (
    "slurm={partition: low, nodes: 2, ranks_per_node: 1, time_limit: 2min, signal_lead_s: 20}",
    f"program.args.steps={STEPS}",
    f"program.args.save-every={SAVE_EVERY}",
    "recovery.hang_after_min=60",
)
#: The script with an option to log to wandb. Slurm's signals end wandb's process, too, so that with a session
#: its next call may raise before the save.
LOGGED = "gpt"
#: Runs that are disturbed side by side: a script and its mode. ``make test-full`` has all of them.
SAMPLED = (("gpt", "plain"), ("gan", "session"))
BOTH_MODES = [tuple((name, mode) for mode in MODES) for name in NAMES]
#: Their own checkpoints contain no state of random number generators.
INEXACT = ("lightning",)


class Disturbed:
    """A run of an example whose attempts wait after the step behind their first checkpoint."""

    def __init__(self, name: str, mode: str, folder: Path) -> None:
        self.name, self.has_session = name, mode == "session"
        self.held = folder / "held"
        code = copied(name, folder / "code")
        self.held.mkdir()
        (self.held / "after").write_text(str(SAVE_EVERY + 3))
        script = "train_session.py" if self.has_session else "train.py"
        words = [*forked(code, script), f"program.env.HELD={self.held}"]
        self.logs = name == LOGGED and not self.has_session
        words += ["program.args.wandb=true"] if self.logs else []
        self.environment = ENVIRONMENT | {"HPC_TRAIN_RUNS": str(folder / "runs")}
        done = hpc_train("submit", f"{mode}.yaml", *OVERRIDES, *words, cwd=code, **self.environment)
        assert done.code == 0, done.err
        (self.paths,) = found_runs(folder)
        #: The last step that each attempt has shown.
        self.shown: list[int] = []

    def __str__(self) -> str:
        return f"{self.name}, {'session' if self.has_session else 'plain'}\n{account(self.paths)}"

    @property
    def attempt(self) -> int:
        return len(self.shown) + 1

    def is_held(self) -> bool:
        return all((self.held / f"reached-{self.attempt}-{rank}").exists() for rank in (0, 1))

    def process(self, rank: int) -> int:
        """Return the process of the rank's script, on whichever node it is."""
        wanted = {f"HPC_TRAIN_RUN={self.paths.folder}".encode(), f"RANK={rank}".encode()}
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                is_script = HELD.name.encode() in (folder / "cmdline").read_bytes().split(b"\0")
                if is_script and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        (process,) = found
        return process

    def see_the_end(self) -> AttemptRecord:
        """Wait for the end of the attempt; note what it has shown."""
        record = wait_for_attempt_end(self.paths, self.attempt)
        self.shown.append(last_step(self.paths))
        return record

    def command(self, name: str) -> None:
        done = hpc_train(name, self.paths.folder, **self.environment)
        assert done.code == 0, done.err

    def lost(self) -> list[int]:
        """Return the number of steps that each attempt but the last has lost."""
        first: dict[int, int] = {}
        for row in iter_rows(self.paths.metrics):
            first.setdefault(row["attempt"], row["step"])
        return [shown + 1 - first[attempt] for attempt, shown in enumerate(self.shown, start=2)]


def hold_all(runs: Sequence[Disturbed]) -> None:
    """Wait until the next attempt of each run has been started and waits."""
    for run in runs:
        wait_for(run.is_held, f"the held step of attempt {run.attempt} of {run}", LIMIT_S)


def see_ends(runs: Sequence[Disturbed], *causes: str) -> None:
    for run in runs:
        assert run.see_the_end().cause in causes, str(run)


def preempt(cluster: Cluster, runs: Sequence[Disturbed]) -> None:
    nodes = sorted({host for run in runs for host in records(run.paths)[-1].hosts})
    with high_job(cluster, nodes):
        see_ends(runs, "preemption")


def lose_nodes(cluster: Cluster, runs: Sequence[Disturbed]) -> None:
    for node in {records(run.paths)[-1].hosts[-1] for run in runs}:
        cluster.kill_node(node, with_jobs=True)
    for run in runs:
        run.shown.append(last_step(run.paths))
        start_now(cluster, run.paths)  # Slurm itself has requeued it


def cancel(runs: Sequence[Disturbed]) -> None:
    for run in runs:
        run.command("cancel")
    for run in runs:
        assert wait_for_state(run.paths, "cancelled") and run.see_the_end().cause == "cancelled", str(run)
        if run.has_session:
            assert committed(run.paths)[0].step == run.shown[-1], str(run)
        (run.held / "after").unlink()
        run.command("resume")


def reach_the_time_limit(cluster: Cluster, runs: Sequence[Disturbed]) -> None:
    """Shorten the limit if Slurm's next look, each half a minute, comes before it; else wait for longer."""
    hold_all(runs)
    for run in runs:
        begin = datetime.fromisoformat(records(run.paths)[-1].events["begin"])
        if (datetime.now(UTC) - begin).total_seconds() < 25:
            cluster.run("scontrol", "update", f"JobId={job_of(run.paths)}", "TimeLimit=1")
    left = list(runs)

    def is_lifted() -> bool:
        """Lift the limit of each run as soon as its attempt has ended; tell whether all are lifted."""
        for run in list(left):
            if (record := read_record(run.paths.attempt(run.attempt))) and record.end is not None:
                cluster.run("scontrol", "update", f"JobId={job_of(run.paths)}", "TimeLimit=30")
                left.remove(run)
        return not left

    wait_for(is_lifted, f"the time limit of {runs[0]}", LIMIT_S)
    see_ends(runs, "time limit")


def see_it_complete(run: Disturbed, reference: Path) -> None:
    assert wait_for_state(run.paths, "completed", "failed") == "completed", str(run)
    if run.has_session or run.name not in INEXACT:
        assert same_weights(weights(run.paths.work), weights(reference)), str(run)
    assert [row["step"] for row in iter_rows(run.paths.metrics)] == list(range(1, STEPS + 1))
    time_limit, preempted, killed, node, cancelled = run.lost()
    assert 0 <= killed <= SAVE_EVERY and 0 <= node <= SAVE_EVERY, str(run)
    for lost in (time_limit, preempted, cancelled):
        assert 0 <= lost <= (0 if run.has_session else SAVE_EVERY), str(run)
    if run.logs:
        assert_one_run_of_wandb(run)


def assert_one_run_of_wandb(run: Disturbed) -> None:
    """Each attempt has added to the same run of wandb, up to the last step."""
    wandb_id = json.loads(run.paths.run.read_text())["wandb_id"]
    files = sorted(run.paths.work.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == run.attempt and {file.stem for file in files} == {f"run-{wandb_id}"}
    assert read_run(files[-1])[1][-1]["_step"] == STEPS


@pytest.mark.parametrize(
    "scripts",
    [SAMPLED, *(pytest.param(scripts, marks=pytest.mark.soak) for scripts in BOTH_MODES)],
    ids=lambda scripts: "-".join(dict.fromkeys(name for name, _ in scripts)),
)
def test_a_disturbed_example_ends_as_the_plain_script_alone(
    scripts: Sequence[tuple[str, str]], cluster: Cluster, tmp_path: Path
) -> None:
    runs = [Disturbed(name, mode, tmp_path / f"{name}-{mode}") for name, mode in scripts]
    plain = (f"--steps={STEPS}", f"--save-every={SAVE_EVERY}")
    names = {name for name, _ in scripts}
    references = [torchrun(copied(name, tmp_path / name), "train.py", *plain) for name in names]
    reach_the_time_limit(cluster, runs)
    hold_all(runs)
    preempt(cluster, runs)
    hold_all(runs)
    for run in runs:
        os.kill(run.process(1), signal.SIGKILL)
    see_ends(runs, "crash")
    hold_all(runs)
    lose_nodes(cluster, runs)
    hold_all(runs)
    cancel(runs)
    for reference in references:
        _, err = reference.communicate(timeout=HANG_LIMIT_S)
        assert reference.returncode == 0, err
    for run in runs:
        see_it_complete(run, tmp_path / run.name)
