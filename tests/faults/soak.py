"""Seeded random faults on runs of a real Slurm, several at a time: ``… -m tests.faults.soak --seeds 1-100``.

Starts a cluster of its own. A line a seed; exit code 1 where a run did not end as the run that nothing
happened to: its folder is kept then. Each seed's result is added to benchmarks/results/soak.json, so that a
soak can be stopped and continued with the remaining seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from tests import warm
from tests.commits import commit
from tests.faults.driver import survive
from tests.faults.on_slurm import SlurmRun
from tests.faults.schedule import Frame, Schedule, parse_seeds
from tests.quiet import QuietRuns
from tests.slurm.cluster import REPOSITORY, Cluster, running
from tests.slurm.configuration import NUM_NODES, Settings
from tests.slurm.experiments import ENVIRONMENT, records
from tests.slurm.host import program_path

RESULTS = REPOSITORY / "benchmarks" / "results" / "soak.json"
_NAMES = REPOSITORY / ".pytest_cache" / "hpc-train"
RANKS_PER_NODE = 2
#: Steps of a fifth of a second on one node: a run is not over before its faults have struck.
_PACE_S = 0.05
_STEPS = 40
_LAST_STRIKE = 28
EXPERIMENT = """\
name: {name}
seed: 3
task: classification
model: {{name: "tests.end_to_end.paced:net"}}
data: {{name: digits, augment: {{hflip: 0.5, crop_padding: 2}}}}
optimization:
  steps: {steps}
  global_batch_size: 48
  micro_batch_size: 12
  optimizer: {{name: adamw, lr: 0.003}}
  schedule: {{name: cosine, warmup_steps: 20}}
  clip_grad_norm: 1.0
evaluation: {{every_steps: 20}}
checkpoint: {{every_steps: 3}}
recovery: {{max_crashes: 100, max_without_progress: 100, exclude_nodes_for_h: 0}}
logging: {{every_steps: 1}}
parallel: {{strategy: {strategy}}}
slurm: {{partition: low, nodes: {nodes}, ranks_per_node: {ranks}, time_limit: 2h, extra: {{exclusive: true}}}}
"""


@dataclass(frozen=True)
class Result:
    """What became of a seed. ``error`` is empty where its run equals the uninterrupted one."""

    seed: int
    strategy: str
    nodes: int
    faults: list[str]
    attempts: list[str]
    seconds: float
    error: str = ""

    def line(self) -> str:
        end = f"differs: {self.error.splitlines()[0]}" if self.error else "equal"
        faults = ", ".join(self.faults)
        return f"seed {self.seed}: {self.strategy} on {self.nodes}: {faults}: {self.seconds:.0f} s: {end}"


class NodePool:
    """The cluster's nodes, each for one run at a time: what preempts a run must not hit another."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


@dataclass
class Soak:
    """One soak's cluster, runs and results."""

    cluster: Cluster
    folder: Path
    nodes: NodePool = field(default_factory=lambda: NodePool(NUM_NODES))

    def __post_init__(self) -> None:
        self._quiet = QuietRuns(self.folder / "quiet-runs")

    def seed(self, seed: int) -> Result:
        """Run a seed to its end. Never raises."""
        random = Random(f"soak {seed}")
        strategy, nodes = random.choice(["ddp", "fsdp"]), random.choice([1, 2])
        ranks = nodes * RANKS_PER_NODE
        faults = Schedule.of(seed, "soak", Frame(ranks, nodes, first=2, last=_LAST_STRIKE)).faults
        shape = {"steps": _STEPS, "strategy": strategy, "nodes": nodes, "ranks": RANKS_PER_NODE}
        folder, error, run = self.folder / f"seed-{seed}", "", None
        with self.nodes.taken(nodes):
            began = time.monotonic()
            try:
                quiet = self._quiet.of(
                    text=EXPERIMENT.format(name="quiet", **shape), ranks=ranks, environment=ENVIRONMENT
                )
                text = EXPERIMENT.format(name=f"soak-{seed}", **shape)
                # Under one folder, so that all share one snapshot of the code.
                run = SlurmRun(self.cluster, folder, text, pace_s=_PACE_S, runs=self.folder / "runs")
                survive(run, faults, quiet)
            except Exception as failure:
                error = str(failure) or type(failure).__name__
                if run is not None:
                    self.cluster.run("scancel", f"--name={run.paths.folder.parent.name}", check=False)
        attempts = [str(record.cause) for record in records(run.paths)] if run else []
        names = [f"{type(fault).__name__} at {fault.step}" for fault in faults]
        result = Result(seed, strategy, nodes, names, attempts, round(time.monotonic() - began, 1), error)
        if run is not None and not error:
            shutil.rmtree(run.paths.folder, ignore_errors=True)
        return result


def soak(seeds: Sequence[int], parallel: int, results: Path | None = None) -> list[Result]:
    """Run all seeds; return those whose run differs, in no order. Says a line a seed."""
    os.environ.setdefault("HPC_TRAIN_CACHE", str(_NAMES))
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-soak-"))
    failed = []
    with running(Settings(accounting=False)) as cluster, ThreadPoolExecutor(parallel) as pool:
        running_soak = Soak(cluster, folder)
        for result in pool.map(running_soak.seed, seeds):
            print(result.line(), flush=True)
            if results is not None:
                write(results, result)
            if result.error:
                failed.append(result)
                print(f"{result.error}\nkept: {folder}", file=sys.stderr, flush=True)
    if not failed:
        shutil.rmtree(folder)
    return failed


def write(path: Path, result: Result) -> None:
    """Add a seed's result to the file, in the place of an earlier one's; first what it was measured with."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = {int(each["seed"]): each for each in known.get("runs", [])}
    found = {"equal": not result.error, "error": result.error[:500], "commit": commit()}
    runs[result.seed] = asdict(result) | found
    ordered = [runs[seed] for seed in sorted(runs)]
    counts = {"seeds": len(ordered), "equal": sum(each["equal"] for each in ordered)}
    told = {"date": datetime.now(UTC).date().isoformat()} | versions() | counts | {"runs": ordered}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(told, indent=1) + "\n")
    temporary.rename(path)


def versions() -> dict[str, str]:
    """Return what the runs were made with."""
    from importlib.metadata import version

    slurm = subprocess.run(
        [program_path("slurmctld"), "-V"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"python": platform.python_version(), "torch": version("torch"), "slurm": slurm}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Seeded random faults on a real Slurm.")
    parser.add_argument("--seeds", type=parse_seeds, required=True, help="a-b, both included")
    parser.add_argument("--parallel", type=int, default=3, help="runs at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    os.environ[warm.FRESH] = "1"  # a soak tests ranks that start as a user's do
    failed = soak(arguments.seeds, arguments.parallel, arguments.results)
    print(f"{len(arguments.seeds) - len(failed)} of {len(arguments.seeds)} equal to the bit", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
