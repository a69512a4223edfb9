"""Seeded random faults that ``bisect`` must name: ``python -m tests.end_to_end.random_faults --seeds 1-60``.

Each seed trains a run with one fault, bisects it with the run without the fault, and compares the answer with
the fault: its step, and its module or whatever it has instead of one. Ten kinds of faults take turns. Results
are added to benchmarks/results/bisect.json.

With ``--on-slurm`` the faults that are wrong computations of one rank are those of a node of a real Slurm.
``recovery.verify_every_steps`` must notice, name and exclude it. Results are added to verify_faults.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from hpc_train.paths import RunPaths
from tests import warm
from tests.cli.json_checks import checked
from tests.commits import REPOSITORY, commit
from tests.end_to_end.flips import BAD_NODE, DROPOUTS, FLIP, LIBRARY, MODULES, Flip
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    hpc_train,
    only_run,
    rows,
    write_experiment,
)
from tests.faults.schedule import parse_seeds
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.experiments import ENVIRONMENT, account, records, wait_for_attempt_end, wait_for_state
from tests.slurm.host import slurm_version

RESULTS = REPOSITORY / "benchmarks" / "results" / "bisect.json"
SLURM_RESULTS = RESULTS.with_name("verify_faults.json")
STEPS, RANKS, MICRO_BATCHES = 20, 2, 4
#: Checkpoints 6, 12, 18 and 20, all of them kept.
TEXT = (
    EXPERIMENT.replace("tests.end_to_end.parts:net", "tests.end_to_end.flips:net")
    .replace("steps: 30", f"steps: {STEPS}")
    .replace("warmup_steps: 20", "warmup_steps: 2")
    .replace("every_steps: 7", "every_steps: 8, keep_every: 6")
)
KINDS = (
    "weight", "gradient", "moment", "batch", "rng", "library", "seed", "file", "threads", "machine",
)  # fmt: skip
STRATEGIES = ("ddp", "zero1", "fsdp", "zero2", "hsdp")
#: On Slurm: one rank per node, and a third that decides which of two is wrong.
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
#: Key → the place of the first difference; ``clip_grad_norm``: at the first step with a larger norm.
FILE_FAULTS: dict[str, dict[str, Any]] = {
    "optimization.optimizer.lr=0.004": {"step": 1, "where": "learning_rate"},
    "optimization.optimizer.weight_decay=0.5": {"step": 1, "where": "update", "module": "stem"},
    "data.augment.crop_padding=3": {"step": 1, "where": "inputs", "micro_batch": 0, "rank": 0},
    "optimization.micro_batch_size=24": {"step": 1, "where": "samples", "micro_batch": 0},
    "model.args.dropout=0.3": {"step": 1, "where": "forward", "module": DROPOUTS[0], "micro_batch": 0},
    "optimization.clip_grad_norm": {"where": "update"},
}


@dataclass(frozen=True)
class Fault:
    """A fault, and the options of the run without it and of the run with it."""

    seed: int
    kind: str
    strategy: str
    flip: Flip
    common: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    environments: Sequence[dict[str, str]] = ({}, {})
    #: The fields of the first difference.
    place: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.flip.number % RANKS

    @property
    def micro_batch(self) -> dict[str, Any]:
        return {"micro_batch": self.flip.number, "rank": self.rank}


@dataclass(frozen=True)
class Result:
    """The end of a seed. ``error`` is empty if ``bisect`` named the fault."""

    seed: int
    kind: str
    strategy: str
    rank: int | None
    fault: str
    step: int | None
    where: str | None
    module: str | None
    stretch: int
    replays: int
    seconds: float
    error: str = ""

    def line(self) -> str:
        place = f"step {self.step}, {self.where} {self.module or ''}"
        cost = f"{self.replays} replays of {self.stretch}, {self.seconds:.0f} s"
        end = f"not named: {self.error.splitlines()[0]}" if self.error else "named"
        return f"seed {self.seed}: {self.kind} {self.fault} ({self.strategy}): {place}: {cost}: {end}"


@dataclass
class Sweep:
    """The runs of a sweep, below ``folder``."""

    folder: Path

    def __post_init__(self) -> None:
        self._quiet = QuietRuns(self.folder / "quiet-runs")

    def seed(self, seed: int) -> Result:
        """Train and bisect a seed's runs. Never raises."""
        began, (fault, random) = time.monotonic(), drawn(seed)
        answer: dict[str, Any] = {}
        try:
            fault = getattr(self, f"_{fault.kind}")(fault, random)
            answer = self._bisected(fault)
            error = problem(fault, answer)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
        place = answer.get("place") or {}
        stretch = (answer.get("first_difference") or answer.get("other_checkpoint") or 0) - (
            answer.get("equal_checkpoint") or 0
        )
        return Result(
            seed,
            fault.kind,
            fault.strategy,
            place.get("rank"),
            " ".join(fault.changes) or str(fault.flip),
            place.get("step"),
            place.get("where"),
            place.get("module"),
            stretch,
            answer.get("replays", 0),
            round(time.monotonic() - began, 1),
            error,
        )

    def _bisected(self, fault: Fault) -> dict[str, Any]:
        common = (f"parallel.strategy={fault.strategy}", *fault.common)
        before, after = fault.environments
        run = self._quiet.of(*common, text=TEXT, ranks=RANKS, environment=before)
        folder = self.folder / f"seed-{fault.seed}"
        words = (*common, *fault.changes, "--local", "--devices", str(RANKS))
        runs = {"HPC_TRAIN_RUNS": str(folder / "runs")}
        done = hpc_train("submit", write_experiment(folder, TEXT), *words, **after, **runs)
        other = only_run(folder)
        assert done.code in (0, 1), done.err  # 1: the flip made a number NaN
        pythons = [
            word
            for environment in fault.environments
            if "PYTHONPATH" in environment
            for word in ("--python", self._python(environment["PYTHONPATH"]))
        ]
        done = hpc_train("bisect", run.folder, other.folder, *pythons, "--json")
        assert done.code == 1, done.err + done.out
        answer: dict[str, Any] = checked("bisect", done.out)
        shutil.rmtree(folder)
        return answer

    def _weight(self, fault: Fault, random: Random) -> Fault:
        """Flip a bit of a weight before it is used; if the output is the same, the update differs."""
        return _with_flip(fault, "weight", where=("forward", "update"), module=fault.flip.module)

    def _gradient(self, fault: Fault, random: Random) -> Fault:
        return _with_flip(fault, "gradient", where="gradients", tensor=f"{fault.flip.module}.weight")

    def _moment(self, fault: Fault, random: Random) -> Fault:
        return _with_flip(
            fault, "moment", where="update", tensor=f"optimizer.{fault.flip.module}.weight.exp_avg"
        )

    def _rng(self, fault: Fault, random: Random) -> Fault:
        """Draw a number more before a module: the next dropout differs."""
        module = random.choice(MODULES[:4])
        dropout = DROPOUTS[MODULES.index(module) > 2]
        fault = replace(fault, flip=replace(fault.flip, module=module, bit=0))
        return _with_flip(fault, "rng", where="forward", module=dropout)

    def _batch(self, fault: Fault, random: Random) -> Fault:
        """Flip a bit of a sample of the data, or of a batch on its way to the model."""
        if random.random() < 0.5:
            return _with_flip(fault, "input", where="before", module="")
        sample = random.choice(self._samples(fault))
        data = ('data={name: "tests.end_to_end.flips:data", augment: {hflip: 0.5}}',)
        bit = random.randint(0, 7)
        changes = (f"data.args={{sample: {sample}, bit: {bit}}}",)
        place = {"step": fault.flip.step, "where": "inputs"} | fault.micro_batch
        return replace(fault, common=data, changes=changes, place=place)

    def _samples(self, fault: Fault) -> list[int]:
        """Return the samples of the fault's micro-batch; each is read once in a run."""
        run = self._quiet.of(f"parallel.strategy={fault.strategy}", text=TEXT, ranks=RANKS)
        done = hpc_train("replay", run.folder, "--step", str(fault.flip.step), "--json")
        assert done.code == 0, done.err
        (replay,) = json.loads(done.out)["replays"]
        batches: list[list[int]] = [batch["samples"] for batch in replay["steps"][0]["micro_batches"]]
        return batches[fault.flip.number]

    def _library(self, fault: Fault, random: Random) -> Fault:
        """Compute with two versions of an installed package, one of which changes a module's output."""
        flip = replace(fault.flip, kind="output")
        environments = []
        for number, text in ((1, ""), (2, str(flip))):
            folder = self.folder / f"library-{fault.seed}-{number}"
            folder.mkdir(exist_ok=True)
            (folder / f"{LIBRARY}.py").write_text(f"FLIP = {text!r}\n")
            environments.append({"PYTHONPATH": str(folder)})
        place = {"step": flip.step, "where": "forward", "module": flip.module} | fault.micro_batch
        return replace(fault, flip=flip, environments=environments, place=place)

    def _python(self, library: str) -> Path:
        """Return an interpreter whose environment has this library."""
        file = Path(library) / "python"
        file.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{library}" exec {sys.executable} "$@"\n')
        file.chmod(0o755)
        return file

    def _seed(self, fault: Fault, random: Random) -> Fault:
        place = {"step": 1, "where": "state", "module": "stem", "rank": None}
        return replace(fault, changes=(f"seed={random.randint(4, 1000)}",), place=place)

    def _file(self, fault: Fault, random: Random) -> Fault:
        change = list(FILE_FAULTS)[(fault.seed // len(KINDS)) % len(FILE_FAULTS)]
        place = dict(FILE_FAULTS[change])
        if "=" not in change:
            run = self._quiet.of(f"parallel.strategy={fault.strategy}", text=TEXT, ranks=RANKS)
            norms = [row["grad_norm"] for row in rows(run, "train")]
            norm = norms[fault.flip.step - 1] * 0.999  # the run's own value is 1
            change = f"{change}={norm:.6f}"
            place["step"] = next(step for step, value in enumerate(norms, 1) if value > min(1, norm))
        return replace(fault, changes=(change,), place=place)

    def _threads(self, fault: Fault, random: Random) -> Fault:
        """Compute with two threads per rank instead of one; the first sum over many elements differs."""
        sizes = ("optimization.micro_batch_size=48", "optimization.global_batch_size=96")
        dropout = f"model.args.dropout={random.randint(0, 50) / 100}"
        return replace(
            fault,
            flip=Flip("threads", 1, 0, "center", 0),
            common=("model.args.center=true", dropout, *sizes),
            environments=[{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}],
            place={"step": 1, "where": "forward", "module": "center", "machine": ["threads"]},
        )

    def _machine(self, fault: Fault, random: Random) -> Fault:
        """Flip a bit that no replay repeats; with a checkpoint of each step, which shows the tensor.

        With clipping all tensors would differ after the step. Under ddp another rank may save its own copy of
        the state, so the bit is one of a gradient, which all ranks receive.
        """
        kind = random.choice(("gradient", "moment", "stored weight"))
        kind = "gradient" if fault.strategy == "ddp" else kind
        flip = replace(fault.flip, kind=kind, bit=random.randint(8, 28))
        return replace(
            fault,
            flip=flip,
            common=("optimization.clip_grad_norm=null", "checkpoint.keep_every=1"),
            environments=[{}, {FLIP: str(flip)}],
            place={"step": flip.step, "where": "checkpoint", "module": flip.module},
        )


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


def drawn(seed: int) -> tuple[Fault, Random]:
    """Return a seed's fault, whose options depend on its kind, and the random numbers for them."""
    random = Random(f"bisect {seed}")
    kind = KINDS[(seed - 1) % len(KINDS)]
    strategies = ("ddp", "zero1", "fsdp") if kind == "machine" else STRATEGIES
    flip = Flip(
        kind,
        random.randint(2, STEPS),
        random.randrange(MICRO_BATCHES),
        random.choice(MODULES),
        random.randint(8, 30),
    )
    return Fault(seed, kind, random.choice(strategies), flip), random


def _with_flip(fault: Fault, kind: str, **place: Any) -> Fault:
    """Return the fault with a flip that replays repeat; ``place``: fields besides step and module."""
    flip = replace(fault.flip, kind=kind)
    if place["where"] in ("forward", "before"):  # the others are sums over micro-batches
        place |= fault.micro_batch
    place = {"step": flip.step, "module": flip.module} | place
    return replace(fault, flip=flip, changes=(f"model.args.flip={flip}",), place=place)


def problem(fault: Fault, answer: dict[str, Any]) -> str:
    """Return how the answer of ``bisect`` differs from the fault; empty if it names it."""
    place = answer["place"] or {}
    values = place | {"machine": list(answer["machine"])}
    for name, expected in fault.place.items():
        options = expected if isinstance(expected, tuple) else (expected,)
        if values.get(name) not in options:
            return f"{name} is {values.get(name)!r}, not {expected!r}: {json.dumps(answer)}"
    keys = sorted({change.partition("=")[0] for change in fault.changes})
    settings = list(answer["difference"]["settings"])
    if not all(any(key.startswith(named) or named.startswith(key) for named in settings) for key in keys):
        return f"keys {settings}, not {keys}"
    is_machine = fault.kind == "machine"
    if [one["is_reproducible"] for one in answer["reproduction"]] != [True, not is_machine]:
        return f"reproduction: {answer['reproduction']}"
    end = min(step for step in (answer["first_difference"], answer["other_checkpoint"]) if step is not None)
    most = math.ceil(math.log2(max(1, end - (answer["equal_checkpoint"] or 0)))) + 2
    return f"{answer['replays']} replays, not {most}" if answer["replays"] > most else ""


def sweep(seeds: Sequence[int], results: Path | None = None) -> list[Result]:
    """Run the seeds one after the other; return those whose fault was not named."""
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-bisect-"))
    running = Sweep(folder)
    failed = _failed((running.seed(seed) for seed in seeds), folder, results)
    if not failed:
        shutil.rmtree(folder)
    return failed


def slurm_sweep(seeds: Sequence[int], parallel: int, results: Path | None = None) -> list[Verified]:
    """Run the seeds on a cluster, several at a time; return those that did not end as expected."""
    os.environ.setdefault("HPC_TRAIN_NO_MEMORY", "1")
    folder = Path(tempfile.mkdtemp(prefix="hpc-train-verify-"))
    settings = Settings(accounting=False, num_nodes=8)
    with running(settings) as cluster, ThreadPoolExecutor(parallel) as pool:
        on_slurm = SlurmSweep(folder, cluster)
        futures = [pool.submit(on_slurm.verified, seed) for seed in seeds]
        failed = _failed((future.result() for future in as_completed(futures)), folder, results)
    if not failed:
        shutil.rmtree(folder)
    return failed


R = TypeVar("R", "Result", "Verified")


def _failed(done: Iterable[R], folder: Path, results: Path | None) -> list[R]:
    """Print and write the results as they come; return those with an error."""
    failed = []
    for result in done:
        print(result.line(), flush=True)
        if results is not None:
            write(results, result)
        if result.error:
            failed.append(result)
            print(f"{result.error[:3000]}\nkept: {folder}", file=sys.stderr, flush=True)
    return failed


def write(path: Path, result: Result | Verified) -> None:
    """Add a seed's result to the file, with the date and the versions."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = {int(run["seed"]): run for run in data.get("runs", [])}
    runs[result.seed] = asdict(result) | {"error": result.error[:300], "commit": commit()}
    ordered = [runs[seed] for seed in sorted(runs)]
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    if isinstance(result, Result):
        replays = Counter(run["replays"] for run in ordered)
        facts |= {"seeds": len(ordered), "named": sum(not run["error"] for run in ordered)}
        facts |= {"runs by number of replays": {str(number): replays[number] for number in sorted(replays)}}
    else:
        facts |= {
            "slurm": "{}.{:02}".format(*slurm_version()),
            "ranks": NODES,
            "steps": STEPS,
            "seeds": len(ordered),
            "noticed": sum(run["noticed_step"] == run["expected_step"] for run in ordered),
            "excluded": sum(run["excluded"] == [run["node"]] for run in ordered),
            "bitwise identical": sum(run["is_equal"] for run in ordered),
            "seeds by kind": dict(Counter(run["kind"] for run in ordered)),
            "not arithmetic": list(SHARED),
        }
    path.write_text(json.dumps(facts | {"runs": ordered}, indent=1) + "\n")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Seeded random faults that bisect must name.")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("1-60"), help="a-b, both included")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--on-slurm", action="store_true", help="those of a node, for verify_every_steps")
    parser.add_argument("--parallel", type=int, default=3, help="runs at a time on Slurm")
    arguments = parser.parse_args(words)
    seeds = arguments.seeds
    if not arguments.on_slurm:
        failed = len(sweep(seeds, arguments.results or RESULTS))
    else:
        seeds = [seed for seed in seeds if drawn(seed)[0].kind not in SHARED]
        try:
            failed = len(slurm_sweep(seeds, arguments.parallel, arguments.results or SLURM_RESULTS))
        finally:
            warm.close()
    print(f"{len(seeds) - failed} of {len(seeds)} faults named", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
