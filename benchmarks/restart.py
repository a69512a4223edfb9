"""From the SIGKILL of a rank to the next training step: in place, by a requeue, and with torchrun.

    python -m benchmarks.restart [--rounds 7] [--quick]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm), which is idle otherwise. Two ranks
train on one node; once they have saved a checkpoint, rank 1 is killed. Two comparisons:

- hpc-train's trainer, restarted in place, and by a requeue (``recovery.restart: requeue``);
- one script (restart_training.py) as a program of hpc-train, in place and by a requeue, and in a job that
  runs ``torchrun --max-restarts=3``, which restarts all ranks of the node.

Every round runs all arms once, one after the other in random order; each arm is a job of its own. A round
takes about two minutes. ``--quick`` runs two rounds of the trainer in place and of torchrun. Writes
benchmarks/results/restart.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measuring import (
    QUICK_ROUNDS,
    cannot_run,
    comparison,
    conditions,
    interleaved,
    parser,
    report,
    table,
)
from benchmarks.restart_training import SAVE_EVERY
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from tests.end_to_end.runs import REPOSITORY
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Settings
from tests.slurm.experiments import job_of, submit_one
from tests.slurm.host import why_not
from tests.slurm.runs import sbatch, squeue
from tests.slurm.test_nodes import ranks_of

TRAINER, SCRIPT = "Trainer: kill of a rank to the next step", "Script: kill of a rank to the next step"
IN_PLACE, REQUEUE, TORCHRUN = "in place", "requeue", "torchrun --max-restarts"
LIMIT_S = 300.0
#: A step of each arm, so that none ends before it is disturbed.
STEP_S = 0.1
SLURM = "slurm: {partition: low, nodes: 1, ranks_per_node: 2, time_limit: 60min}\n"
EXPERIMENT = f"""\
name: restart
task: classification
model: {{name: "tests.end_to_end.paced:net"}}
data: {{name: digits}}
optimization:
  steps: 5000
  global_batch_size: 48
  micro_batch_size: 24
  optimizer: {{name: sgd, lr: 0.01}}
checkpoint: {{every_steps: {SAVE_EVERY}}}
logging: {{every_steps: 1}}
{SLURM}"""
PROGRAM = f"""\
name: restart
program:
  command: [{sys.executable}, "{REPOSITORY}/benchmarks/restart_training.py", FOLDER, "{STEP_S}"]
{SLURM}"""
#: The store of torchrun's rendezvous outlives a restart, and gloo's ranks find in it the addresses of the
#: attempt before (torch 2.15), so they never connect.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
#: Seconds of each part.
Parts = dict[str, float]
TO_FIRST_STEP = "kill to first step"


def main() -> None:
    arguments = parser(__doc__).parse_args()
    reason = why_not(accounting=False)
    if reason:
        cannot_run(f"there is no test cluster: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = Cluster(folder / "cluster", Settings(accounting=False))
        cluster.up()
        os.environ.update(cluster.environment | {"OMP_NUM_THREADS": "1"})
        # Each attempt would compile hpc-train's modules again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        try:
            slurm = cluster.run("sinfo", "--version").strip()
            values = interleaved(
                _arms(cluster, _numbered(folder), is_quick=arguments.quick),
                QUICK_ROUNDS if arguments.quick else arguments.rounds,
            )
        finally:
            cluster.down()
    compared, tables = [], []
    for title, baseline in ((TRAINER, REQUEUE), (SCRIPT, TORCHRUN)):
        arms = {arm: rounds for (of, arm), rounds in values.items() if of == title}
        times = {arm: [parts[TO_FIRST_STEP] for parts in rounds] for arm, rounds in arms.items()}
        compared.append(comparison(title, "seconds", times, baseline if baseline in times else IN_PLACE))
        if title == TRAINER:
            tables.append(_parts_table(arms))
    report("restart", arguments, conditions() | {"slurm": slurm, "ranks": 2}, compared, tables)


def _numbered(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        (new := folder / f"job-{number}").mkdir()
        yield new


def _arms(
    cluster: Cluster, folders: Iterator[Path], *, is_quick: bool
) -> dict[tuple[str, str], Callable[[], Parts]]:
    """Return the arms by comparison and name; each call runs a job and returns the seconds of its parts."""

    def shown(title: str, arm: str, measure: Callable[[Path], Parts]) -> Callable[[], Parts]:
        def measured() -> Parts:
            parts = measure(next(folders))
            print(f"{title}, {arm}: {parts}", file=sys.stderr)
            return parts

        return measured

    arms: dict[tuple[str, str], Callable[[Path], Parts]] = {
        (TRAINER, IN_PLACE): lambda folder: _trainer(cluster, folder, "in_place"),
        (TRAINER, REQUEUE): lambda folder: _trainer(cluster, folder, "requeue"),
        (SCRIPT, IN_PLACE): lambda folder: _program(cluster, folder, "in_place"),
        (SCRIPT, REQUEUE): lambda folder: _program(cluster, folder, "requeue"),
        (SCRIPT, TORCHRUN): lambda folder: _torchrun(cluster, folder),
    }
    if is_quick:
        arms = {key: arms[key] for key in ((TRAINER, IN_PLACE), (SCRIPT, TORCHRUN))}
    return {key: shown(*key, measure) for key, measure in arms.items()}


def _trainer(cluster: Cluster, folder: Path, restart: str) -> Parts:
    run = submit_one(folder, f"recovery.restart={restart}", text=EXPERIMENT, pace_s=STEP_S)
    _wait(lambda: len(run.checkpoint_folders()) > 0)
    killed = _kill(*ranks_of(run, rank=1))
    _wait(lambda: (record := read_record(run.attempt(2))) is not None and "first_step" in record.events)
    _cancel(cluster, job_of(run))
    return {TO_FIRST_STEP: _between(killed, _event(run, 2, "first_step"))} | {
        "kill to end of the attempt": _between(killed, _event(run, 1, "end")),
        "end to begin": _between(_event(run, 1, "end"), _event(run, 2, "begin")),
        "begin to start of rank 0": _between(_event(run, 2, "begin"), _event(run, 2, "rank")),
        "start of rank 0 to first step": _between(_event(run, 2, "rank"), _event(run, 2, "first_step")),
    }


def _event(run: RunPaths, attempt: int, name: str) -> str:
    record = read_record(run.attempt(attempt))
    assert record is not None
    return record.events[name]


def _program(cluster: Cluster, folder: Path, restart: str) -> Parts:
    run = submit_one(folder, f"recovery.restart={restart}", text=PROGRAM.replace("FOLDER", str(folder)))
    parts = _script(folder)
    _cancel(cluster, job_of(run))
    return parts


def _torchrun(cluster: Cluster, folder: Path) -> Parts:
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3"
    script = REPOSITORY / "benchmarks" / "restart_training.py"
    options = ("--partition=low", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", "--time=60")
    job = sbatch(cluster, *options, wrap=f"{OWN_STORE} srun {torchrun} {script} {folder} {STEP_S}")
    parts = _script(folder)
    _cancel(cluster, job)
    return parts


def _script(folder: Path) -> Parts:
    """Kill rank 1 once the script has saved; return the time to the first step of another process."""
    _wait(lambda: len(_steps(folder)) > SAVE_EVERY)
    victim = _steps(folder)[-1]["pid"]
    killed = _kill(victim)
    _wait(lambda: _steps(folder)[-1]["pid"] != victim)
    first = next(step for step in _steps(folder) if step["pid"] != victim)
    assert first["step"] > SAVE_EVERY, "it has not resumed"
    return {TO_FIRST_STEP: _between(killed, first["time"])}


def _steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that rank 1 has recorded."""
    with suppress(FileNotFoundError):
        text = (folder / "steps-1.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return []


def _kill(victim: int) -> str:
    """Kill a rank; return when."""
    killed = datetime.now(UTC).isoformat(timespec="milliseconds")
    os.kill(victim, signal.SIGKILL)
    return killed


def _parts_table(arms: dict[str, list[Parts]]) -> dict[str, Any]:
    rows = {
        arm: {f"{part}, s": sum(one[part] for one in rounds) / len(rounds) for part in rounds[0]}
        for arm, rounds in arms.items()
    }
    return table(f"{TRAINER}: parts", "", rows, remark="Means of the rounds above")


def _cancel(cluster: Cluster, job: str) -> None:
    """End the job; return once its node is free for the next arm."""
    cluster.run("scancel", job)
    _wait(lambda: job not in squeue(cluster) or squeue(cluster)[job].state == "CANCELLED")


def _between(start: str, end: str) -> float:
    return round((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 3)


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
