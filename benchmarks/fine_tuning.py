"""Fine-tuning against training from random weights: cats and dogs of CIFAR-10 after 50 images of each.

    python -m benchmarks.fine_tuning [--model convnet|vit] [--data data/cifar10-images] [--quick]
                                     [--folders FOLDER] [--kept FOLDER]

Trains the first example of ``MODELS`` on the eight other classes, then the second one on the few images: from
those weights, and from random ones with all layers trained, at three learning rates, of which the best
counts. Each with three seeds; the accuracy is of the 2,000 test images. Writes
benchmarks/results/fine_tuning.json. ``--folders`` only makes the folders of images that the examples name, of
links; ``--quick`` trains a few steps with one seed and writes nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from benchmarks.measuring import ROOT, cannot_run, conditions, parser, report, table

#: Model → its examples, and the learning rates from random weights, with which all layers learn.
MODELS = {
    "convnet": ("fine-tuning-pretrain", "fine-tuning", (0.01, 0.05, 0.25)),
    "vit": ("vit-small-pretrain", "vit-small", (1e-4, 5e-4, 2e-3)),
}
FEW_CLASSES = ("cat", "dog")
FEW_IMAGES = 50
SEEDS = (0, 1, 2)
FROM_RANDOM = ("model.init_from=null", "model.freeze=[]")
TITLE = f"cats and dogs, {FEW_IMAGES} training images of each"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", type=Path, default=ROOT / "data" / "cifar10-images")
    options.add_argument(
        "--folders", type=Path, help="make the folders cifar8 and cats-and-dogs here, and end"
    )
    options.add_argument("--model", choices=MODELS, default="convnet")
    options.add_argument(
        "--kept", type=Path, help="keep the runs in this folder; those of an earlier call count"
    )
    arguments = options.parse_args()
    data = arguments.data.absolute()
    if not data.is_dir():
        cannot_run(f"{data} does not exist; --data names a folder with CIFAR-10's images in train/ and test/")
    if arguments.folders is not None:
        make_folders(data, arguments.folders)
        return
    measured_with = conditions(["torchvision"])
    kept = None if arguments.kept is None else nullcontext(arguments.kept.absolute())
    with kept or tempfile.TemporaryDirectory() as folder:
        make_folders(data, Path(folder))
        rows = measure(arguments.model, Path(folder), is_quick=arguments.quick)
    title = TITLE if arguments.model == "convnet" else f"{TITLE}, {arguments.model}"
    report("fine_tuning", arguments, measured_with, tables=[table(title, "accuracy", rows)])


def make_folders(data: Path, target: Path) -> None:
    """Make ``cifar8`` and ``cats-and-dogs`` in ``target``, of links to the images in ``data``."""
    for split in ("train", "test"):
        for source in sorted(data.joinpath(split).iterdir()):
            is_few = source.name in FEW_CLASSES
            classes = target / ("cats-and-dogs" if is_few else "cifar8") / split / source.name
            classes.parent.mkdir(parents=True, exist_ok=True)
            if is_few and split == "train":
                classes.mkdir(exist_ok=True)
                for image in sorted(source.iterdir())[:FEW_IMAGES]:
                    link(classes / image.name, image)
            else:
                link(classes, source)


def link(path: Path, target: Path) -> None:
    if not path.is_symlink():
        path.symlink_to(target.absolute())


def measure(model: str, folder: Path, *, is_quick: bool) -> dict[str, dict[str, float | None]]:
    """Return accuracies by arm: mean, minimum and maximum over the seeds."""
    *names, rates = MODELS[model]
    pretrain, tune = (ROOT / "examples" / f"{name}.yaml" for name in names)
    steps = 5 if is_quick else None
    seeds = SEEDS[:1] if is_quick else SEEDS
    pretrained = accuracy(pretrain, folder, "cifar8", 2, steps)
    tuned = [accuracy(tune, folder, "cats-and-dogs", 1, steps, f"seed={seed}") for seed in seeds]
    by_rate = {
        rate: [
            accuracy(
                tune,
                folder,
                "cats-and-dogs",
                1,
                steps,
                *FROM_RANDOM,
                f"optimization.optimizer.lr={rate}",
                f"seed={seed}",
            )
            for seed in seeds
        ]
        for rate in (rates[:1] if is_quick else rates)
    }
    best = max(by_rate, key=lambda rate: statistics.mean(by_rate[rate]))
    return {
        "fine-tuned": spread_of(tuned),
        f"from random weights, learning rate {best} (best of {len(by_rate)})": spread_of(by_rate[best]),
        "pretraining, on its eight classes": spread_of([pretrained]),
    }


def spread_of(accuracies: list[float]) -> dict[str, float | None]:
    return {"mean": statistics.mean(accuracies), "minimum": min(accuracies), "maximum": max(accuracies)}


def accuracy(file: Path, folder: Path, data: str, devices: int, steps: int | None, *overrides: str) -> float:
    """Train by the real command; return the last accuracy."""
    command = [sys.executable, "-m", "hpc_train", "submit", file, f"data.root={folder / data}", *overrides]
    command += ["--local", "--devices", devices, "--json"]
    if steps is not None:
        constant = "optimization.schedule={name: constant}"
        often = f"evaluation={{every_steps: {steps}}}"
        command += ["optimization.epochs=null", f"optimization.steps={steps}", constant, often]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        # One thread per rank: so few images are not worth a second one.
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (run,) = json.loads(done.stdout)["runs"]
    lines = Path(run["path"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "val"]
    value = float(rows[-1]["accuracy"])
    print(file.name, *overrides, value, file=sys.stderr, flush=True)
    return value


if __name__ == "__main__":
    main()
