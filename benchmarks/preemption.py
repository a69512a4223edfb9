"""From the signal to the next first step: hpc-train and submitit's own requeue, on a real Slurm.

    python -m benchmarks.preemption [--rounds 5] [--quick]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm). Both train the same small network on
one CPU rank of one node, and each is interrupted in two ways:

- ``USR2``, Slurm's warning of the time limit, which is what submitit's checkpointing answers to;
- real preemption by a job of a higher partition: SIGTERM, 20 s of grace, SIGKILL, then Slurm requeues.
  submitit ignores SIGTERM, so it trains until the end of the grace time and loses all since its last save.

Parts are taken from what both write down themselves. Most of a round of submitit's is Slurm's hold of a
requeued job, two minutes in which nothing runs; so several of its rounds run at a time, on three nodes, and
hpc-train's one after the other on the fourth. They disturb each other, which lengthens hpc-train's seconds
by a larger part than submitit's minutes. After each round of hpc-train's a *bare script* starts on its node:
what a rank does from the start of its process to its first step, without Slurm's part. Five rounds take nine
minutes. ``--quick`` preempts hpc-train alone, twice, which takes a minute. Writes
benchmarks/results/preemption.json.
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import slurm_cluster
from benchmarks.measuring import QUICK_ROUNDS, comparison, conditions, parser, report, table
from benchmarks.submitit_training import SubmititTraining
from hpc_train.run.attempts import read_record
from tests.end_to_end.runs import REPOSITORY, last_step
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES, Settings
from tests.slurm.experiments import job_of, submit_one
from tests.slurm.runs import high_job, squeue

#: Ways to interrupt → titles of their comparisons.
TITLES = {"USR2": "Warning of the time limit to the next step", "preemption": "Preemption to the next step"}
OURS, PEER, BARE = "hpc-train", "submitit", "bare script"
TO_FIRST_STEP, LOST = "signal to first step", "steps lost"
RANK = "rank's start to first step"
RANK_TITLE = "Start of a rank's process to its first step after a resume"
ROUNDS = 5
#: Where submitit's rounds run at the same time, by way to interrupt: a preemption takes all of a node.
PEERS_NODES = {"USR2": [NODES[0]] * 3, "preemption": [NODES[1], NODES[2]]}
#: Where hpc-train's rounds run.
OUR_NODE = NODES[3]
LIMIT_S = 400.0
#: A step of either side, so that neither ends before it is disturbed.
STEP_S = 0.2
STEPS_BEFORE = 20
#: Seconds by part, and the number of steps lost.
Parts = dict[str, float]
EXPERIMENT = """\
name: preemption
task: classification
model: {name: "tests.end_to_end.paced:net"}
data: {name: digits}
optimization:
  steps: 5000
  global_batch_size: 48
  micro_batch_size: 48
  optimizer: {name: sgd, lr: 0.01}
checkpoint: {every_steps: 5000}
logging: {every_steps: 1}
slurm: {partition: low, nodes: 1, time_limit: 60min, exclude: "PEERS_NODES"}
""".replace("PEERS_NODES", ",".join(NODES[:3]))


def main() -> None:
    arguments = parser(__doc__, rounds=ROUNDS).parse_args()
    settings = Settings(accounting=False, grace_s=20)
    with slurm_cluster.started(settings, OMP_NUM_THREADS="1") as (cluster, folder, slurm):
        if arguments.quick:
            values = {("preemption", OURS): _rounds_of_ours(cluster, folder, ["preemption"] * QUICK_ROUNDS)}
        else:
            values = _measured(cluster, folder, arguments.rounds)
    measured_with = conditions(["submitit"]) | {"slurm": slurm, "ranks": 1}
    compared, tables = _results(values, OURS if arguments.quick else PEER)
    report("preemption", arguments, measured_with, compared, tables)


def _measured(cluster: Cluster, folder: Path, rounds: int) -> dict[tuple[str, str], list[Parts]]:
    """Return what was measured, one value per round, by way to interrupt and side."""
    ways = [how for _ in range(rounds) for how in TITLES]
    with ThreadPoolExecutor(len(TITLES)) as pool:
        peers = {how: pool.submit(_rounds_of_peers, cluster, folder, how, rounds) for how in TITLES}
        ours = _rounds_of_ours(cluster, folder, ways)
        found = {(how, PEER): peers[how].result() for how in TITLES}
    own = {
        (how, OURS): [parts for its_how, parts in zip(ways, ours, strict=True) if its_how == how]
        for how in TITLES
    }
    return found | own


def _rounds_of_peers(cluster: Cluster, folder: Path, how: str, rounds: int) -> list[Parts]:
    """Return submitit's parts of each round, of which several run at the same time."""
    nodes = queue.SimpleQueue[str]()
    for node in PEERS_NODES[how]:
        nodes.put(node)

    def measured(number: int) -> Parts:
        node = nodes.get()
        try:
            return _told_of(PEER, how, _submitits(cluster, folder / f"{how}-{number}", how, node))
        finally:
            nodes.put(node)

    with ThreadPoolExecutor(len(PEERS_NODES[how])) as pool:
        return list(pool.map(measured, range(rounds)))


def _rounds_of_ours(cluster: Cluster, folder: Path, ways: Sequence[str]) -> list[Parts]:
    """Return hpc-train's parts of each round, and the time that a bare script then needs on the same node."""
    found = []
    for number, how in enumerate(ways):
        parts = _ours(cluster, folder / f"ours-{number}", how)
        parts[BARE] = _bare(cluster, folder / f"ours-{number}")
        found.append(_told_of(OURS, how, parts))
    return found


def _told_of(side: str, how: str, parts: Parts) -> Parts:
    print(f"{side}, {how}: {parts}", file=sys.stderr)
    return parts


def _results(
    values: Mapping[tuple[str, str], Sequence[Parts]], baseline: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return comparisons and tables. ``values``: by way to interrupt and side, what was measured by round."""
    compared, tables = [], []
    for how in dict.fromkeys(how for how, _ in values):
        sides = {side: rounds for (its_how, side), rounds in values.items() if its_how == how}
        times = {side: [parts[TO_FIRST_STEP] for parts in rounds] for side, rounds in sides.items()}
        compared.append(comparison(TITLES[how], "seconds", times, baseline))
        shown = {
            side: [{name: value for name, value in parts.items() if name != BARE} for parts in rounds]
            for side, rounds in sides.items()
        }
        tables.append(parts_table(how, shown))
    ours = [parts for (_, side), rounds in values.items() if side == OURS for parts in rounds]
    starts = {BARE: [parts[BARE] for parts in ours], OURS: [parts[RANK] for parts in ours]}
    return [*compared, comparison(RANK_TITLE, "seconds", starts, BARE)], tables


def parts_table(how: str, sides: Mapping[str, Sequence[Parts]]) -> dict[str, Any]:
    """Return the table of where the time goes. ``sides``: by side, what was measured by round."""
    rows = {
        side: {
            part if part == LOST else f"{part}, s": statistics.median(each[part] for each in rounds)
            for part in rounds[0]
        }
        for side, rounds in sides.items()
    }
    return table(f"{TITLES[how]}: parts", "", rows, remark="Medians of the rounds above")


def _ours(cluster: Cluster, folder: Path, how: str) -> Parts:
    run = submit_one(folder, text=EXPERIMENT, pace_s=STEP_S)
    job = job_of(run)
    _wait(lambda: last_step(run) >= STEPS_BEFORE)
    with _disturbed(cluster, job, how) as sent:
        _wait(lambda: (record := read_record(run.attempt(1))) is not None and record.end is not None)
    _wait(lambda: (record := read_record(run.attempt(2))) is not None and "first_step" in record.events)
    first, second = (read_record(run.attempt(number)) for number in (1, 2))
    assert first is not None and second is not None
    _cancel(cluster, job)
    trained, kept = _steps(run.metrics)
    return _parts(sent, first.events, second.events) | {LOST: trained - kept}


def _bare(cluster: Cluster, folder: Path) -> float:
    """Return the seconds from the start of a process to its first step, on hpc-train's node."""
    command = (sys.executable, "-m", "benchmarks.bare_training", str(folder), str(STEP_S))
    step = ("srun", "--partition=low", f"--nodelist={OUR_NODE}", "--ntasks=1", f"--chdir={REPOSITORY}")
    for _ in range(2):  # the first one writes what the second one loads
        said = cluster.run(*step, *command, variables={"PYTHONPATH": str(REPOSITORY)})
    return float(said)


def _cancel(cluster: Cluster, job: str) -> None:
    cluster.run("scancel", job)
    _wait(lambda: job not in squeue(cluster) or squeue(cluster)[job].state == "CANCELLED")


def _steps(metrics: Path) -> tuple[int, int]:
    """Return the last step of attempt 1, and the step that attempt 2 went on from."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    first = max((row["step"] for row in rows if row["attempt"] == 1), default=0)
    return first, min(row["step"] for row in rows if row["attempt"] == 2) - 1


def _submitits(cluster: Cluster, folder: Path, how: str, node: str) -> Parts:
    from submitit import SlurmExecutor

    folder.mkdir(parents=True)
    executor = SlurmExecutor(folder / "jobs")
    executor.update_parameters(
        partition="low", time=60, nodes=1, ntasks_per_node=1, wckey=None, signal_delay_s=120,
        additional_parameters={"requeue": True, "nodelist": node}, setup=[f"export PYTHONPATH={REPOSITORY}"],
    )  # fmt: skip
    job = executor.submit(SubmititTraining(folder, STEP_S)).job_id
    _wait(lambda: len(_told(folder, "step")) >= STEPS_BEFORE)
    with _disturbed(cluster, job, how) as sent:
        _wait(lambda: "RUNNING" not in cluster.run("squeue", "--noheader", "-j", job, "-o", "%T"))
    _wait(lambda: len(_told(folder, "begin")) == 2 and bool(_told(folder, "first_step")[1:]))
    _cancel(cluster, job)
    begins, firsts = _told(folder, "begin"), _told(folder, "first_step")
    saved = _told(folder, "saved")
    events = {"saved": saved[0]["time"]} if saved else {}
    steps = [told["step"] for told in _told(folder, "step") if told["time"] < begins[1]["time"]]
    resumed_at = begins[1]["step"]
    began, first = begins[1]["time"], firsts[1]["time"]
    return _parts(sent, events, {"begin": began, "rank": began, "first_step": first}) | {
        LOST: max(steps) - resumed_at
    }


@contextmanager
def _disturbed(cluster: Cluster, job: str, how: str) -> Iterator[str]:
    """A while in which the job's node is wanted by another, if so; yields when the disturbance began."""
    node = cluster.run("squeue", "--noheader", "-j", job, "-o", "%N").strip()
    sent = datetime.now(UTC).isoformat(timespec="milliseconds")
    if how == "USR2":
        cluster.run("scancel", "--signal=USR2", job)
        yield sent
        return
    with high_job(cluster, [node]):
        yield sent


def _parts(sent: str, first: dict[str, str], second: dict[str, str]) -> Parts:
    """Return seconds from event to event. ``saved`` is missing where nothing was saved."""
    parts: Parts = {
        TO_FIRST_STEP: _between(sent, second["first_step"]),
        "begin to first step": _between(second["begin"], second["first_step"]),
        RANK: _between(second["rank"], second["first_step"]),
    }
    if "saved" in first:
        parts["signal to saved"] = _between(sent, first["saved"])
        parts["saved to begin"] = _between(first["saved"], second["begin"])
    return parts


def _between(start: str, end: str) -> float:
    return round((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 2)


def _told(folder: Path, event: str) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = (folder / "events.jsonl").read_text().splitlines()
        return [told for line in lines if (told := json.loads(line))["event"] == event]
    return []


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
