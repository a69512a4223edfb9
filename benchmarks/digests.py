"""The cost of digests of parts, and the time of `verify --replay` relative to that of its run.

    python -m benchmarks.digests [--rounds 7] [--only digests verify] [--steps 200] [--quick]

Digests of weights and optimizer state by module (`checkpoint.digests: parts`) are computed between windows of
training steps of the models of benchmarks/step.py, on one rank with one thread, in the same process. Their
share of the time follows from the steps between two of them, which training chooses by the same rule.

The verified run trains the GPT of benchmarks/step.py on one rank with one thread, with a checkpoint at the
end of each of 20 stretches. `hpc-train submit` and `hpc-train verify --replay --slots 2` are timed as whole
commands, one right after the other.
Writes benchmarks/results/digests.json.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arms import environment, printed
from benchmarks.loops import WORKLOADS, Workload, loss_of
from benchmarks.measuring import conditions, parser, report, rounds_of, table
from benchmarks.step import experiment_of
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.optimization import Optimization
from hpc_train.training.state_digests import MAX_SHARE, PARTS_EVERY, PartDigests
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.train_state import TrainState

MODELS = ("mlp", "resnet18", "resnet50", "vit_tiny", "gpt", "host_eager")
STRETCHES, SLOTS = 20, 2


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=["digests", "verify"], default=["digests", "verify"])
    options.add_argument("--steps", type=int, default=200, help="steps of each stretch; default: 200")
    arguments = options.parse_args()
    measured_with = conditions() | {"threads of each rank": 1}
    if "digests" in arguments.only:
        rows = {name: _cost(WORKLOADS[name], arguments) for name in MODELS}
        remark = "Medians; a step and the digests in turns"
        measured = table("Digests of parts", "", rows, remark=remark)
        report("digests", arguments, measured_with, tables=[measured])
    if "verify" in arguments.only:
        steps = 2 if arguments.quick else arguments.steps
        title = f"Verification of a run of {STRETCHES} stretches in {SLOTS} slots"
        measured = table(title, "", {"gpt": _verification(steps)})
        report("digests", arguments, measured_with, tables=[measured])


def _cost(workload: Workload, arguments: Any) -> dict[str, float | None]:
    """Return the time of a step and of digests, and the digests' share of the time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = workload.model()
    optimizer_type = torch.optim.SGD if workload.optimizer == "sgd" else torch.optim.AdamW
    optimizer = optimizer_type(model.parameters(), lr=workload.lr)
    cpu, precision = torch.device("cpu"), choose_precision("fp32", torch.device("cpu"))
    strategy = DDPStrategy(RankContext(0, Degrees(), cpu, precision))
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wrapped = strategy.place(model, [])
    optimization = Optimization(optimizer, lambda step: 1.0, precision, cpu)
    state = TrainState(model, wrapped, strategy, optimization)
    digests = PartDigests(state, None, 1, 1, 1)
    images, targets = workload.data()
    batch = workload.global_batch_size
    starts = itertools.cycle(range(0, len(images) - batch, batch))

    def step() -> torch.Tensor:
        start = next(starts)
        inputs = workload.prepare(images[start : start + batch])
        loss = loss_of(wrapped(inputs), targets[start : start + batch])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step_times, digest_times = [], []
    window = max(1, workload.window // 5)
    for number in range(rounds_of(arguments) + 1):
        began = time.perf_counter()
        for _ in range(window):
            loss = step()
        trained = time.perf_counter()
        digests.step_done(number + 1, loss)
        step_times.append((trained - began) / window)
        digest_times.append(time.perf_counter() - trained)
    step_s, digests_s = statistics.median(step_times[1:]), statistics.median(digest_times[1:])
    share = digests_s / (step_s * PARTS_EVERY)
    every = PARTS_EVERY << math.ceil(math.log2(max(share, MAX_SHARE) / MAX_SHARE))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step (ms)": step_s * 1000,
        "digests (ms)": digests_s * 1000,
        "steps between digests": every,
        "share of the time (%)": 100 * digests_s / (step_s * every),
    }


def _verification(steps: int) -> dict[str, float | None]:
    """Train and verify a run; return the times of both commands."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.yaml"
        file.write_text(experiment_of(WORKLOADS["gpt"], Path(folder)), encoding="utf-8")
        keys = {
            "optimization.steps": STRETCHES * steps,
            "checkpoint.every_steps": steps,
            "checkpoint.keep_every": steps,
            "logging.every_steps": steps,
        }
        words = [f"{key}={value}" for key, value in keys.items()]
        variables = environment(None) | {"HPC_TRAIN_RUNS": folder}
        submit = ["submit", str(file), "--local", "--devices", "1", "device=cpu", *words]
        loads = [os.getloadavg()[0]]
        times = []
        for command in (submit, ["verify", "step", "--replay", "--slots", str(SLOTS), "--json"]):
            began = time.monotonic()
            output = printed([sys.executable, "-m", "hpc_train", *command], variables)
            times.append(time.monotonic() - began)
            loads.append(os.getloadavg()[0])
    (run,) = json.loads(output)["runs"]
    results = [stretch["result"] for stretch in run["stretches"]]
    assert results == ["identical"] * STRETCHES, results
    return {
        "steps": STRETCHES * steps,
        "run (s)": times[0],
        "verification (s)": times[1],
        "verification / run": times[1] / times[0],
        "load before": loads[0],
        "load after the run": loads[1],
        "load after": loads[2],
    }


if __name__ == "__main__":
    main()
