"""The examples do what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.run.checkpoints import committed
from tests.datasets.coco import write_coco
from tests.datasets.sources.masks import write_folder
from tests.end_to_end.runs import (
    PLANTED,
    REPOSITORY,
    SECRETS,
    files_that_hold,
    found_runs,
    hpc_train,
    rows,
    status,
)

pytestmark = pytest.mark.slow

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    make_data(folder / "data")
    (folder / "examples").symlink_to(EXAMPLES)  # some name modules of that folder
    return folder


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_every_example_validates(name: str, folder: Path) -> None:
    # The weights of the run that the example's comments begin with.
    after = ["model.init_from=null"] if name in {"fine-tuning.yaml", "vit-small.yaml"} else []
    done = hpc_train("validate", EXAMPLES / name, *after, cwd=folder)
    assert done.code == 0, done.err


def make_data(folder: Path) -> None:
    """Make what the examples' comments say to fetch, in names and sizes: `validate` reads no contents."""
    for name in ("cifar10-images", "cifar8", "cats-and-dogs"):
        for split in ("train", "test"):
            images = folder / name / split / "cat"
            images.mkdir(parents=True)
            for number in range(1100):  # more than a batch of any example
                (images / f"{number}.jpg").touch()
    write_coco(folder / "bccd", train=20)
    for split in ("train", "val"):
        for kind, suffix in (("images", "jpg"), ("masks", "png")):
            (folder / "camvid" / split / kind).mkdir(parents=True)
            for number in range(40):
                (folder / "camvid" / split / kind / f"{number}.{suffix}").touch()
    (folder / "tinyshakespeare.txt").write_text("To be, or not to be. " * 50_000)


@pytest.mark.fault(45)
def test_digits_are_learnt_on_two_cpu_ranks(tmp_path: Path) -> None:
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), **SECRETS}
    example = EXAMPLES / "digits.yaml"
    done = hpc_train("submit", example, "--local", "--devices", "2", "--json", "device=cpu", **runs)
    assert done.code == 0, done.err
    (paths,) = found_runs(tmp_path)
    (run,) = json.loads(done.out)["runs"]
    assert (run["state"], run["path"]) == ("completed", str(paths.folder))
    assert run["step"] == run["total_steps"] == status(paths)["step"] == committed(paths)[0].step
    val = rows(paths, "val")
    assert [row["epoch"] for row in val] == list(range(1, 11))
    assert val[-1]["accuracy"] >= 0.95
    assert paths.attempt(1).log(0).stat().st_size
    assert files_that_hold(tmp_path, PLANTED) == []


def test_the_camvid_recipe_trains_on_a_few_scenes(tmp_path: Path) -> None:
    write_folder(tmp_path / "data/camvid", num_classes=11, sides=(45, 60), ignored=11, train=4, val=3)
    sizes = ("epochs=1", "global_batch_size=4", "micro_batch_size=2", "schedule.warmup_epochs=0.5")
    short = (*(f"optimization.{each}" for each in sizes), "evaluation.every_epochs=1")
    overrides = ("data.image_size=[45, 60]", *short)
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    recipe = EXAMPLES / "camvid-lraspp.yaml"
    done = hpc_train("submit", recipe, *overrides, "--local", "--devices", "1", cwd=tmp_path, **runs)
    assert done.code == 0, done.err
    (paths,) = found_runs(tmp_path)
    (row,) = rows(paths, "val")
    assert 0 <= row["miou"] <= 1
    assert (paths.evaluation(1) / "confusion.csv").read_text().startswith("class,sky,building,pole")
