"""Time and accuracy of the files that `hpc-train init` writes, without an edit, for nine folders of data.

    python -m benchmarks.first_files [--only NAME] [--camvid data/camvid] [--text data/tinyshakespeare.txt]
                                     [--bccd data/bccd] [--quick]

Six folders of shapes are made by code: 10 to 5,000 images of 28 to 2,000 pixels, one whose validation images
lack a class, one of gray images, a CSV file, and COCO's format. The others are measured where their data are.
Each is trained by `init --root`, `prepare` and `submit --local` with one rank on all cores; the seconds are
those of `submit`, and the best of all evaluations counts. ``AIMS`` are the values to reach, in at most 120
seconds on two cores; exit code 1 if one is missed. Writes benchmarks/results/first_files.json, ``--only`` one
row of it; ``--quick`` trains one epoch of each and writes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.measuring import RESULTS, ROOT, conditions, parser, report, table
from tests.shapes import write_boxes, write_folder, write_list

TITLE = "files of init, trained without an edit on a CPU"
LIMIT_S = 120.0
#: Name → the folder's writer.
FOLDERS: Mapping[str, Callable[[Path], object]] = {
    "10 images": lambda root: write_folder(
        root, {"train": 5, "val": 5}, (64, 64), shapes=("circle", "cross")
    ),
    "gray, 28 px, 1,000 images": lambda root: write_folder(
        root, {"train": 250, "val": 100}, (28, 28), mode="L"
    ),
    "a class missing in val, 200 images": lambda root: _without_a_class(
        write_folder(root, {"train": 50, "val": 25}, (160, 120), suffix="jpg")
    ),
    "2,000 px, 60 images": lambda root: write_folder(
        root, {"train": 15, "val": 6}, (2000, 1500), suffix="jpg"
    ),
    "CSV, 5,000 images": lambda root: write_list(root, {"train": 5000, "val": 1000}, (32, 32)),
    "COCO, 200 images": lambda root: write_boxes(root, {"train": 200, "val": 60}, (200, 150)),
}
#: Name → metric, and the value to reach.
AIMS: Mapping[str, tuple[str, float]] = {
    "10 images": ("accuracy", 0.7),
    "gray, 28 px, 1,000 images": ("accuracy", 0.95),
    "a class missing in val, 200 images": ("accuracy", 0.9),
    "2,000 px, 60 images": ("accuracy", 0.6),
    "CSV, 5,000 images": ("accuracy", 0.95),
    "COCO, 200 images": ("map50", 0.5),
    "CamVid": ("miou", 0.12),
    "BCCD": ("map50", 0.5),
    "Shakespeare": ("loss", 2.3),
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=AIMS)
    options.add_argument("--camvid", type=Path, default=ROOT / "data" / "camvid")
    options.add_argument("--bccd", type=Path, default=ROOT / "data" / "bccd")
    options.add_argument("--text", type=Path, default=ROOT / "data" / "tinyshakespeare.txt")
    arguments = options.parse_args()
    own = {"CamVid": arguments.camvid, "BCCD": arguments.bccd, "Shakespeare": arguments.text}
    names = [
        name for name in AIMS if arguments.only in (None, name) and (name in FOLDERS or own[name].exists())
    ]
    measured_with = conditions(["torchvision", "timm", "pycocotools"])
    rows: dict[str, dict[str, float | None]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            root = own[name].absolute() if name in own else Path(folder, "data")
            if name in FOLDERS:
                FOLDERS[name](root)
            rows[name] = train(name, root, Path(folder), is_quick=arguments.quick)
            print(name, rows[name], file=sys.stderr, flush=True)
    kept, remark = ({}, "Measured once") if arguments.only is None else _earlier_rows(arguments.only)
    merged = {name: row for name in AIMS if (row := rows.get(name, kept.get(name))) is not None}
    missing = [name for name in AIMS if name not in merged]
    report("first_files", arguments, measured_with, tables=[table(TITLE, "", merged, missing, remark)])
    if not arguments.quick and (missed := [name for name, row in rows.items() if not reaches(name, row)]):
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        raise SystemExit(1)


def _earlier_rows(only: str) -> tuple[Mapping[str, Mapping[str, float | None]], str]:
    """Return the rows of the results file, and the remark that those other than ``only`` are earlier."""
    tables = json.loads((RESULTS / "first_files.json").read_text(encoding="utf-8"))["tables"]
    (found,) = (each for each in tables if each["title"] == TITLE)
    day = found["conditions"]["date"][:10]
    return found["rows"], f"Measured once; rows other than {only} on {day} or before"


def _without_a_class(root: Path) -> None:
    for path in (root / "val" / "cross").iterdir():
        path.unlink()


def train(name: str, root: Path, folder: Path, *, is_quick: bool) -> dict[str, float | None]:
    """Write the file and train; return seconds and the best value of the metric."""
    metric, _ = AIMS[name]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HPC_TRAIN_RUNS": str(folder / "runs")}

    def hpc_train(*words: str) -> str:
        command = [sys.executable, "-m", "hpc_train", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    hpc_train("init", "-y", "--local", "--gpus", "0", "--root", str(root))
    hpc_train("prepare", "exp.yaml")
    short = ["optimization.epochs=1", "optimization.schedule={}", "evaluation={every_epochs: 1}"]
    began = time.perf_counter()
    out = hpc_train("submit", "exp.yaml", "--local", "--json", *(short if is_quick else []))
    seconds = time.perf_counter() - began
    (run,) = json.loads(out)["runs"]
    lines = Path(run["path"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [row[metric] for row in map(json.loads, lines) if row["split"] == "val"]
    return {"seconds": seconds, metric: min(values) if metric == "loss" else max(values)}


def reaches(name: str, row: Mapping[str, float | None]) -> bool:
    """Return True if the run was short enough and reached its aim."""
    metric, aim = AIMS[name]
    value, seconds = row[metric], row["seconds"]
    assert value is not None and seconds is not None
    return seconds <= LIMIT_S and (value <= aim if metric == "loss" else value >= aim)


if __name__ == "__main__":
    main()
