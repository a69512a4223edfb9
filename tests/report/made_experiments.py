"""Run folders of several tasks and experiments, written without training, for looking at ``report``.

They have long names, sweeps of different keys, and runs that failed, diverged, run now or measured nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch.nn import functional

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.evaluation_outputs import png
from hpc_train.training.tasks import drawing
from hpc_train.training.tasks.base import make_task
from tests.report.made_runs import add_attempt, metric_rows
from tests.run.runs import small_experiment, write_rows

_LONG_NAME = "vit-small-augmentation-and-regularization-cifar100"
_OPTIMIZER = "optimization.optimizer"
_STEPS, _EVERY = 300, 5
#: Runs of each experiment with a sheet of predictions.
_WITH_SHEETS = 3
_WIDTH, _HEIGHT = 320, 160
_ANIMALS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_STREET = ("road", "sidewalk", "building", "sky")
_INFO = {
    "classification": DataInfo(10, 3, (0.5,) * 3, (0.5,) * 3, _ANIMALS),
    "segmentation": DataInfo(4, 3, (0.5,) * 3, (0.5,) * 3, _STREET, target_shape=(_HEIGHT, _WIDTH)),
}
_DATA = {
    "classification": {"name": "digits"},
    "segmentation": {"name": "segmentation_folder", "root": "/data/streets"},
}


@dataclass(frozen=True)
class _Kind:
    """An experiment: the metrics of its task, and the keys that its sweep varies."""

    name: str
    task: str
    metrics: tuple[str, ...]
    swept: dict[str, tuple[Any, ...]]


_KINDS = (
    _Kind("cifar-resnet", "classification", ("loss", "accuracy"), {
        f"{_OPTIMIZER}.lr": (0.01, 0.03, 0.1, 0.3), "seed": tuple(range(1, 26)),
    }),
    _Kind(_LONG_NAME, "classification", ("loss", "accuracy"), {
        "model.name": ("timm/vit_small_patch16_224.augreg_in21k", "torchvision/resnet50"),
        f"{_OPTIMIZER}.lr": (0.0003, 0.001),
        f"{_OPTIMIZER}.weight_decay": (0.0, 0.0001, 0.05),
        "optimization.label_smoothing": (0.0, 0.1),
        "optimization.mixup": (0.0, 0.8),
        "data.augment.policy": ("ta_wide", "ra"),
    }),
    _Kind("street-segmentation", "segmentation", ("loss", "accuracy", "miou"), {
        f"{_OPTIMIZER}.lr": (0.01, 0.1), "seed": tuple(range(1, 21)),
    }),
    _Kind("shakespeare", "causal_lm", ("loss",), {"seed": tuple(range(1, 21))}),
)  # fmt: skip


def made_experiments(folder: Path, count: int) -> list[RunPaths]:
    """Create ``count`` runs of up to four experiments, the first ones with the most."""
    others = [min(count - 1, max(1, count * tenths // 10)) for tenths in (2, 2, 1)]
    shares = [count - sum(others), *others]
    return [run for kind, share in zip(_KINDS, shares, strict=True) for run in _runs_of(folder, kind, share)]


def _runs_of(folder: Path, kind: _Kind, count: int) -> Iterator[RunPaths]:
    template = RunPaths(folder / ".template" / kind.name)
    assert create_run(template, small_experiment(name=kind.name), "run", _STEPS)
    facts, resolved = read_json(template.run), json.loads(template.resolved.read_text())
    assert facts is not None
    for number, values in zip(range(count), product(*kind.swept.values()), strict=False):
        yield _made(folder, kind, number, dict(zip(kind.swept, values, strict=True)), facts, resolved)


def _made(
    folder: Path, kind: _Kind, number: int, values: dict[str, Any], facts: dict[str, Any], resolved: Any
) -> RunPaths:
    run_id = f"{7919 * (number + 1) * len(kind.name) % 16**10:010x}"
    paths = RunPaths(folder / kind.name / run_id)
    paths.folder.mkdir(parents=True)
    paths.resolved.write_text(json.dumps(_with_values(resolved | {"task": kind.task}, values)))
    paths.run.write_text(json.dumps(facts | {"id": run_id, "name": kind.name, "values": values}))
    paths.experiment.write_text(f"name: {kind.name}\ntask: {kind.task}\n")
    state = {3: "failed", 4: "running", 6: "pending"}.get(number % 13, "completed")
    last = {"failed": 200, "running": 150, "pending": 0}.get(state, _STEPS)
    lr, decay = values.get(f"{_OPTIMIZER}.lr", 0.05), values.get(f"{_OPTIMIZER}.weight_decay", 0.0)
    rows, ends = metric_rows(number + len(kind.name), last, _STEPS, _EVERY, lr, decay / 100)
    shown = list(_rows_of(kind, rows, is_validated=number % 13 != 5, diverges=number % 13 == 2))
    write_rows(paths, shown)
    reason = "rank 1 on n2: killed by SIGKILL; out of memory?" if state == "failed" else None
    ended = {"pending": [], "running": ends[:-1]}.get(state, ends)
    for attempt, (begin, end, step, cause) in enumerate(ended, start=1):
        add_attempt(paths, attempt, begin, end, step, cause, number, reason)
    if state == "running":
        claim_attempt(paths, "local", hosts=["n1"])  # by this process
    attempts = len(ended) + (state == "running")
    write_status(paths, RunStatus(state, last, _STEPS, 3.0, attempts, reason))
    if kind.task in _INFO and number < _WITH_SHEETS:
        _add_sheet(paths, kind, number)
    return paths


def _rows_of(
    kind: _Kind, rows: list[dict[str, Any]], *, is_validated: bool, diverges: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows with the metrics of the kind; if it diverges, the last fifth has null, as for NaN."""
    for row in rows:
        kept = {
            name: value
            for name, value in row.items()
            if row["split"] == "train"
            or name in kind.metrics
            or (kind.task == "segmentation" and name.startswith("iou_"))
            or name in {"split", "time", "attempt", "step", "epoch"}
        }
        if diverges and row["step"] > 0.8 * _STEPS:
            kept |= {name: None for name in kept if name in {"loss", "accuracy", "miou"}}
        if is_validated or row["split"] == "train":
            yield kept


def _with_values(resolved: Any, values: dict[str, Any]) -> Any:
    changed = deepcopy(resolved)
    for key, value in values.items():
        *sections, name = key.split(".")
        section = changed
        for part in sections:
            section = section[part]
        section[name] = value
    return changed


def _add_sheet(paths: RunPaths, kind: _Kind, number: int) -> None:
    """Add a sheet of predictions as the task draws it; images and outputs are made up."""
    noise = torch.Generator().manual_seed(number)
    experiment, info = small_experiment(task=kind.task, data=_DATA[kind.task]), _INFO[kind.task]
    task: Any = make_task(experiment, info)
    shape = () if kind.task == "classification" else (_HEIGHT, _WIDTH)
    titled = []
    for sample in range(8):
        targets = torch.randint(info.num_classes, (1, *(1 for _ in shape)), generator=noise)
        targets = targets.expand(1, *shape).clone()
        if shape:
            targets[:, 60:] = (sample + 1) % 4
        scores = torch.randn(1, info.num_classes, *shape, generator=noise)
        correct = functional.one_hot(targets, info.num_classes).movedim(-1, 1)
        outputs = scores + (2.5 if shape else 1.5) * correct
        batch = Batch(0, 0, 1.0, outputs, targets, torch.ones(1, dtype=torch.bool))
        titled.append((f"sample {37 * sample}", task.picture(outputs, batch, 0, _image(kind, sample))))
    folder = paths.evaluation(_STEPS)
    folder.mkdir(parents=True)
    (folder / "predictions.png").write_bytes(png(drawing.sheet(titled)))


def _image(kind: _Kind, seed: int) -> Image.Image:
    width, height = (32, 32) if kind.task == "classification" else (_WIDTH, _HEIGHT)
    picture = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    draw = ImageDraw.Draw(picture)
    left, top = width * (seed % 5) // 8, height * (seed % 3) // 6
    draw.ellipse((left, top, left + width // 2, top + height // 2), fill=drawing.color_of(seed))
    return picture
