"""Detection by the real command: a kill in the middle of an epoch changes no bit, and the example runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.datasets.coco import read, write, write_coco
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    REPOSITORY,
    assert_equal_to_the_bit,
    hpc_train,
    kill_everything,
    last_step,
    only_run,
    rows,
    start,
    submit,
    write_experiment,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pycocotools") is None, reason="needs pycocotools: the extra 'detection'"
    ),
]

STEPS = 24
EXPERIMENT = f"""\
name: rectangles
seed: 5
task: detection
model: {{name: "tests.tasks.detectors:tiny"}}
data:
  name: coco
  root: ROOT
  image_size: [32, 64]
  transform: torchvision.transforms.v2:RandomPhotometricDistort
  augment: {{hflip: 0.5, random_scale: [0.8, 1.2]}}
optimization:
  steps: {STEPS}
  global_batch_size: 6
  micro_batch_size: 2
  optimizer: {{name: adamw, lr: 0.005}}
  ema: {{decay: 0.9}}
evaluation: {{every_steps: 12}}
checkpoint: {{every_steps: 3}}
logging: {{every_steps: 1}}
"""


def test_a_run_killed_in_an_epoch_resumes_bitwise(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco", train=40)
    text = EXPERIMENT.replace("ROOT", str(root))
    reference = submit(tmp_path / "reference", text=text)
    folder = tmp_path / "killed"
    runs = {"HPC_TRAIN_RUNS": str(folder / "runs")}
    with Hold(folder, 8) as hold:
        experiment = write_experiment(folder, text)
        process = start("submit", experiment, hold.override, "--local", "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(folder)
        kill_everything(process, paths)
    process.communicate()
    assert last_step(paths) == 8
    done = hpc_train("resume", paths.folder, "data.workers=1", **runs)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(reference, paths)
    first, last = rows(paths, "val")
    assert first.keys() == last.keys() >= {"map", "map50", "ema_map", "ema_map50"}


def test_the_example_runs(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco", train=6, val=2)
    overrides = (
        f"data.root={root}", "optimization.steps=2", "optimization.schedule.warmup_steps=1",
        "optimization.global_batch_size=4", "optimization.micro_batch_size=2", "data.image_size=32",
        "evaluation.every_steps=2", "data.workers=0",
    )  # fmt: skip
    example = REPOSITORY / "examples" / "bccd-ssdlite.yaml"
    paths = submit(tmp_path, *overrides, devices=1, text=example.read_text())
    (row,) = rows(paths, "val")
    assert 0 <= row["map"] <= row["map50"] <= 1


def test_predictions_of_a_folder_are_those_of_the_validation_data(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco", side=48)
    text = EXPERIMENT.replace("ROOT", str(root))
    run = submit(tmp_path, "optimization.steps=2", "evaluation.every_steps=2", devices=1, text=text)
    found = []
    for name, data in (("val", ()), ("folder", ("--data", root / "val"))):
        file = tmp_path / f"{name}.jsonl"
        done = hpc_train("predict", run.folder, "-o", file, "--devices", "2", *data)
        assert done.code == 0, done.err
        found.append([json.loads(line) for line in file.read_text().splitlines()])
    assert found[0] == found[1] and len(found[0]) == 5
    boxes = [each["box"] for row in found[0] for each in row["boxes"]]
    assert 32 < max(map(max, boxes)) <= 48 and min(map(min, boxes)) >= 0


def test_prepare_names_a_bad_box(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "coco")
    document = read(root, "val")
    document["annotations"][0]["bbox"] = [0, 0, 99, 4]
    write(root, "val", document)
    experiment = write_experiment(tmp_path, EXPERIMENT.replace("ROOT", str(root)))
    good = hpc_train("prepare", experiment, "data.args={bad_boxes: drop}")
    assert good.code == 0, good.err
    done = hpc_train("prepare", experiment)
    assert done.code == 65
    assert f"{root}/val.json has the annotation" in done.err
