"""Detection by the real command: a kill in the middle of an epoch changes no bit, and the example runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.datasets.coco import write_coco
from tests.end_to_end.runs import (
    hpc_train,
    submit,
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
