"""Fine-tuning on 100 pictures by the commands of docs/fine_tuning.md, from ``pip install`` to predictions.

    python -m benchmarks.first_pictures [--quick]

Installs this checkout into a fresh environment and runs the other commands there, in an empty folder, on 100
pictures of 64 × 64 of two shapes. No hub of weights is used: the model is timm's test_resnet with a file of
weights, trained on two other shapes before (not timed). The targets: at most six commands, 180 seconds in all
on two cores, and an accuracy of 0.9. pip's time depends on the network. ``--quick`` does not install: it runs
the commands of this environment. Writes benchmarks/results/first_pictures.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from benchmarks.measuring import ROOT, conditions, parser, report, table
from tests.shapes import write_folder

TITLE = "100 pictures, from pip install to the classes of new pictures"
LIMIT_S = 180.0
MAX_COMMANDS = 6
AIM = 0.9
SIZE = (64, 64)
WEIGHTS = "model.pretrained=weights.safetensors"


def main() -> None:
    arguments = parser(__doc__).parse_args()
    measured_with = conditions(["torchvision", "timm"])
    with tempfile.TemporaryDirectory() as folder:
        rows, accuracy = measure(Path(folder), is_quick=arguments.quick)
    total_s = sum(rows.values())
    timed: dict[str, dict[str, float | None]] = {name: {"seconds": value} for name, value in rows.items()}
    timed["all"] = {"seconds": total_s}
    quality: dict[str, dict[str, float | None]] = {"best checkpoint": {"accuracy": accuracy}}
    tables = [table(TITLE, "seconds", timed), table(f"{TITLE}: accuracy", "accuracy", quality)]
    report("first_pictures", arguments, measured_with, tables=tables)
    if len(rows) > MAX_COMMANDS or (not arguments.quick and (total_s > LIMIT_S or accuracy < AIM)):
        raise SystemExit(1)


def measure(folder: Path, *, is_quick: bool) -> tuple[dict[str, float], float]:
    """Return the seconds of each command, and the best evaluation's accuracy."""
    environment = os.environ | {"HPC_TRAIN_RUNS": str(folder / "runs")}
    rows: dict[str, float] = {}
    if is_quick:
        environment["PYTHONPATH"] = str(ROOT)
        program = [sys.executable, "-m", "hpc_train"]
    else:
        venv.create(folder / "venv", with_pip=True)
        program = [str(folder / "venv" / "bin" / "hpc-train")]
        install = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", f"{ROOT}[onnx]"]
        rows["pip install"] = _seconds(install, folder, environment)

    def timed(name: str, *words: str) -> None:
        rows[name] = _seconds([*program, *words], folder, environment)

    _pretrain(folder, environment)
    write_folder(folder / "photos", {"train": 40, "val": 10}, SIZE, shapes=("circle", "square"))
    write_folder(folder / "new", {"unseen": 10}, SIZE, shapes=("circle", "square"))
    timed("init", "init", "--root", "photos", "--model", "timm/test_resnet", "-o", "photos.yaml")
    timed("prepare", "prepare", "photos.yaml", WEIGHTS)
    timed("submit", "submit", "photos.yaml", WEIGHTS, "--local")
    timed("export", "export", "photos", "-o", "model.onnx")
    timed("predict", "predict", "photos", "--data", "new", "-o", "classes.csv")
    (run,) = json.loads(_output([*program, "status", "photos", "--json"], folder, environment))["runs"]
    return rows, float(run["best_metric"]["value"])


def _pretrain(folder: Path, environment: dict[str, str]) -> None:
    """Write weights.safetensors: the same model after a training on other shapes."""
    write_folder(folder / "others", {"train": 100, "val": 10}, SIZE, shapes=("cross", "triangle"))
    program = [sys.executable, "-m", "hpc_train"]
    own = environment | {"PYTHONPATH": str(ROOT)}
    words = ["init", "-y", "--local", "--root", "others", "--model", "timm/test_resnet", "-o", "others.yaml"]
    for command in (
        words,
        ["submit", "others.yaml", "--local"],
        ["export", "others", "-o", "weights.safetensors"],
    ):
        _output([*program, *command], folder, own)


def _seconds(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    began = time.perf_counter()
    _output(command, folder, environment)
    return time.perf_counter() - began


def _output(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
