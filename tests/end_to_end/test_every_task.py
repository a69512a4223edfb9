"""Tasks, models and data sources by the real command, killed in mid-epoch: bitwise as if nothing happened.

Language models are in test_causal_lm.py and test_token_shards.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from hpc_train.run.checkpoints import committed
from tests.datasets.coco import read, write, write_coco
from tests.datasets.sources.masks import save, write_folder
from tests.end_to_end.runs import (
    REPOSITORY,
    assert_equal_to_the_bit,
    killed_run,
    last_step,
    only_run,
    resume,
    rows,
    start,
    status,
    submit,
    write_experiment,
)
from tests.parallelism import task_data
from tests.parallelism.task_cases import CASES, TaskCase
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

#: Enough of them to be killed in the middle.
STEPS = 8
#: The first case and the second have the same data.
KILLED = [case for case in CASES[1:] if case.data["name"] != "tokens"]
#: Task → augmentation that draws numbers and moves targets.
AUGMENTED: dict[str, dict[str, object]] = {
    "segmentation": {
        "augment": {"hflip": 0.5, "random_scale": [0.5, 2.0], "color_jitter": {"contrast": 0.3}},
        "image_size": [32, 48],
    },
    "detection": {
        "augment": {"hflip": 0.5, "random_scale": [0.8, 1.2]},
        "transform": "torchvision.transforms.v2:RandomPhotometricDistort",
        "image_size": [32, 64],
    },
}
LOCAL = ("--local", "--devices", "2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tasks") / "data"
        patch.setenv("HPC_TRAIN_CACHE", str(folder / "cache"))
        task_data.write(folder)
        # Compared with the library in tests/datasets/sources/test_huggingface.py.
        (folder / "datasets.py").write_text("from tests.datasets.sources.stand_in_datasets import *\n")
        return folder


def text(case: TaskCase, root: Path) -> str:
    file = case.file(root, precision="fp32")
    file["data"] |= {"augment": {"hflip": 0.5}, "workers": 0} | AUGMENTED.get(case.task, {})
    file["optimization"] |= {"steps": STEPS, "ema": {"decay": 0.9}}
    every = {
        "evaluation": {"every_steps": STEPS // 2},
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }
    return yaml.safe_dump(file | every)


@pytest.mark.parametrize("case", KILLED, ids=lambda case: case.title)
def test_a_killed_run_resumes_bitwise(case: TaskCase, root: Path, tmp_path: Path) -> None:
    if case.needs_transformers and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: the extra 'hf'")
    if case.task == "detection" and importlib.util.find_spec("pycocotools") is None:
        pytest.skip("needs pycocotools: the extra 'detection'")
    environment = {"HPC_TRAIN_CACHE": str(root / "cache")}
    if case.data["name"] == "huggingface":
        environment["PYTHONPATH"] = os.pathsep.join([str(root), str(REPOSITORY)])
    devices = 1 if case.needs_transformers else 2  # each rank imports transformers, for seconds
    quiet = submit(tmp_path / "quiet", devices=devices, text=text(case, root), **environment)
    options = {"devices": devices, "text": text(case, root), "needs_checkpoint": True}
    paths = killed_run(tmp_path / "killed", 4, **options, **environment)
    assert committed(paths)[0].step == 3
    resume(paths, "data.workers=1", **environment)
    assert_equal_to_the_bit(quiet, paths)
    first, last = rows(paths, "val")
    assert first.keys() == last.keys() > ({"map", "ema_map50"} if case.task == "detection" else {"ema_loss"})


def with_a_mask(pixels: np.ndarray) -> Callable[[Path], dict[str, object]]:
    """Return what writes a folder of four images, all read in the first step, of which one has this mask."""

    def write_data(root: Path) -> dict[str, object]:
        write_folder(root, num_classes=3, train=4)
        save(root / "train/masks/002.png", pixels)
        return {"name": "segmentation_folder", "root": str(root), "args": {"num_classes": 3}}

    return write_data


def with_a_box_outside(root: Path) -> dict[str, object]:
    write_coco(root, train=4)
    document = read(root)
    document["annotations"][0]["bbox"] = [20, 0, 20, 4]
    write(root, "train", document)
    return {"name": "coco", "root": str(root)}


BAD_SAMPLES = {
    "mask size": (
        "segmentation",
        "tests.end_to_end.parts:segmenter",
        with_a_mask(np.zeros((9, 14), np.uint8)),
        "train/images/002.png) has the target of 9x14 pixels, and its image has 10x14; make both",
    ),
    "class": (
        "segmentation",
        "tests.end_to_end.parts:segmenter",
        with_a_mask(np.full((10, 14), 3, np.uint8)),
        "train/images/002.png) has the target of uint8",
    ),
    "box": (
        "detection",
        "tests.tasks.detectors:tiny",
        with_a_box_outside,
        "train.json has the annotation 102 of image 20, with the bbox [20, 0, 20, 4]",
    ),
}


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_a_bad_sample_that_one_rank_reads_ends_the_run_at_once(kind: str, tmp_path: Path) -> None:
    task, model, write_data, said = BAD_SAMPLES[kind]
    sizes = {"steps": 9, "global_batch_size": 4, "micro_batch_size": 2}
    file = {
        "name": "bad",
        "task": task,
        "model": {"name": model},
        "data": write_data(tmp_path / "data"),
        "optimization": sizes | {"optimizer": {"name": "sgd", "lr": 0.01}},
    }
    process = start("submit", write_experiment(tmp_path, yaml.safe_dump(file)), *LOCAL)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 65, err
    assert said in err and "Traceback" not in err
    paths = only_run(tmp_path)
    assert said in status(paths)["reason"] and status(paths)["state"] == "failed"
    assert last_step(paths) == 0
    named = [paths.attempt(1).error(rank).exists() for rank in (0, 1)]
    assert any(named) and (kind == "box" or not all(named)), "the other rank only lost its peer"
