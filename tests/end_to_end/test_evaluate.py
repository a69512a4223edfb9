"""``evaluate`` finds what training wrote, on any number of ranks, and changes nothing of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import kept_best
from hpc_train.training.datasets.base import ArraySplit
from hpc_train.training.datasets.building import build_source
from tests.end_to_end.runs import hpc_train, rows
from tests.end_to_end.test_best import SELECTION
from tests.quiet import QuietRuns

pytestmark = pytest.mark.slow

EMA = "optimization.ema={decay: 0.9}"
#: Mixed images are for training only.
EVALUATED = (*SELECTION, EMA, "parallel.strategy=fsdp", "optimization.mixup=0.2")


@pytest.fixture
def run(quiet_runs: QuietRuns) -> RunPaths:
    return quiet_runs.of(*EVALUATED)


def evaluated(run: RunPaths, *options: str) -> dict[str, Any]:
    done = hpc_train("evaluate", run.folder, "--json", *options)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["version"], said["path"]) == (1, str(run.folder))
    row: dict[str, Any] = said["row"]
    return {key: value for key, value in row.items() if key not in {"time", "attempt"}}


def content(run: RunPaths) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in run.folder.rglob("*")}


def test_the_row_is_the_one_of_training_on_any_number_of_ranks(run: RunPaths) -> None:
    before = content(run)
    *_, last = rows(run, "val")
    assert evaluated(run, "--last", "--devices", "1") == last
    assert evaluated(run, "--last", "--devices", "3", "parallel.strategy=ddp") == last
    best = kept_best(run)
    assert best is not None and best.step != last["step"]
    (expected,) = (row for row in rows(run, "val") if row["step"] == best.step)
    assert {"accuracy", "ema_accuracy"} < expected.keys()
    assert evaluated(run, "--devices", "2", "data.workers=1") == expected
    assert content(run) == before


def test_a_damaged_checkpoint_is_named_and_stays(run: RunPaths, tmp_path: Path) -> None:
    copy = RunPaths(tmp_path / "runs" / "x" / "copy")
    copy.folder.parent.mkdir(parents=True, mode=0o700)
    shutil.copytree(run.folder, copy.folder)
    newest = copy.checkpoint_folders()[-1]
    newest.shard(1).write_bytes(b"")
    done = hpc_train("evaluate", copy.folder, "--last")
    assert done.code == 74 and f"{newest.folder} is damaged" in done.err, done.err
    assert newest.folder.is_dir()


def test_other_data_are_normalized_as_those_of_the_training(quiet_runs: QuietRuns, tmp_path: Path) -> None:
    """The images of ``digits`` as files, whose own mean and standard deviation would be ImageNet's."""
    run, source = quiet_runs.of(), build_source(DataConfig(name="digits"))
    assert isinstance(source.val, ArraySplit)
    images, targets = source.val.batch(torch.arange(len(source.val)))
    for number, (image, target) in enumerate(zip(images, targets.tolist(), strict=True)):  # type: ignore[arg-type, union-attr]
        for split in ("val", *(["train"] if number < 60 else [])):
            folder = tmp_path / "data" / split / str(target)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(folder / f"{number:03}.png")
    other = ("data.name=imagefolder", f"data.root={tmp_path / 'data'}", "data.args={channels: 1}")
    row = evaluated(run, *other, "--devices", "1")
    *_, last = rows(run, "val")
    assert row["accuracy"] == last["accuracy"] and row["loss"] == pytest.approx(last["loss"], rel=1e-4)
