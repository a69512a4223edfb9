"""Ratios that tutorials open with, by the real command: bf16 to fp32, compiled to eager, more ranks to one.

    python -m benchmarks.headlines [--data data/cifar10-images] [--rounds 7] [--quick]

Every arm is `hpc-train submit --local` of one experiment with other settings, for a fixed number of steps of
the same global batch; its figure is the median of `samples_per_s` over the rows of the second half of the
steps, so start, compilation and evaluation do not count. With CUDA devices a GPT of GPT-2's smallest size is
trained on 1, 2 and 4 of them, as many as there are; on CPU a GPT of 0.4 M parameters on 1 and 2 ranks of one
thread each. And, measured once: accuracy and seconds of examples/cifar10-cpu.yaml, or with a CUDA device of
examples/cifar10-94.yaml (--data: CIFAR-10's images in train/ and test/; without, that is not measured).
Writes benchmarks/results/headlines.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_cases import MODELS
from benchmarks.measuring import ROOT, comparison, conditions, interleaved, parser, report, rounds_of, table

QUICK_STEPS = 8
RECIPES = {"cpu": ("cifar10-cpu.yaml", 2), "cuda": ("cifar10-94.yaml", 1)}
UNIT = "samples per second"


@dataclass(frozen=True)
class Arm:
    """Settings of one arm: ranks, and what it changes of the experiment, by key path."""

    ranks: int
    changes: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--data", type=Path, default=ROOT / "data" / "cifar10-images")
    options = made.parse_args()
    import torch

    devices = torch.cuda.device_count()
    name = torch.cuda.get_device_name() if devices else None
    measured_with = conditions(device=name) | {"devices": devices}
    comparisons = [
        compare(title, devices, arms, options) for title, arms in cases(devices).items() if len(arms) > 1
    ]
    tables = [] if options.quick else recipe("cuda" if devices else "cpu", options.data)
    report("headlines", options, measured_with, comparisons, tables)


def cases(devices: int) -> dict[str, dict[str, Arm]]:
    """Return the arms by title, the baseline first; ``devices``: CUDA devices, 0: the arms run on the CPU."""
    one, where = ("GPU", "one GPU") if devices else ("rank", "one CPU rank")
    precisions = {"fp32": Arm(1), "bf16": Arm(1, {"precision": "bf16"})}
    if devices:
        precisions["tf32"] = Arm(1, {"precision": "tf32"})
    base = {"precision": "bf16"} if devices else {}
    ranks = [number for number in (1, 2, 4) if number <= (devices or (os.cpu_count() or 1))]
    return {
        f"GPT, precision, {where}": precisions,
        f"GPT, compiled against eager, {where}": {
            "eager": Arm(1, base),
            "compiled": Arm(1, base | {"compile": True}),
        },
        f"GPT, DDP on more {one}s": {
            f"{number} {one}{'s' * (number > 1)}": Arm(number, base) for number in ranks
        },
    }


def compare(title: str, devices: int, arms: Mapping[str, Arm], options: argparse.Namespace) -> dict[str, Any]:
    steps = QUICK_STEPS if options.quick else 60
    timed = {name: functools.partial(samples_per_s, arm, devices, steps) for name, arm in arms.items()}
    if any("compile" in arm.changes for arm in arms.values()):
        for run in timed.values():  # fills inductor's cache
            run()
    values = interleaved(timed, rounds_of(options))
    result = comparison(title, UNIT, values, next(iter(arms)))
    print(json.dumps(result, indent=1), flush=True)
    return result


def samples_per_s(arm: Arm, devices: int, steps: int) -> float:
    """Train ``steps`` steps by the real command; return the median rate of their second half."""
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder, "exp.yaml"), Path(folder, "text.txt")
        text.write_text("".join(random.Random(0).choices(string.printable[:95], k=1 << 18)), encoding="utf-8")
        file.write_text(yaml.safe_dump(experiment(arm, devices, steps, text)), encoding="utf-8")
        rows, _ = train(file, arm.ranks, Path(folder, "runs"))
    rates: list[float] = [
        row["samples_per_s"] for row in rows if row["split"] == "train" and row["step"] > steps // 2
    ]
    return statistics.median(rates)


def experiment(arm: Arm, devices: int, steps: int, text: Path) -> dict[str, Any]:
    """Return the experiment of an arm: a GPT on random characters."""
    size = MODELS["gpt"].args or {} if devices else {"num_layers": 4, "num_heads": 4, "dim": 96}
    length, batch = (MODELS["gpt"].size, 32) if devices else (128, 16)
    return {
        "name": "headlines",
        "task": "causal_lm",
        "device": "cuda" if devices else "cpu",
        "deterministic": False,
        "model": {"name": "gpt", "args": dict(size)},
        "data": {"name": "text", "root": str(text), "args": {"sequence_length": length}},
        "optimization": {
            "steps": steps,
            "global_batch_size": batch,
            "micro_batch_size": batch // 4,
            "optimizer": {"name": "adamw", "lr": 3e-4},
        },
        "logging": {"every_steps": 2},
        **arm.changes,
    }


def recipe(device: str, data: Path) -> list[dict[str, Any]]:
    """Return accuracy and seconds of the recipe for ``device``; none without data."""
    name, ranks = RECIPES[device]
    if not data.is_dir():
        print(f"{name}: not measured: {data} does not exist; --data names a folder", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder:
        rows, seconds = train(ROOT / "examples" / name, ranks, Path(folder), f"data.root={data.absolute()}")
    accuracy = [row["accuracy"] for row in rows if row["split"] == "val"][-1]
    row = {f"hpc-train, {ranks} rank{'s' * (ranks > 1)}": {"accuracy": accuracy, "seconds": seconds}}
    return [table(f"examples/{name}, whole command", "", row)]


def train(file: Path, ranks: int, runs: Path, *changes: str) -> tuple[list[dict[str, Any]], float]:
    """Train by the real command; return all rows of metrics.jsonl and the command's seconds."""
    command = [sys.executable, "-m", "hpc_train", "submit", str(file), *changes]
    command += ["--local", "--devices", str(ranks), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    (run,) = json.loads(done.stdout)["runs"]
    lines = Path(run["path"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], round(seconds, 1)


if __name__ == "__main__":
    main()
