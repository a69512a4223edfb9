"""Segmentation and detection recipes: the real command compared with a bare PyTorch loop.

    python -m benchmarks.recipes [--camvid data/camvid] [--bccd data/bccd] [--only NAME] [--quick]

Trains examples/camvid-lraspp.yaml (mIoU of CamVid's validation images) and examples/bccd-fcos.yaml (mAP50 of
BCCD's), with the changes in ``RECIPES`` and one evaluation at the end. The bare loop has the same model with
the same initial weights, and its plain DataLoader reads the same samples in the same order through the same
augmentation; forward, loss, optimizer, schedule and evaluation are written by hand, without checkpoints,
metrics and resume. Each arm has one process of one thread and a loader process. Seconds are those of the
whole command, imports included; CPU seconds those of all its processes. Both arms of a recipe run at the same
time, so that other load on the machine slows both alike, and once: a round takes minutes. Writes
benchmarks/results/recipes.json; ``--quick`` takes 2 steps and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from benchmarks.cifar10 import cosine
from benchmarks.measuring import ROOT, cannot_run, conditions, parser, report, table
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.validate.loading import load
from hpc_train.registry import load as load_part
from hpc_train.training.datasets.base import DataSource, FileSplit
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.decoding import read_image
from hpc_train.training.datasets.joint import JointTransform
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.random_numbers import seed_build
from hpc_train.training.datasets.sampler import EvaluationSampler, MicroBatchSampler, Position, Slot
from hpc_train.training.datasets.targets import TargetCheck
from hpc_train.training.models.building import build_model
from hpc_train.training.tasks.detection import average_precision

OURS, BARE = "hpc-train", "bare loop"
RATIO = "hpc-train / bare loop"
SECONDS, CPU_SECONDS = "seconds", "CPU seconds"
QUICK_STEPS = 2


@dataclass(frozen=True)
class Recipe:
    """An example, its number of steps here, and the metric by which both arms are compared."""

    example: str
    data: str
    title: str
    metric: str
    steps: int
    warmup_steps: int
    #: What else is changed of the example, so that it takes minutes.
    change: str


_SMALL, _WHOLE = "data.image_size=[90, 120]", "optimization.micro_batch_size=16"
RECIPES = (
    Recipe("camvid-lraspp", "camvid", "LR-ASPP on CamVid, whole command", "miou", 330, 22, _SMALL),
    Recipe("bccd-fcos", "bccd", "A small FCOS on BCCD, whole command", "map50", 300, 30, _WHOLE),
)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--camvid", type=Path, default=ROOT / "data" / "camvid")
    options.add_argument("--bccd", type=Path, default=ROOT / "data" / "bccd")
    options.add_argument("--only", choices=[recipe.example for recipe in RECIPES])
    options.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)  # be the bare loop
    arguments = options.parse_args()
    chosen = [recipe for recipe in RECIPES if arguments.only in (None, recipe.example)]
    for recipe in chosen:
        if not (folder := getattr(arguments, recipe.data)).is_dir():
            cannot_run(f"{folder} does not exist; --{recipe.data} names a folder with its images")
    if arguments.bare:
        (recipe,) = chosen
        overrides = _overrides(recipe, arguments.bccd if recipe.data == "bccd" else arguments.camvid)
        print(json.dumps({recipe.metric: bare_loop(recipe, [*overrides, *_trial(arguments.quick)])}))
        return
    for recipe in chosen:
        measured_with = conditions(["torchvision", "pycocotools"]) | {"threads": 1}
        rows = measure(recipe, getattr(arguments, recipe.data).absolute(), is_quick=arguments.quick)
        remark = "Measured once, both at the same time"
        report("recipes", arguments, measured_with, tables=[table(recipe.title, "", rows, remark=remark)])


def _overrides(recipe: Recipe, data: Path) -> list[str]:
    """Return what both arms change of the example."""
    return [
        f"data.root={data}",
        recipe.change,
        "data.workers=1",
        "optimization.epochs=null",
        f"optimization.steps={recipe.steps}",
        f"optimization.schedule={{name: cosine, warmup_steps: {recipe.warmup_steps}}}",
        f"evaluation={{every_steps: {recipe.steps}}}",
    ]


def _trial(is_quick: bool) -> list[str]:
    if not is_quick:
        return []
    return [
        f"optimization.steps={QUICK_STEPS}",
        "optimization.schedule={name: cosine, warmup_steps: 1}",
        f"evaluation={{every_steps: {QUICK_STEPS}}}",
    ]


def measure(recipe: Recipe, data: Path, *, is_quick: bool) -> dict[str, dict[str, float | None]]:
    """Train by both arms at the same time; return the rows of the table."""
    with ThreadPoolExecutor() as threads:
        ours = threads.submit(run_ours, recipe, data, is_quick=is_quick)
        bare = threads.submit(run_bare, recipe, data, is_quick=is_quick)
        rows = {OURS: ours.result(), BARE: bare.result()}
    ratios = {column: rows[OURS][column] / rows[BARE][column] for column in (SECONDS, CPU_SECONDS)}
    return {**rows, RATIO: ratios}


def run_ours(recipe: Recipe, data: Path, *, is_quick: bool) -> dict[str, float]:
    """Train by the real command; return its metric and times."""
    example = ROOT / "examples" / f"{recipe.example}.yaml"
    words = ["hpc_train", "submit", str(example), *_overrides(recipe, data), *_trial(is_quick)]
    with tempfile.TemporaryDirectory() as runs:
        out, times = _timed([*words, "--local", "--devices", "1", "--json"], {"HPC_TRAIN_RUNS": runs})
        (run,) = json.loads(out)["runs"]
        lines = Path(run["path"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "val"]
    return {recipe.metric: rows[-1][recipe.metric], **times}


def run_bare(recipe: Recipe, data: Path, *, is_quick: bool) -> dict[str, float]:
    """Train by ``bare_loop`` in a process of its own; return its metric and times."""
    words = ["benchmarks.recipes", "--bare", "--only", recipe.example, f"--{recipe.data}", str(data)]
    out, times = _timed([*words, *(["--quick"] if is_quick else [])], {})
    return {recipe.metric: json.loads(out)[recipe.metric], **times}


def _timed(words: list[str], environment: dict[str, str]) -> tuple[str, dict[str, float]]:
    """Run a module; return what it prints, and the seconds of it and its processes."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            stdout=out,
            start_new_session=True,  # as ranks have: Linux shares processors among sessions
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {process.returncode}")
        out.seek(0)
        seconds = {SECONDS: time.perf_counter() - begin, CPU_SECONDS: used.ru_utime + used.ru_stime}
        return out.read(), seconds


def bare_loop(recipe: Recipe, overrides: list[str]) -> float:
    """Train as the example says, by hand; return the metric."""
    experiment = load(ROOT / "examples" / f"{recipe.example}.yaml", overrides).experiment
    source = build_source(experiment.data)
    seed_build(experiment.seed)
    model = build_model(experiment.model, source.info)
    train, val = _loaders(experiment, source)
    normalize = Normalize(source.info, experiment.data)
    config, optimization = experiment.optimization.optimizer, experiment.optimization
    optimizer = torch.optim.AdamW(
        model.parameters(), config.lr, weight_decay=config.weight_decay or 0.0, fused=True
    )
    micro_batch_size = optimization.micro_batch_size
    assert isinstance(micro_batch_size, int)
    steps, warmup_steps = optimization.steps or 0, optimization.schedule.warmup_steps or 0
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(warmup_steps, steps))
    arm = _Segmentation(source) if recipe.metric == "miou" else _Detection(source)
    per_step = optimization.global_batch_size // micro_batch_size
    model.train()
    for number, (images, targets) in enumerate(train, 1):
        loss = arm.loss(model, normalize(images), targets) / per_step
        loss.backward()
        if number % per_step:
            continue
        if optimization.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), optimization.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    model.eval()
    with torch.no_grad():
        return arm.metric(model, ((normalize(images), targets) for images, targets in val))


def _loaders(experiment: Experiment, source: DataSource) -> tuple[Any, Any]:
    optimization, workers = experiment.optimization, experiment.workers
    size = optimization.micro_batch_size
    assert isinstance(size, int)
    order = MicroBatchSampler(
        len(source.train),
        global_batch_size=optimization.global_batch_size,
        micro_batch_size=size,
        seed=experiment.seed,
        position=Position(0),
        total_steps=optimization.steps or 0,
    )
    train = Samples(experiment, source, is_training=True)
    val = Samples(experiment, source, is_training=False)
    every = EvaluationSampler(len(val), size)
    made = (
        DataLoader(
            samples,
            batch_sampler=slots,  # type: ignore[arg-type]  # of slots: see Samples.__getitems__
            num_workers=workers,
            collate_fn=_unchanged,
        )
        for samples, slots in ((train, order), (val, every))
    )
    return tuple(made)  # type: ignore[return-value]


class Samples(Dataset[Any]):
    """Images with their masks or boxes, augmented by ``JointTransform``, a batch at a time."""

    def __init__(self, experiment: Experiment, source: DataSource, *, is_training: bool) -> None:
        split = source.train if is_training else source.val
        assert isinstance(split, FileSplit)
        self._split = split
        make_task: Any = load_part("tasks", experiment.task)
        spec = make_task(experiment, source.info).target_spec
        self._transform = JointTransform(experiment.data, experiment.seed, spec, is_training=is_training)
        self._targets = TargetCheck(experiment.task, spec)

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, slot: Slot) -> tuple[Tensor, Any]:
        indices = slot.indices.tolist()[: slot.num_valid]
        read = [self._split.file_content(index) for index in indices]
        images = [
            read_image(content, self._split.channels, index)
            for index, (content, _) in zip(indices, read, strict=True)
        ]
        targets = self._targets.stacked([self._targets.one(target) for _, target in read], indices)
        own = Slot(slot.step, slot.window, slot.epoch, 0, 1.0, slot.indices[: slot.num_valid], slot.num_valid)
        return self._transform(images, targets, own)


def _unchanged(batch: Any) -> Any:
    return batch


class _Segmentation:
    def __init__(self, source: DataSource) -> None:
        self._num_classes = source.info.num_classes
        self._ignored = source.info.ignore_index or 0

    def loss(self, model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
        return cross_entropy(model(images)["out"], masks.long(), ignore_index=self._ignored)

    def metric(self, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        """Return the mean IoU of the classes."""
        confusion = torch.zeros(self._num_classes, self._num_classes, dtype=torch.int64)
        for images, masks in batches:
            is_labelled = masks != self._ignored
            classes = masks.long()[is_labelled]
            predictions = model(images)["out"].argmax(dim=1)[is_labelled]
            cells = torch.bincount(classes * self._num_classes + predictions, minlength=confusion.numel())
            confusion += cells.view_as(confusion)
        hits = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - hits
        return float((hits[union > 0] / union[union > 0]).mean())


class _Detection:
    def __init__(self, source: DataSource) -> None:
        self._num_classes = source.info.num_classes

    def loss(self, model: nn.Module, images: Tensor, targets: dict[str, list[Tensor]]) -> Tensor:
        pairs = zip(targets["boxes"], targets["labels"], strict=True)
        losses = model(images, [{"boxes": boxes, "labels": labels} for boxes, labels in pairs])
        return torch.stack(list(losses.values())).sum()

    def metric(self, model: nn.Module, batches: Iterator[tuple[Tensor, dict[str, list[Tensor]]]]) -> float:
        """Return the average precision at IoU 0.5."""
        found: list[Tensor] = []
        truth: list[Tensor] = []
        for images, targets in batches:
            found += [_rows(each["boxes"], each["labels"], each["scores"]) for each in model(images)]
            parts = (targets[name] for name in ("boxes", "labels", "iscrowd"))
            truth += [_rows(*each) for each in zip(*parts, strict=True)]
        return average_precision(found, truth, self._num_classes)[1]


def _rows(boxes: Tensor, *columns: Tensor) -> Tensor:
    return torch.cat([boxes, *(column[:, None].float() for column in columns)], dim=1)


if __name__ == "__main__":
    main()
