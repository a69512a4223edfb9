"""``evaluate`` and ``predict`` on more ranks than training can have, on less data, and with bad samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from hpc_train.paths import RunPaths
from tests.end_to_end.parts import net
from tests.end_to_end.runs import hpc_train, rows, submit

pytestmark = pytest.mark.slow

TRAIN, VAL = 8, 7
BAD = "val/cat/6.png"
TEXT = f"""\
name: images
task: classification
model: {{name: "tests.end_to_end.parts:net"}}
data: {{name: imagefolder, root: ROOT, image_size: 32, args: {{channels: 1}}, on_bad_sample: skip}}
parallel: {{sync_batchnorm: true}}
optimization:
  epochs: 2
  global_batch_size: {2 * TRAIN}
  micro_batch_size: {2 * TRAIN}
  optimizer: {{name: adamw, lr: 0.003}}
  schedule: {{name: cosine, warmup_epochs: 1}}
evaluation: {{images: 0}}
"""


def write_images(root: Path, train: int, val: int) -> Path:
    """Write so many images of each of two classes."""
    for split, count in (("train", train), ("val", val)):
        for label, name in enumerate(("ant", "cat")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.full((32, 32), 100 * label + 9 * number, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """One micro-batch per step, so that training can have one rank only; what it started from is gone."""
    folder = tmp_path_factory.mktemp("images")
    root = write_images(folder / "data", TRAIN, VAL)
    (root / BAD).write_bytes(b"no image")
    weights = folder / "first.safetensors"
    save_file(net(num_classes=2).state_dict(), weights)
    trained = submit(folder, f"model.init_from={weights}", devices=1, text=TEXT.replace("ROOT", str(root)))
    weights.unlink()
    return trained


def evaluated(run: RunPaths, *options: str) -> dict[str, Any]:
    done = hpc_train("evaluate", run.folder, "--json", *options)
    assert done.code == 0, done.err
    row = json.loads(done.out)["row"]
    return {key: value for key, value in row.items() if key not in {"time", "attempt"}}


def test_more_ranks_than_micro_batches_find_the_row_of_training(run: RunPaths) -> None:
    *_, last = rows(run, "val")
    assert evaluated(run, "--devices", "3") == last


def test_other_data_may_have_fewer_training_samples_than_a_step(run: RunPaths, tmp_path: Path) -> None:
    root = write_images(tmp_path / "other", 1, VAL)
    row = evaluated(run, f"data.root={root}", "--devices", "1")
    assert {"loss", "accuracy"} < row.keys()
    *_, last = rows(run, "val")
    assert (row["step"], row["epoch"]) == (last["step"], last["epoch"])


def test_a_validation_image_that_cant_be_read_has_no_line(run: RunPaths, tmp_path: Path) -> None:
    done = hpc_train("predict", run.folder, "-o", tmp_path / "all.jsonl", "--devices", "3", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["predictions"], said["skipped"]) == (2 * VAL - 1, 1)
    assert done.err.count("predict: skipped, since it can't be read") == 1 and BAD in done.err
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["index"] for row in found] == list(range(2 * VAL - 1))


def test_a_file_of_a_folder_that_cant_be_read_has_no_line(run: RunPaths, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 1, 1)
    (folder / "bad.png").write_bytes(b"")
    target = tmp_path / "photos.csv"
    done = hpc_train("predict", run.folder, "-o", target, "--data", folder, "--devices", "1")
    assert done.code == 0, done.err
    assert done.out == f"{target}  4 predictions, 1 sample skipped\n"
    assert f"skipped, since it can't be read: {folder / 'bad.png'}" in done.err
    first, *lines = target.read_text().splitlines()
    assert first.startswith("index,file,") and [line[:2] for line in lines] == ["1,", "2,", "3,", "4,"]
