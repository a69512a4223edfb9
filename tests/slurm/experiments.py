"""Experiments on the test cluster: submitted by the real command, disturbed, compared with a quiet run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record
from tests.end_to_end.runs import PACED, Done, hpc_train, last_step, only_run, wait_for, write_experiment
from tests.slurm.cluster import Cluster
from tests.slurm.runs import high_job, squeue

LIMIT_S = 400.0
#: One thread a rank: the same sums on this machine's quiet run and on the cluster's nodes.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
#: The modules that ranks execute: as Slurm starts them, and those that were on standby.
RANK_MODULES = {b"submitit.core._submit", b"hpc_train.launchers.entry"}

#: That of the local tests, slow enough to be caught in the act; its saves are those of its signals.
EXPERIMENT = (
    PACED.replace("checkpoint: {every_steps: 7}", "checkpoint: {every_steps: 1000}")
    + "slurm: {partition: low, nodes: 2, ranks_per_node: 2, time_limit: 30min}\n"
)
#: For what does not depend on how many ranks a node has: each takes seconds of two cores to start.
TWO_RANKS = EXPERIMENT.replace("ranks_per_node: 2", "ranks_per_node: 1")


def command(folder: Path, *arguments: str | Path, pace_s: float = 0.0, **environment: str) -> Done:
    """Run ``hpc-train`` with runs below ``folder``; a rank's forward takes ``pace_s`` longer."""
    own = {"HPC_TRAIN_RUNS": str(folder / "runs"), "PACED_TRAIN_S": str(pace_s)}
    return hpc_train(*arguments, **(ENVIRONMENT | own | environment))


def succeed(folder: Path, *arguments: str | Path, pace_s: float = 0.0) -> Done:
    """Run ``command``, which must end with exit code 0."""
    done = command(folder, *arguments, pace_s=pace_s)
    assert done.code == 0, done.err
    return done


def submit(folder: Path, *overrides: str, text: str = EXPERIMENT, pace_s: float = 0.0) -> Done:
    """Submit to Slurm and see it accepted."""
    return succeed(folder, "submit", write_experiment(folder, text), *overrides, pace_s=pace_s)


def submit_one(folder: Path, *overrides: str, text: str = EXPERIMENT, pace_s: float = 0.0) -> RunPaths:
    submit(folder, *overrides, text=text, pace_s=pace_s)
    return only_run(folder)


def standing(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return what ``status --json`` says."""
    runs: list[dict[str, Any]] = json.loads(succeed(folder, "status", "--json", *words).out)["runs"]
    return runs


def standing_of(paths: RunPaths) -> dict[str, Any]:
    (run,) = standing(paths.folder.parents[2], str(paths.folder))
    return run


def job_of(paths: RunPaths) -> str:
    jobs: list[str] = json.loads(paths.run.read_text())["slurm_job_ids"]
    return jobs[-1]


def records(paths: RunPaths) -> list[AttemptRecord]:
    found = [read_record(attempt) for attempt in paths.attempt_folders()]
    return [record for record in found if record is not None]


def wait_for_step(paths: RunPaths, step: int) -> None:
    wait_for(lambda: last_step(paths) >= step, f"step {step} of {paths.folder}\n", LIMIT_S)


def wait_for_state(paths: RunPaths, *states: str, limit_s: float = LIMIT_S) -> str:
    """Wait until ``status.json``, which the ranks and the batch script write, says one of ``states``."""

    def found() -> str:
        return str(json.loads(paths.status.read_text())["state"])

    try:
        wait_for(lambda: found() in states, "", limit_s)
    except AssertionError:
        queue = subprocess.run(["squeue", "-o", "%i %P %T %r"], capture_output=True, text=True, check=False)
        told = f"{queue.stdout}{queue.stderr}\n{account(paths)}"
        raise AssertionError(f"{found()} rather than {states}\n{told}") from None
    return found()


def wait_for_attempt_end(paths: RunPaths, number: int) -> AttemptRecord:
    def is_over() -> bool:
        record = read_record(paths.attempt(number))
        return record is not None and record.end is not None

    wait_for(is_over, f"the end of attempt {number}\n{account(paths)}", LIMIT_S)
    record = read_record(paths.attempt(number))
    assert record is not None
    return record


def wait_for_completion(*runs: RunPaths) -> None:
    for paths in runs:
        assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)


def wait_for_attempt(paths: RunPaths, number: int) -> list[str]:
    """Wait until the attempt has begun; return its nodes."""
    wait_for(lambda: len(records(paths)) >= number, f"attempt {number}\n{account(paths)}", LIMIT_S)
    return records(paths)[number - 1].hosts


def wait_for_first_step(paths: RunPaths) -> None:
    """Wait until the newest attempt has trained a step."""
    wait_for(lambda: "first_step" in records(paths)[-1].events, f"a step\n{account(paths)}", LIMIT_S)


def see_it_preempted(cluster: Cluster, paths: RunPaths) -> AttemptRecord:
    """Have a job of the higher partition take the newest attempt's nodes until it has ended."""
    number = paths.attempt_folders()[-1].number
    with high_job(cluster, records(paths)[-1].hosts):
        ended = wait_for_attempt_end(paths, number)
    assert ended.cause == "preemption", account(paths)
    return ended


def ranks_of(paths: RunPaths, rank: int | None = None, attempt: int | None = None) -> list[int]:
    """Return the processes of the run's ranks that live on this machine, whichever node they are on.

    Children of a rank with the same executable don't count: a command looks like the rank until ``exec``.
    """
    wanted = {f"HPC_TRAIN_RUN_FOLDER={paths.folder}".encode()}
    if attempt is not None:
        wanted.add(f"HPC_TRAIN_ATTEMPT={attempt}".encode())
    if rank is not None:
        wanted.add(f"SLURM_PROCID={rank}".encode())
    #: By process: its parent and its executable.
    ranks: dict[int, tuple[int, Path]] = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_rank = not RANK_MODULES.isdisjoint(words) and Path(words[0].decode()).name != "srun"
            if is_rank and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                ranks[int(folder.name)] = parent, (folder / "exe").readlink()
    return [pid for pid, (parent, program) in ranks.items() if ranks.get(parent, (0, None))[1] != program]


def standby_files(paths: RunPaths) -> list[Path]:
    """Return the files in which ranks report that they are on standby."""
    folders = [submission.folder for submission in paths.siblings.submission_folders()]
    return [file for folder in folders for file in folder.glob("standby-*/rank-*")]


def start_now(cluster: Cluster, paths: RunPaths) -> None:
    """Let a job that Slurm requeued by itself start without the usual wait."""
    job = job_of(paths)
    wait_for(lambda: squeue(cluster)[job].state == "PENDING", f"a requeued job\n{account(paths)}", LIMIT_S)
    # Not at once: a job that starts again in the second in which it ended is failed for good by its node.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")


def job_states(cluster: Cluster, job: str) -> list[str]:
    """Return the states of a job, or of all tasks of an array, that Slurm has in its queue."""
    return cluster.run("squeue", "--noheader", "-r", "-j", job, "-o", "%T", check=False).split()


def account(paths: RunPaths) -> str:
    """Return what the run's folder tells of its attempts: for a failed test's message."""
    texts = [paths.status.read_text()]
    for submission in paths.siblings.submission_folders():
        texts += _ends(sorted(submission.folder.glob("*log*")))
    for attempt in paths.attempt_folders():
        texts += [attempt.record.read_text() if attempt.record.exists() else "no record"]
        texts += _ends(sorted(attempt.folder.glob("rank-*")))
    return "\n".join(texts)


def _ends(files: Sequence[Path]) -> list[str]:
    return [f"== {file}\n{file.read_text(errors='replace')[-1500:]}" for file in files if file.stat().st_size]
