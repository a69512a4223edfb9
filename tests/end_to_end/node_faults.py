"""Seeded random faults of a node of a real Slurm: ``python -m tests.end_to_end.node_faults --seeds 1-60``.

The faults are those of ``random_faults`` that are wrong computations of one rank.
``recovery.verify_every_steps`` must notice the fault, name the node and exclude it. Results are added to
benchmarks/results/verify_faults.json.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from hpc_train.paths import RunPaths
from tests import warm
from tests.commits import REPOSITORY
from tests.end_to_end.flips import BAD_NODE, FLIP, Flip
from tests.end_to_end.random_faults import STEPS, TEXT, Fault, Sweep, drawn
from tests.end_to_end.runs import assert_equal_to_the_bit, hpc_train, write_experiment
from tests.faults.results import failed_results
from tests.faults.schedule import parse_seeds
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.experiments import ENVIRONMENT, account, records, wait_for_attempt_end, wait_for_state
from tests.slurm.host import slurm_version

RESULTS = REPOSITORY / "benchmarks" / "results" / "verify_faults.json"
#: One rank per node, and a third that decides which of two is wrong.
NODES = 3
#: The kinds of faults that all ranks share, so that no rank computes otherwise than another.
SHARED = ("seed", "file", "threads")
#: Flips in or after the optimizer's update, which the next check sees. Under ``zero1`` a single rank updates
#: each slice, so no other rank has numbers to compare.
OF_THE_UPDATE = ("moment", "stored weight")
#: Flips that stay in the weights or in the optimizer's state. Others recur, unless every step is checked.
LASTING = ("weight", *OF_THE_UPDATE)
#: The exponent's highest bit: numbers may overflow, and then ``on_non_finite`` ends an unchecked step.
HIGHEST_BIT = 30
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Verified:
    """A seed on Slurm. ``error`` is empty if the fault was noticed at the expected step, its rank and node
    were named, the node was excluded, and the run is bitwise identical to one without the fault.
    """

    seed: int
    kind: str
    strategy: str
    flip: str
    recurs: bool
    verify_every_steps: int
    spare_nodes: int
    rank: int
    expected_step: int
    noticed_step: int | None = None
    named_rank: int | None = None
    node: str = ""
    excluded: Sequence[str] = ()
    reason: str = ""
    attempts: Sequence[str] = ()
    is_equal: bool = False
    seconds: float = 0.0
    error: str = ""

    def line(self) -> str:
        end = f"not as expected: {self.error.splitlines()[0]}" if self.error else "noticed, excluded, equal"
        place = f"step {self.noticed_step}, rank {self.rank} on {self.node}"
        fault = f"{self.flip} ({self.strategy}, every {self.verify_every_steps})"
        return f"seed {self.seed}: {self.kind} {fault}: {place}: {self.seconds:.0f} s: {end}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SlurmSweep(Sweep):
    """Runs on ``cluster`` in which a node computes wrongly, below ``folder``."""

    cluster: Cluster

    def verified(self, seed: int) -> Verified:
        """Train a seed's run. Never raises. ``seed``: not of a kind in ``SHARED``."""
        began, (fault, random) = time.monotonic(), drawn(seed)
        flip, more = self._flip_of_a_node(fault, random), Random(f"verify {seed}")
        every = 1 if flip.bit >= HIGHEST_BIT else more.choice((1, 5))
        result = Verified(
            seed,
            fault.kind,
            "zero1" if fault.strategy == "zero1" and flip.kind not in OF_THE_UPDATE else "ddp",
            str(flip),
            every > 1 and flip.kind not in LASTING,
            every,
            more.choice((0, 1)),
            flip.number % NODES,
            expected_step(flip, every),
        )
        error = ""
        try:
            run = self._trained(result)
            result = self._noticed(result, run)
            self._check(result, run)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        seconds = round(time.monotonic() - began, 1)
        return replace(result, is_equal=not error, seconds=seconds, error=error)

    def _flip_of_a_node(self, fault: Fault, random: Random) -> Flip:
        """Return the flip of the list; changed data and another library are those of one node."""
        kinds = {"batch": "input", "library": "output"}
        if fault.kind in kinds:
            return replace(fault.flip, kind=kinds[fault.kind])
        flip: Flip = getattr(self, f"_{fault.kind}")(fault, random).flip
        return flip

    def _bad_node(self, result: Verified) -> Path:
        return self.folder / f"node-{result.seed}"

    def _trained(self, result: Verified) -> RunPaths:
        """Submit the run and wait for its end."""
        name = f"verify-{result.seed}"
        slurm = f"partition: low, nodes: {NODES}, ranks_per_node: 1, spare_nodes: {result.spare_nodes}"
        words = (
            f"name={name}",
            f"slurm={{{slurm}, time_limit: 30min}}",
            f"parallel.strategy={result.strategy}",
            f"recovery.verify_every_steps={result.verify_every_steps}",
        )
        flip = Flip.parsed(result.flip)
        flip = replace(flip, num_steps=STEPS - flip.step + 1 if result.recurs else 1)
        bits = {FLIP: str(flip), BAD_NODE: str(self._bad_node(result))}
        runs = {"HPC_TRAIN_RUNS": str(self.folder / "runs")}
        environment = ENVIRONMENT | self.cluster.environment | warm.for_jobs() | bits | runs
        done = hpc_train("submit", write_experiment(self.folder / name, TEXT), *words, **environment)
        assert done.code == 0, done.err
        (record,) = (self.folder / "runs" / name).glob("[!.]*/run.json")
        run = RunPaths(record.parent)
        wait_for_state(run, "completed", "failed", limit_s=_LIMIT_S)
        wait_for_attempt_end(run, len(records(run)))
        return run

    def _noticed(self, result: Verified, run: RunPaths) -> Verified:
        """Return the result with the first attempt's end, and the causes of all."""
        first, bad_node = records(run)[0], self._bad_node(result)
        reason = re.search(r": rank (\d+) computed wrong numbers in step (\d+): ", first.reason or "")
        return replace(
            result,
            node=bad_node.read_text() if bad_node.exists() else "",
            named_rank=int(reason[1]) if reason else None,
            noticed_step=int(reason[2]) if reason else None,
            excluded=list(first.bad_nodes),
            reason=first.reason or "",
            attempts=[str(record.cause) for record in records(run)],
        )

    def _check(self, result: Verified, run: RunPaths) -> None:
        named = (result.noticed_step, result.named_rank, list(result.excluded), result.attempts)
        expected = (result.expected_step, result.rank, [result.node], ["bad node", "completed"])
        assert named == expected, f"{named}, not {expected}\n{account(run)}"
        first, second = records(run)
        assert first.hosts[result.rank] == result.node and result.node not in second.hosts, account(run)
        words = f"parallel.strategy={result.strategy}"
        assert_equal_to_the_bit(self._quiet.of(words, text=TEXT, ranks=NODES, environment=ENVIRONMENT), run)


def expected_step(flip: Flip, every: int) -> int:
    """Return the first step whose check can see the flip, counted from 1."""
    first = flip.step - (flip.kind not in OF_THE_UPDATE)
    checked_steps = [step for step in range(STEPS) if step % every == 0 or step == STEPS - 1]
    return min((step for step in checked_steps if step >= first), default=STEPS - 1) + 1


def slurm_sweep(seeds: Sequence[int], parallel: int, results: Path | None = None) -> list[Verified]:
    """Run the seeds on a cluster, several at a time; return those that did not end as expected."""
    os.environ.setdefault("HPC_TRAIN_NO_MEMORY", "1")
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-verify-"))
    settings = Settings(accounting=False, num_nodes=8)
    with running(settings) as cluster, ThreadPoolExecutor(parallel) as pool:
        on_slurm = SlurmSweep(folder, cluster)
        futures = [pool.submit(on_slurm.verified, seed) for seed in seeds]
        failed = failed_results((future.result() for future in as_completed(futures)), folder, results, facts)
    if not failed:
        shutil.rmtree(folder)
    return failed


def facts(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the version of Slurm, the size of the runs, and counts of results."""
    return {
        "slurm": "{}.{:02}".format(*slurm_version()),
        "ranks": NODES,
        "steps": STEPS,
        "seeds": len(runs),
        "noticed": sum(run["noticed_step"] == run["expected_step"] for run in runs),
        "excluded": sum(run["excluded"] == [run["node"]] for run in runs),
        "bitwise identical": sum(run["is_equal"] for run in runs),
        "seeds by kind": dict(Counter(run["kind"] for run in runs)),
        "not arithmetic": list(SHARED),
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Seeded random faults of a node of a real Slurm.")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("1-60"), help="a-b, both included")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--parallel", type=int, default=3, help="runs at a time")
    arguments = parser.parse_args(words)
    seeds = [seed for seed in arguments.seeds if drawn(seed)[0].kind not in SHARED]
    try:
        failed = len(slurm_sweep(seeds, arguments.parallel, arguments.results))
    finally:
        warm.close()
    print(f"{len(seeds) - failed} of {len(seeds)} faults named", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
