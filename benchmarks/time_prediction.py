"""The duration that ``plan`` predicts after one measured run, beside the duration of the run itself.

    python -m benchmarks.time_prediction [--rounds 3] [--networks device cpu] [--quick]

In each round a first run is trained, then for each change of its size ``plan`` predicts the changed run by
the first one alone, and the changed run is trained. Durations are those of ``status``: from the begin of an
attempt to its end, with evaluations and saves. Two networks on synthetic images, on CPU ranks of one thread:
``device`` computes little and waits 2 ms per sample in each forward pass, as a host waits for its GPU, so
that other load on the machine matters little; ``cpu`` has three convolutions, whose times differ between
two runs as much as the other load does. Writes benchmarks/results/time_prediction.json. ``--quick``: one
round of short runs.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, conditions, parser, report, table
from hpc_train.cli.plan_cost import mean_step_s
from hpc_train.errors import counted
from hpc_train.paths import RunPaths
from hpc_train.report.metrics_reader import rows_in

TITLES = {
    "device": "Duration predicted by plan after one run of another size, simulated device",
    "cpu": "Duration predicted by plan after one run of another size, CPU",
}
SAMPLE_S = 0.002
STEPS, STEPS_QUICK = 200, 20
_EXPERIMENT = """\
name: predicted
device: cpu
task: classification
model: {name: "benchmarks.time_prediction:NETWORK"}
data: {name: synthetic, args: {num_samples: 4096}, image_size: 32}
optimization:
  steps: STEPS
  global_batch_size: 64
  micro_batch_size: 8
  optimizer: {name: adamw, lr: 0.001}
evaluation: {every_steps: INTERVAL}
logging: {every_steps: 5}
"""


def changes(steps: int) -> dict[str, tuple[int, list[str]]]:
    """Return change → ranks and overrides of the changed run. The first run has one rank."""
    return {
        "half the global batch": (1, ["optimization.global_batch_size=32"]),
        "twice the global batch": (1, ["optimization.global_batch_size=128"]),
        "two ranks": (2, []),
        "two ranks, twice the batch": (2, ["optimization.global_batch_size=128"]),
        "micro-batches of 16": (1, ["optimization.micro_batch_size=16"]),
        "twice the steps": (1, [f"optimization.steps={2 * steps}"]),
    }


def cpu() -> Any:
    """Return a network of three convolutions."""
    from torch import nn

    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def device() -> Any:
    """Return a linear layer that takes ``SAMPLE_S`` per sample, in evaluations half of that."""
    from torch import Tensor, nn

    class Waiting(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            time.sleep(len(images) * SAMPLE_S / (1 if self.training else 2))
            return images

    return nn.Sequential(Waiting(), nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def _hpc_train(folder: Path, *words: str) -> str:
    environment = os.environ | {"HPC_TRAIN_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hpc_train", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout


@dataclass(frozen=True)
class Times:
    """Of a run: its duration, and the mean of its steps."""

    duration_s: float
    step_s: float


def _trained(folder: Path, file: Path, ranks: int, overrides: Sequence[str]) -> Times:
    """Train the run and return its times."""
    # --new: a run on another number of ranks has the same id.
    words = [*overrides, "--local", "--devices", str(ranks), "--json", "--new"]
    (row,) = json.loads(_hpc_train(folder, "submit", str(file), *words))["runs"]
    step_s = mean_step_s(list(rows_in(RunPaths(Path(row["path"])).metrics)))
    assert step_s is not None, "it has rows with times"
    return Times(float(row["elapsed_s"]), step_s)


def _predicted(folder: Path, file: Path, ranks: int, overrides: Sequence[str]) -> Times:
    words = [*overrides, "--local", "--devices", str(ranks), "--json"]
    (run,) = json.loads(_hpc_train(folder, "plan", str(file), *words))["cost"]["runs"]
    return Times(float(run["duration_s"]), float(run["step_s"]))


def measure(network: str, steps: int) -> dict[str, tuple[Times, Times]]:
    """Return change → predicted and measured times; each prediction knows the first run only."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        first, file = Path(name, "first"), Path(name, "exp.yaml")
        text = _EXPERIMENT.replace("NETWORK", network).replace("STEPS", str(steps))
        file.write_text(text.replace("INTERVAL", str(steps // 2)), encoding="utf-8")
        _trained(first, file, 1, [])
        for number, (change, (ranks, overrides)) in enumerate(changes(steps).items()):
            folder = Path(name, str(number))
            shutil.copytree(first, folder, symlinks=True)
            predicted = _predicted(folder, file, ranks, overrides)
            found[change] = predicted, _trained(folder, file, ranks, overrides)
            print(
                f"{change}: predicted {predicted}, measured {found[change][1]}", file=sys.stderr, flush=True
            )
    return found


def results(network: str, rounds: Sequence[Mapping[str, tuple[Times, Times]]]) -> dict[str, Any]:
    """Return the table: medians of the rounds, and the median error."""
    rows: dict[str, dict[str, float | None]] = {}
    for change in rounds[0]:
        pairs = [each[change] for each in rounds]
        rows[change] = {
            "step predicted (ms)": statistics.median(1000 * predicted.step_s for predicted, _ in pairs),
            "step measured (ms)": statistics.median(1000 * measured.step_s for _, measured in pairs),
            "error of the step (%)": _error([(one.step_s, other.step_s) for one, other in pairs]),
            "run predicted (s)": statistics.median(predicted.duration_s for predicted, _ in pairs),
            "run measured (s)": statistics.median(measured.duration_s for _, measured in pairs),
            "error of the run (%)": _error([(one.duration_s, other.duration_s) for one, other in pairs]),
        }
    return table(TITLES[network], "", rows, remark=f"Median of {counted(len(rounds), 'round')}")


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    return 100 * statistics.median(predicted / measured - 1 for predicted, measured in pairs)


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--networks", nargs="+", choices=list(TITLES), default=list(TITLES))
    arguments = options.parse_args()
    count, steps = (1, STEPS_QUICK) if arguments.quick else (max(arguments.rounds, 1), STEPS)
    for network in arguments.networks:
        rounds = [measure(network, steps) for _ in range(count)]
        report("time_prediction", arguments, conditions(), tables=[results(network, rounds)])


if __name__ == "__main__":
    main()
