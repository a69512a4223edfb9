"""Tasks, models and data sources by the real command, killed in mid-epoch: bitwise as if nothing happened.

Those that no other page kills: small models of the tests are in test_segmentation.py and test_detection.py,
language models in test_causal_lm.py and test_token_shards.py.
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
    status,
    wait_for,
    write_experiment,
)
from tests.parallelism import task_data
from tests.parallelism.task_cases import CASES, TaskCase
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

#: Case → steps, enough of them to be killed in the middle. The first case and the second have the same data.
STEPS = {case.title: 24 for case in CASES[1:] if case.data["name"] != "tokens"}
LOCAL = ("--local", "--devices", "2")
#: Each rank imports transformers, for seconds.
ALONE = ("--local", "--devices", "1")


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
    file["data"] |= {"augment": {"hflip": 0.5}, "workers": 0}
    file["optimization"] |= {"steps": STEPS[case.title], "ema": {"decay": 0.9}}
    every = {
        "evaluation": {"every_steps": STEPS[case.title] // 2},
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }
    return yaml.safe_dump(file | every)


@pytest.mark.parametrize("title", STEPS)
def test_a_killed_run_resumes_bitwise(title: str, root: Path, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.title == title)
    if case.needs_transformers and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: the extra 'hf'")
    found = {"HPC_TRAIN_CACHE": str(root / "cache")}
    if case.data["name"] == "huggingface":
        found["PYTHONPATH"] = os.pathsep.join([str(root), str(REPOSITORY)])
    file, where = write_experiment(tmp_path, text(case, root)), ALONE if case.needs_transformers else LOCAL
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    done = hpc_train("submit", file, *where, HPC_TRAIN_RUNS=str(quiet / "runs"), **found)
    assert done.code == 0, done.err

    runs = found | {"HPC_TRAIN_RUNS": str(killed / "runs")}
    with Hold(killed, 4) as hold:
        process = start("submit", file, hold.override, *where, **runs)
        hold.wait(process)
        paths = only_run(killed)
        wait_for(lambda: bool(committed(paths)) or process.poll() is not None, "the checkpoint of step 3")
        kill_everything(process, paths)
    process.communicate()
    assert (committed(paths)[0].step, last_step(paths)) == (3, 4)
    done = hpc_train("resume", paths.folder, "data.workers=1", **runs)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(only_run(quiet), paths)
    assert rows(paths, "val")


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
