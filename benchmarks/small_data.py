"""A small training from ``submit`` to its end, part by part: 12 epochs of 80 thumbnails on the CPU.

    python -m benchmarks.small_data [--rounds 7] [--quick]

Trains resnet18 on images of 32 × 32 in batches of 16, with an evaluation every epoch and ``checkpoint.best``.
Reports the seconds until the command returns, the CPU seconds of all its processes, and how the run's own
time divides. The baseline is the import of torch, for which every rank has to wait. The target on two idle
cores: 15 s. Writes benchmarks/results/small_data.json.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from benchmarks.measuring import ROOT, comparison, conditions, interleaved, parser, report, rounds_of, table

TITLE = "12 epochs of 80 thumbnails, from submit to the end"
BASELINE, RUN = "import torch", "hpc-train submit --local"
SIDE, CLASSES = 32, ("cat", "dog")
IMAGES = {"train": 40, "val": 10}
FILE = """\
name: small
task: classification
model: {name: timm/resnet18}
data: {name: imagefolder, root: images, image_size: 32, augment: {hflip: 0.5}}
optimization:
  epochs: 12
  global_batch_size: 16
  micro_batch_size: 16
  optimizer: {name: sgd, lr: 0.02, momentum: 0.9}
  schedule: {name: cosine}
device: cpu
evaluation: {every_epochs: 1}
checkpoint: {best: {metric: accuracy, mode: max}}
"""


def main() -> None:
    arguments = parser(__doc__).parse_args()
    overrides = ["optimization.epochs=1"] if arguments.quick else []
    parts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_images(folder / "images")
        folder.joinpath("small.yaml").write_text(FILE, encoding="utf-8")
        timed: dict[str, Callable[[], float]] = {
            BASELINE: functools.partial(seconds, [sys.executable, "-c", "import torch"], folder, folder),
            RUN: lambda: train(folder, overrides, parts),
        }
        train(folder, overrides, [])  # byte code and the cache of names
        values = interleaved(timed, rounds_of(arguments))
    compared = comparison(TITLE, "seconds", values, BASELINE)
    shown = {name: {"seconds": statistics.median(part[name] for part in parts)} for name in parts[0]}
    rows = table(f"{TITLE}: its parts", "seconds", shown, remark="Medians over the rounds")
    report("small_data", arguments, conditions(["timm"]), [compared], [rows])


def make_images(folder: Path) -> None:
    """Write JPEG files of noise whose brightness depends on the class."""
    draw = random.Random(0)
    for split, count in IMAGES.items():
        for brightness, name in enumerate(CLASSES):
            folder.joinpath(split, name).mkdir(parents=True)
            for number in range(count):
                noise = bytes(draw.randrange(100) + 100 * brightness for _ in range(3 * SIDE * SIDE))
                image = Image.frombytes("RGB", (SIDE, SIDE), noise)
                image.save(folder / split / name / f"{number}.jpg")


def train(folder: Path, overrides: list[str], parts: list[dict[str, float]]) -> float:
    """Train in a new folder of runs; append the run's parts to ``parts`` and return the command's seconds."""
    program = [sys.executable, "-m", "hpc_train"]
    runs = Path(tempfile.mkdtemp(dir=folder))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    elapsed_s = seconds([*program, "submit", "small.yaml", "--local", *overrides], folder, runs)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (run,) = json.loads(output([*program, "status", "--json"], folder, runs))["runs"]
    parts.append({"CPU of all processes": cpu_s, **run["usage"]["time"]})
    return elapsed_s


def seconds(command: list[str], folder: Path, runs: Path) -> float:
    """Return the wall-clock seconds of a command in ``folder``."""
    start = time.perf_counter()
    output(command, folder, runs)
    return time.perf_counter() - start


def output(command: list[str], folder: Path, runs: Path) -> bytes:
    """Run a command in ``folder``; return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": str(runs)}
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True).stdout


if __name__ == "__main__":
    main()
