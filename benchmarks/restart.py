"""From the SIGKILL of a rank to the next training step: in place, by a requeue, and with torchrun.

    python -m benchmarks.restart [--rounds 7] [--quick] [--resume FILE]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm). Two ranks train on one node; once they
have saved a checkpoint, rank 1 is killed. Two comparisons:

- hpc-train's trainer: restarted in place, in place from ranks on standby, and by a requeue
  (``recovery.restart: requeue``) on the idle cluster and with a job in the queue that wants the node for ten
  seconds;
- one script (restart_training.py) as a program of hpc-train, in place, and in a job that runs
  ``torchrun --max-restarts=3``, which restarts all ranks of the node. With gloo torchrun sometimes does not
  (torch 2.15): after a minute the round counts as not measured.

Every round runs all arms once, one after the other in random order; each arm is a job of its own. ``--quick``
runs two rounds and writes no results. ``--resume`` keeps the measurements in FILE as they are made, and
continues after those that it has. Writes benchmarks/results/restart.json.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import slurm_cluster
from benchmarks.measuring import comparison, conditions, parser, report, rounds_of, table
from benchmarks.restart_training import SAVE_EVERY
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from tests.end_to_end.runs import REPOSITORY
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NUM_NODES, Settings
from tests.slurm.experiments import job_of, ranks_of, submit_one
from tests.slurm.runs import sbatch, squeue
from tests.slurm.test_standby import standby_files

TRAINER, SCRIPT = "Trainer: kill of a rank to the next step", "Script: kill of a rank to the next step"
IN_PLACE, REQUEUE, TORCHRUN = "in place", "requeue", "torchrun --max-restarts"
STANDBY, COMPETING = "in place, standby", "requeue, competing job"
LIMIT_S = 300.0
#: From the kill to the next step, for the script; a restart takes seconds.
RESTART_LIMIT_S = 60.0
#: How long the competing job runs.
COMPETING_S = 10
RANKS = 2
#: States of jobs that squeue still lists.
_ENDED = {"CANCELLED", "COMPLETED", "FAILED"}
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
#: Seconds of each part; empty if there was no further step within the limit.
Parts = dict[str, float]
TO_FIRST_STEP = "kill to first step"


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--resume", type=Path, help="keep measurements in this file, and continue after them"
    )
    arguments = options.parse_args()
    settings = Settings(accounting=False)
    with slurm_cluster.started(settings, OMP_NUM_THREADS="1") as (cluster, folder, slurm):
        arms = _arms(cluster, _numbered(folder))
        values = _measured(arms, rounds_of(arguments), arguments.resume or folder / "values.json")
    compared, tables = [], []
    for title, baseline in ((TRAINER, REQUEUE), (SCRIPT, TORCHRUN)):
        of_title = {arm: rounds for (of, arm), rounds in values.items() if of == title}
        # A ratio is one of the same round.
        complete = [
            number for number in range(rounds_of(arguments)) if all(of_title[arm][number] for arm in of_title)
        ]
        hung = [
            f"{arm}: {count} of {len(rounds)} rounds, no further step within {RESTART_LIMIT_S:g} s"
            for arm, rounds in of_title.items()
            if (count := sum(not parts for parts in rounds))
        ]
        if len(complete) > 1:
            times = {
                arm: [rounds[number][TO_FIRST_STEP] for number in complete]
                for arm, rounds in of_title.items()
            }
            compared.append(comparison(title, "seconds", times, baseline, hung))
        else:
            print(f"{title}: not compared: {'; '.join(hung)}", file=sys.stderr)
        if title == TRAINER:
            tables.append(_parts_table(of_title))
    report("restart", arguments, conditions() | {"slurm": slurm, "ranks": RANKS}, compared, tables)


def _numbered(folder: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        (new := folder / f"job-{number}").mkdir()
        yield new


def _measured(
    arms: Mapping[tuple[str, str], Callable[[], Parts]], num_rounds: int, file: Path
) -> dict[tuple[str, str], list[Parts]]:
    """Run each arm once per round, in random order, except the measurements that ``file`` has already."""
    saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    values = {key: saved.get(": ".join(key), []) for key in arms}
    for number in range(num_rounds):
        for key in random.sample(list(arms), len(arms)):
            if len(values[key]) <= number:
                values[key].append(arms[key]())
                text = json.dumps({": ".join(each): rounds for each, rounds in values.items()})
                file.write_text(text, encoding="utf-8")
    return {key: rounds[:num_rounds] for key, rounds in values.items()}


def _arms(cluster: Cluster, folders: Iterator[Path]) -> dict[tuple[str, str], Callable[[], Parts]]:
    """Return the arms by comparison and name; each call runs a job and returns the seconds of its parts."""

    def shown(title: str, arm: str, measure: Callable[[Path], Parts]) -> Callable[[], Parts]:
        def measured() -> Parts:
            parts = measure(next(folders))
            print(f"{title}, {arm}: {parts}", file=sys.stderr)
            return parts

        return measured

    arms: dict[tuple[str, str], Callable[[Path], Parts]] = {
        (TRAINER, IN_PLACE): lambda folder: _trainer(cluster, folder, "restart=in_place"),
        (TRAINER, STANDBY): lambda folder: _trainer(cluster, folder, "restart=in_place", "standby=true"),
        (TRAINER, REQUEUE): lambda folder: _trainer(cluster, folder, "restart=requeue"),
        (TRAINER, COMPETING): lambda folder: _trainer(cluster, folder, "restart=requeue", is_competing=True),
        (SCRIPT, IN_PLACE): lambda folder: _program(cluster, folder),
        (SCRIPT, TORCHRUN): lambda folder: _torchrun(cluster, folder),
    }
    return {key: shown(*key, measure) for key, measure in arms.items()}


def _trainer(cluster: Cluster, folder: Path, *recovery: str, is_competing: bool = False) -> Parts:
    overrides = [f"recovery.{setting}" for setting in recovery]
    run = submit_one(folder, *overrides, text=EXPERIMENT, pace_s=STEP_S)
    _wait(lambda: len(run.checkpoint_folders()) > 0)
    if "standby=true" in recovery:
        _wait(lambda: len(standby_files(run)) == RANKS)
    competing = _compete(cluster) if is_competing else None
    killed = _kill(*ranks_of(run, rank=1, attempt=1))
    _wait(lambda: (record := read_record(run.attempt(2))) is not None and "first_step" in record.events)
    for job in filter(None, (job_of(run), competing)):
        _cancel(cluster, job)
    return {TO_FIRST_STEP: _between(killed, _event(run, 2, "first_step"))} | {
        "kill to end of the attempt": _between(killed, _event(run, 1, "end")),
        "end to begin": _between(_event(run, 1, "end"), _event(run, 2, "begin")),
        "begin to start of rank 0": _between(_event(run, 2, "begin"), _event(run, 2, "rank")),
        "start of rank 0 to first step": _between(_event(run, 2, "rank"), _event(run, 2, "first_step")),
    }


def _compete(cluster: Cluster) -> str:
    """Queue a job that wants all nodes alone; return its id."""
    options = ("--partition=low", "--exclusive", f"--nodes={NUM_NODES}", "--time=5")
    return sbatch(cluster, *options, wrap=f"sleep {COMPETING_S}")


def _event(run: RunPaths, attempt: int, name: str) -> str:
    record = read_record(run.attempt(attempt))
    assert record is not None
    return record.events[name]


def _program(cluster: Cluster, folder: Path) -> Parts:
    text = PROGRAM.replace("FOLDER", str(folder))
    run = submit_one(folder, "recovery.restart=in_place", text=text)
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
    """Kill rank 1 once the script has saved; return the time to the first step of another process, if any."""
    _wait(lambda: len(_steps(folder)) > SAVE_EVERY)
    victim = _steps(folder)[-1]["pid"]
    killed = _kill(victim)
    try:
        _wait(lambda: _steps(folder)[-1]["pid"] != victim, RESTART_LIMIT_S)
    except TimeoutError:
        return {}
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
    """End the job, unless it has ended; return once its nodes are free for the next arm."""
    cluster.run("scancel", job, check=False)
    _wait(lambda: job not in squeue(cluster) or squeue(cluster)[job].state in _ENDED)


def _between(start: str, end: str) -> float:
    return round((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 3)


def _wait(is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
