"""The time of a training step beside a bare PyTorch loop, a DataLoader loop, Fabric and Accelerate.

    python -m benchmarks.step [--rounds 7] [--models mlp resnet18] [--peers FOLDER]

Each arm trains the same model on the same images with the same optimizer in a process of its own, one rank,
one thread, on the CPU, and takes the median time of a step after a warm-up. Ours is a whole run of
``hpc-train submit --local``: metrics, exchange between ranks, checkpoints and validation of the data are on;
its steps are timed by the rows of ``metrics.jsonl``. Rounds are interleaved and each ratio is taken within
its round, so that a busy machine disturbs all alike. ``--peers``: where the packages of
requirements-peers.txt were installed; without them their arms are "not measured". Writes
benchmarks/results/step.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measuring import MIN_ROUNDS, ROOT, comparison, conditions, interleaved, write

BARE, OURS = "bare loop", "hpc-train"
PEERS = {"Fabric": "lightning-fabric", "Accelerate": "accelerate"}
BATCH, NUM_CLASSES = 64, 10
#: Steps per window, of which each gives one time; windows of the warm-up; windows that count.
WINDOWS = {"mlp": (100, 5, 30), "resnet18": (2, 2, 8)}
MEAN, STD, LR = 0.5, 0.5, 0.01

EXPERIMENT = """\
name: step
task: classification
model: {{name: "benchmarks.step:{model}"}}
data: {{name: digits, normalize: {{mean: [0.5], std: [0.5]}}}}
optimization:
  steps: {steps}
  global_batch_size: 64
  micro_batch_size: 64
  optimizer: {{name: sgd, lr: 0.01}}
  schedule: {{name: constant}}
evaluation: {{every_steps: 1000000}}
checkpoint: {{every_steps: {every}}}
logging: {{every_steps: {window}}}
"""


def mlp(num_classes: int = NUM_CLASSES) -> nn.Module:
    """A model whose step takes less time than most of what surrounds it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, num_classes))


def resnet18(num_classes: int = NUM_CLASSES) -> nn.Module:
    """torchvision's ResNet-18 for images of one channel."""
    from torchvision.models import resnet18 as build

    model = build(num_classes=num_classes)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--models", nargs="+", choices=[*WINDOWS], default=[*WINDOWS])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)  # a process of one arm
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(_train(*arguments.arm)))
        return
    search = os.pathsep.join(filter(None, (str(ROOT), arguments.peers and str(arguments.peers))))
    environment = os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    measured_with = conditions(("torchvision", *PEERS.values()), arguments.peers)
    measured_with |= {"threads of each arm": 1, "ranks": 1, "micro-batch": [BATCH, 1, 32, 32]}
    missing = [peer for peer, package in PEERS.items() if package not in measured_with["versions"]]
    comparisons = []
    for model in arguments.models:
        arms = {
            arm: functools.partial(_seconds_per_step, model, arm, environment)
            for arm in (*_SETUPS, OURS)
            if arm not in missing
        }
        values = interleaved(arms, max(arguments.rounds, MIN_ROUNDS))
        title = f"Training step, {model}, 1 rank, 1 thread"
        comparisons.append(comparison(title, "seconds per step", values, BARE, missing))
        print(json.dumps(comparisons[-1], indent=1), flush=True)
    write("step", measured_with, comparisons)


def _seconds_per_step(model: str, arm: str, environment: dict[str, str]) -> float:
    if arm == OURS:
        return statistics.median(_windows_of_ours(model, environment))
    command = [sys.executable, "-m", "benchmarks.step", "--arm", arm, model]
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(statistics.median(json.loads(done.stdout.splitlines()[-1])))


def _windows_of_ours(model: str, environment: dict[str, str]) -> list[float]:
    window, warm_up, counted = WINDOWS[model]
    steps = window * (warm_up + counted)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "exp.yaml"
        text = EXPERIMENT.format(model=model, steps=steps, every=steps // 3, window=window)
        file.write_text(text, encoding="utf-8")
        subprocess.run(
            [
                sys.executable,
                "-m",
                "hpc_train",
                "submit",
                str(file),
                "--local",
                "--devices",
                "1",
                "device=cpu",
            ],
            env=environment | {"HPC_TRAIN_RUNS": folder},
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        (metrics,) = Path(folder).glob("step/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [row["time"] for row in rows if row["split"] == "train"]
    return _differences(times[warm_up:], window)


def _differences(times: list[float], window: int) -> list[float]:
    return [(after - before) / window for before, after in itertools.pairwise(times)]


def _train(arm: str, name: str) -> list[float]:
    """Train in this process; return the seconds per step of each window."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {"mlp": mlp, "resnet18": resnet18}[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    criterion = nn.CrossEntropyLoss()
    setup = _SETUPS[arm](model, optimizer, *_data())
    window, warm_up, counted = WINDOWS[name]
    times: list[float] = []
    for step, (inputs, classes) in enumerate(setup.batches):
        if step % window == 0:
            times.append(time.time())
        if len(times) == warm_up + counted:
            break
        loss = criterion(setup.model((inputs.float() / 255 - MEAN) / STD), classes)
        setup.backward(loss)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return _differences(times[warm_up:], window)


@dataclass(frozen=True)
class _Setup:
    """What a loop is written with; types are the peer's own."""

    model: Any
    optimizer: Any
    batches: Iterator[tuple[Tensor, Tensor]]
    backward: Callable[[Tensor], Any] = torch.autograd.backward


def _bare(model: nn.Module, optimizer: Any, images: Tensor, targets: Tensor) -> _Setup:
    return _Setup(model, optimizer, _indexed(images, targets))


def _with_loader(model: nn.Module, optimizer: Any, images: Tensor, targets: Tensor) -> _Setup:
    return _Setup(model, optimizer, _epochs(_loader(images, targets)))


def _with_fabric(model: nn.Module, optimizer: Any, images: Tensor, targets: Tensor) -> _Setup:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(_loader(images, targets))
    return _Setup(wrapped, wrapped_optimizer, _epochs(loader), fabric.backward)


def _with_accelerate(model: nn.Module, optimizer: Any, images: Tensor, targets: Tensor) -> _Setup:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, wrapped_optimizer, loader = accelerator.prepare(model, optimizer, _loader(images, targets))
    return _Setup(wrapped, wrapped_optimizer, _epochs(loader), accelerator.backward)


_SETUPS: dict[str, Callable[..., _Setup]] = {
    BARE: _bare,
    "DataLoader loop": _with_loader,
    "Fabric": _with_fabric,
    "Accelerate": _with_accelerate,
}


def _loader(images: Tensor, targets: Tensor) -> Any:
    return DataLoader(TensorDataset(images, targets), batch_size=BATCH, shuffle=True, drop_last=True)


def _data() -> tuple[Tensor, Tensor]:
    """Return the training images and classes of the data set ``digits``, as hpc-train reads them."""
    from hpc_train.config.training_sections import DataConfig
    from hpc_train.datasets.sources.digits import build

    split: Any = build("", DataConfig(name="digits"), download=False).train
    return split.images, split.targets


def _indexed(images: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        order = torch.randperm(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield images[chosen], targets[chosen]


def _epochs(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


if __name__ == "__main__":
    main()
