"""Seeded random faults that ``bisect`` must name: ``python -m tests.end_to_end.random_faults --seeds 1-60``.

Each seed trains a run with one fault, bisects it with the run without the fault, and compares the answer with
the fault: its step, and its module or whatever it has instead of one. Ten kinds of faults take turns. Results
are added to benchmarks/results/bisect.json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.cli.json_checks import checked
from tests.commits import REPOSITORY
from tests.end_to_end.flips import DROPOUTS, FLIP, LIBRARY, MODULES, Flip
from tests.end_to_end.runs import (
    EXPERIMENT,
    hpc_train,
    only_run,
    rows,
    write_experiment,
)
from tests.faults.results import failed_results
from tests.faults.schedule import parse_seeds
from tests.quiet import QuietRuns

RESULTS = REPOSITORY / "benchmarks" / "results" / "bisect.json"
STEPS, RANKS, MICRO_BATCHES = 20, 2, 4
#: Checkpoints 6, 12, 18 and 20, all of them kept.
TEXT = (
    EXPERIMENT.replace("tests.end_to_end.parts:net", "tests.end_to_end.flips:net")
    .replace("steps: 60", f"steps: {STEPS}")
    .replace("warmup_steps: 20", "warmup_steps: 2")
    .replace("every_steps: 7", "every_steps: 8, keep_every: 6")
)
KINDS = (
    "weight", "gradient", "moment", "batch", "rng", "library", "seed", "file", "threads", "machine",
)  # fmt: skip
STRATEGIES = ("ddp", "zero1", "fsdp", "zero2", "hsdp")
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    failed = failed_results((running.seed(seed) for seed in seeds), folder, results, facts)
    if not failed:
        shutil.rmtree(folder)
    return failed


def facts(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of faults that were named, and of runs by the number of replays."""
    replays = Counter(run["replays"] for run in runs)
    counts = {"seeds": len(runs), "named": sum(not run["error"] for run in runs)}
    return counts | {
        "runs by number of replays": {str(number): replays[number] for number in sorted(replays)}
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Seeded random faults that bisect must name.")
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("1-60"), help="a-b, both included")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    failed = len(sweep(arguments.seeds, arguments.results))
    print(f"{len(arguments.seeds) - failed} of {len(arguments.seeds)} faults named", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
