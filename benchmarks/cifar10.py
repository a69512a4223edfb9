"""ResNet-18 on CIFAR-10: the real command on two CPU ranks, compared with a bare loop in one process.

    python -m benchmarks.cifar10 [--data data/cifar10-images] [--quick] [--ours]

Both train examples/cifar10-images.yaml: the same global batch, augmentation, schedule and evaluations, as
many loader processes and threads in all. The bare loop is what one would write by hand: torchvision's
ImageFolder and v2 transforms, one forward of the whole global batch (its BatchNorm normalises that, not a
micro-batch), no checkpoints, no metrics, no resume. Seconds are those of the whole command, imports included.
Each is run once, ours first: a round would take a quarter of an hour. Writes benchmarks/results/cifar10.json.
``--ours`` runs the real command alone; ``--quick`` takes 4 steps and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, cannot_run, conditions, parser, report, table

EXAMPLE = ROOT / "examples" / "cifar10-images.yaml"
NUM_RANKS = NUM_THREADS = 2
QUICK_STEPS = 4
BOTH, ALONE = "ResNet-18 on CIFAR-10, whole command", "ResNet-18 on CIFAR-10, hpc-train alone"
OURS = f"hpc-train, {NUM_RANKS} ranks"
BARE = f"bare loop, 1 process, {NUM_THREADS} threads"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=ROOT / "data" / "cifar10-images")
    options.add_argument("--ours", action="store_true", help="do not run the bare loop")
    options.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)  # be the bare loop
    arguments = options.parse_args()
    steps = QUICK_STEPS if arguments.quick else None
    data = arguments.data.absolute()
    if not data.is_dir():
        cannot_run(f"{data} does not exist; --data names a folder with CIFAR-10's images in train/ and test/")
    if arguments.bare:
        print(json.dumps({"accuracy": bare_loop(data, steps)}))
        return
    measured_with = conditions(["torchvision"])
    rows = {OURS: run_ours(data, steps)}
    if not arguments.ours:
        rows[BARE] = run_bare(data, steps)
    report("cifar10", arguments, measured_with, tables=[table(ALONE if arguments.ours else BOTH, "", rows)])


def run_ours(data: Path, steps: int | None) -> dict[str, float | None]:
    """Train by the real command; return its last accuracy and its seconds."""
    command = [sys.executable, "-m", "hpc_train", "submit", EXAMPLE, f"data.root={data}", "device=cpu"]
    command += ["--local", "--devices", str(NUM_RANKS), "--json", *_trial(steps)]
    with tempfile.TemporaryDirectory() as runs:
        out, seconds = _timed([str(word) for word in command], {"HPC_TRAIN_RUNS": runs})
        (run,) = json.loads(out)["runs"]
        lines = Path(run["path"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "val"]
    return {"accuracy": rows[-1]["accuracy"], "seconds": seconds}


def _trial(steps: int | None) -> list[str]:
    if steps is None:
        return []
    schedule = "optimization.schedule={name: cosine}"
    return ["optimization.epochs=null", f"optimization.steps={steps}", schedule]


def run_bare(data: Path, steps: int | None) -> dict[str, float | None]:
    """Train by ``bare_loop`` in a process of its own."""
    trial = [] if steps is None else ["--quick"]
    out, seconds = _timed(
        [sys.executable, "-m", "benchmarks.cifar10", "--bare", "--data", str(data), *trial], {}
    )
    return {"accuracy": json.loads(out)["accuracy"], "seconds": seconds}


def _timed(command: list[str], environment: dict[str, str]) -> tuple[str, float]:
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout, round(time.perf_counter() - start, 1)


def bare_loop(data: Path, max_steps: int | None) -> float:
    """Train as the example says, by hand; return the last accuracy."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import resnet18

    from hpc_train.experiment.validate.loading import load

    experiment = load(EXAMPLE, _trial(max_steps)).experiment
    optimization = experiment.optimization
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(experiment.seed)
    train, val = _loaders(data, experiment)
    model = resnet18(num_classes=10)
    config = optimization.optimizer
    optimizer = torch.optim.SGD(
        model.parameters(),
        config.lr,
        momentum=config.momentum or 0.0,
        weight_decay=config.weight_decay or 0.0,
    )
    total_steps = max_steps or len(train) * optimization.epochs
    warmup_steps = round((optimization.schedule.warmup_epochs or 0) * len(train))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(warmup_steps, total_steps))
    step, accuracy = 0, 0.0
    while step < total_steps:
        model.train()
        for images, targets in train:
            loss = cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
            step += 1
            if step == total_steps:
                break
        accuracy = _accuracy(model, val)
    return accuracy


def _loaders(data: Path, experiment: Any) -> tuple[Any, Any]:
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    normalize = experiment.data.normalize
    to_input = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(normalize.mean, normalize.std)]
    augment = experiment.data.augment
    changes = [v2.RandomCrop(32, padding=augment.crop_padding), v2.RandomHorizontalFlip(augment.hflip)]
    train = ImageFolder(str(data / "train"), v2.Compose([v2.ToImage(), *changes, *to_input]))
    val = ImageFolder(str(data / "test"), v2.Compose([v2.ToImage(), *to_input]))
    global_batch_size = experiment.optimization.global_batch_size
    workers = NUM_RANKS * experiment.data.workers
    return (
        DataLoader(
            train,
            global_batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        ),
        DataLoader(val, global_batch_size, num_workers=workers),
    )


def cosine(warmup_steps: int, total_steps: int) -> Any:
    """Return the factor of the learning rate by step: a linear warm-up, then a cosine."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

    return factor


def _accuracy(model: Any, val: Any) -> float:
    import torch

    model.eval()
    with torch.no_grad():
        hits = sum(int((model(images).argmax(1) == targets).sum()) for images, targets in val)
    return hits / len(val.dataset)


if __name__ == "__main__":
    main()
