"""Seconds of an epoch of each task, eager and compiled, on one and two ranks, by the real command.

    python -m benchmarks.epoch_times [TASK …] [--data data] [--steps 40] [--device cpu|cuda] [--quick]

Trains an example of each task for ``--steps`` steps and multiplies the median time of the second half's steps
by the steps per epoch, so start, compilation and evaluation do not count. ``--data``: a folder with the data
that the examples name below data/; without them a task is not measured. ``--device cuda``: on one GPU, one
rank. ``--quick`` compiles nothing. Writes benchmarks/results/epoch_times.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.headlines import train
from benchmarks.measuring import ROOT, cannot_run, conditions, parser, report, table

#: Task → its example and the data below ``--data``, None: included.
TASKS: dict[str, tuple[str, str | None]] = {
    "classification": ("digits", None),
    "classification, images": ("cifar10-cpu", "cifar10-images"),
    "classification, ViT": ("vit-small-pretrain", "cifar8"),
    "segmentation": ("camvid-lraspp", "camvid"),
    "detection": ("bccd-fcos", "bccd"),
    "language model": ("shakespeare", "tinyshakespeare.txt"),
    "own task": ("graph-network", None),
}
QUICK_STEPS = 4


def main() -> None:
    made = parser(__doc__)
    made.add_argument("tasks", nargs="*", metavar="TASK", help="default: all")
    made.add_argument("--data", type=Path, default=ROOT / "data")
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    here, where = conditions(), "one thread per rank"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            cannot_run("there is no CUDA device")
        here, where = conditions(device=torch.cuda.get_device_name()), "one GPU"
    steps = QUICK_STEPS if options.quick else options.steps
    for task in options.tasks or (["classification"] if options.quick else TASKS):
        example, data = TASKS[task]
        root = options.data.absolute() / (data or "")
        if data and not root.exists():
            print(f"{task}: not measured: {root} does not exist", file=sys.stderr)
            continue
        changes = [f"device={options.device}", *([f"data.root={root}"] if data else [])]
        rows = {
            arm: {"seconds": seconds(example, ranks, steps, [*changes, *more])}
            for arm, ranks, more in arms(options.device, eager_only=options.quick)
        }
        title = f"An epoch of examples/{example}.yaml: {task}, {where}"
        report("epoch_times", options, here, tables=[table(title, "", rows)], results=options.results)


def arms(device: str, *, eager_only: bool) -> list[tuple[str, int, list[str]]]:
    """Return each arm's name, ranks, and changes of the file."""
    modes = {"eager": "false"} if eager_only else {"eager": "false", "compiled": "true"}
    return [
        (f"{mode}, {ranks} rank{'s' * (ranks > 1)}", ranks, [f"compile={value}"])
        for mode, value in modes.items()
        for ranks in ((1,) if device == "cuda" else (1, 2))
    ]


def seconds(example: str, ranks: int, steps: int, changes: list[str]) -> float:
    """Train ``steps`` steps; return the seconds of an epoch at the median rate of their second half."""
    changes = [
        *changes,
        "optimization.epochs=null",
        f"optimization.steps={steps}",
        "optimization.schedule={name: constant}",
        f"evaluation={{every_steps: {steps}}}",
        "logging={every_steps: 1}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows, _ = train(ROOT / "examples" / f"{example}.yaml", ranks, Path(folder), *changes)
    training = [row for row in rows if row["split"] == "train"]
    times = [row["step_s"] for row in training if row["step"] > steps // 2]
    epoch_s: float = statistics.median(times) * training[-1]["step"] / training[-1]["epoch"]
    return epoch_s


if __name__ == "__main__":
    main()
