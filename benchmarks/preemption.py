"""From the signal to the next first step: hpc-train beside submitit's own requeue, on a real Slurm.

    python -m benchmarks.preemption [--rounds 3]

Starts the test cluster (tests/slurm/cluster.py; root, Debian's Slurm). Both sides train the same small
network on one CPU rank of one node, and both are disturbed in two ways, in turn:

- ``USR2``, Slurm's warning of the time limit, which is what submitit's checkpointing answers to;
- real preemption by a job of a higher partition: SIGTERM, 20 s of grace, SIGKILL, then Slurm requeues.
  submitit ignores SIGTERM, so it goes on training in the grace and loses all since its last save.

Parts are taken from what both sides write down themselves. Ratios are submitit's time over ours in a round.
Writes benchmarks/results/preemption.json; with fewer rounds than three (a trial) it only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.submitit_training import SubmititTraining
from hpc_train.run.attempts import read_record
from tests.end_to_end.runs import REPOSITORY, last_step
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import Settings
from tests.slurm.experiments import job_of, submit_one
from tests.slurm.runs import high_job

RESULTS = REPOSITORY / "benchmarks" / "results" / "preemption.json"
LIMIT_S = 400.0
#: A step of either side, so that neither ends before it is disturbed.
STEP_S = 0.2
STEPS_BEFORE = 20
#: Fewer are a trial.
MIN_ROUNDS = 3
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
slurm: {partition: low, nodes: 1, time_limit: 60min}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        cluster = Cluster(folder / "cluster", Settings(accounting=False, grace_s=20))
        cluster.up()
        os.environ.update(cluster.environment | {"OMP_NUM_THREADS": "1"})
        try:
            slurm = cluster.run("sinfo", "--version").strip()
            measured = [_round(cluster, folder / str(number)) for number in range(rounds)]
        finally:
            cluster.down()
    text = json.dumps(_summary(measured, slurm), indent=1)
    print(text)
    if rounds >= MIN_ROUNDS:
        RESULTS.write_text(text + "\n", encoding="utf-8")


def _round(cluster: Cluster, folder: Path) -> dict[str, dict[str, Any]]:
    sides: dict[str, Callable[[Cluster, Path, str], dict[str, Any]]] = {
        "hpc-train": _ours,
        "submitit": _submitits,
    }
    found = {}
    for how in ("USR2", "preemption"):
        for side, measure in sides.items():
            found[f"{side}, {how}"] = measure(cluster, folder / f"{side}-{how}", how)
            print(f"{side}, {how}: {found[f'{side}, {how}']}", file=sys.stderr)
    return found


def _ours(cluster: Cluster, folder: Path, how: str) -> dict[str, Any]:
    run = submit_one(folder, text=EXPERIMENT, pace_s=STEP_S)
    job = job_of(run)
    _wait(lambda: last_step(run) >= STEPS_BEFORE)
    with _disturbed(cluster, job, how) as sent:
        _wait(lambda: (record := read_record(run.attempt(1))) is not None and record.end is not None)
    _wait(lambda: (record := read_record(run.attempt(2))) is not None and "first_step" in record.events)
    first, second = (read_record(run.attempt(number)) for number in (1, 2))
    assert first is not None and second is not None
    cluster.run("scancel", job)
    _wait(lambda: not cluster.run("squeue", "--noheader").strip())
    trained, kept = _steps(run.metrics)
    return _parts(sent, first.events, second.events) | {"steps lost": trained - kept}


def _steps(metrics: Path) -> tuple[int, int]:
    """Return the last step of attempt 1, and the step that attempt 2 went on from."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    first = max((row["step"] for row in rows if row["attempt"] == 1), default=0)
    return first, min(row["step"] for row in rows if row["attempt"] == 2) - 1


def _submitits(cluster: Cluster, folder: Path, how: str) -> dict[str, Any]:
    from submitit import SlurmExecutor

    folder.mkdir(parents=True)
    executor = SlurmExecutor(folder / "jobs")
    executor.update_parameters(
        partition="low", time=60, nodes=1, ntasks_per_node=1, wckey=None, signal_delay_s=120,
        additional_parameters={"requeue": True}, setup=[f"export PYTHONPATH={REPOSITORY}"],
    )  # fmt: skip
    job = executor.submit(SubmititTraining(folder, STEP_S)).job_id
    _wait(lambda: len(_told(folder, "step")) >= STEPS_BEFORE)
    with _disturbed(cluster, job, how) as sent:
        _wait(lambda: "RUNNING" not in cluster.run("squeue", "--noheader", "-j", job, "-o", "%T"))
    _wait(lambda: len(_told(folder, "begin")) == 2 and bool(_told(folder, "first_step")[1:]))
    cluster.run("scancel", job)
    _wait(lambda: not cluster.run("squeue", "--noheader").strip())
    begins, firsts = _told(folder, "begin"), _told(folder, "first_step")
    saved = _told(folder, "saved")
    events = {"saved": saved[0]["time"]} if saved else {}
    steps = [told["step"] for told in _told(folder, "step") if told["time"] < begins[1]["time"]]
    resumed_at = begins[1]["step"]
    return _parts(sent, events, {"begin": begins[1]["time"], "first_step": firsts[1]["time"]}) | {
        "steps lost": max(steps) - resumed_at
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


def _parts(sent: str, first: dict[str, str], second: dict[str, str]) -> dict[str, Any]:
    """Return seconds from event to event. ``saved`` is missing where nothing was saved."""
    parts: dict[str, Any] = {
        "signal to first step": _between(sent, second["first_step"]),
        "begin to first step": _between(second["begin"], second["first_step"]),
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


def _summary(measured: list[dict[str, dict[str, Any]]], slurm: str) -> dict[str, Any]:
    arms = {
        arm: {
            part: statistics.median(each[arm][part] for each in measured if part in each[arm])
            for part in measured[0][arm]
        }
        for arm in measured[0]
    }
    ratios = {
        how: [
            round(each[f"submitit, {how}"][part] / each[f"hpc-train, {how}"][part], 2)
            for each in measured
            for part in ("signal to first step",)
        ]
        for how in ("USR2", "preemption")
    }
    packages = ("torch", "submitit", "hpc-train")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"cpu: {platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "slurm": slurm,
        "rounds": len(measured),
        "medians, seconds and steps": arms,
        "submitit's time over ours, signal to first step": ratios,
        "all": measured,
    }


if __name__ == "__main__":
    main()
