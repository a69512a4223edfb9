"""The file of ``init`` fits the data and the device: sizes, epochs, learning rate; small ones are trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_train.cli.first_file import FirstFile, first_file, start_of
from hpc_train.experiment.data_facts.survey.content import Images, Survey
from hpc_train.launchers.base import JobSection
from tests.cli.commands import hpc_train, succeeded
from tests.shapes import write_boxes, write_folder, write_list


def content(
    samples: int | None = 1000,
    size: tuple[int, int] = (300, 400),
    *,
    task: str = "classification",
    read_s: float = 1e-3,
    changes: dict[str, Any] | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """Return the file for ``samples`` images of ``size``, height and width."""
    images = Images(size[1], size[0], True, 3, read_s, 64)
    name = "imagefolder" if task == "classification" else "coco"
    survey = Survey(task, name, {}, samples, images=images)
    chosen = FirstFile(
        name="exp", start=start_of(task), root="data", survey=replace(survey, **(changes or {})), **choices
    )
    parsed: dict[str, Any] = yaml.safe_load(first_file(chosen, Path("exp.yaml")))
    return parsed


def steps_per_epoch(file: dict[str, Any], samples: int) -> int:
    return samples // int(file["optimization"]["global_batch_size"])


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("samples", [40, 100, 1_000, 5_000, 1_000_000])
def test_an_epoch_has_at_least_20_steps(samples: int, gpus: int) -> None:
    file = content(samples, gpus=gpus)
    micro = file["optimization"]["micro_batch_size"]
    # On more ranks each has a micro-batch of 2 at least.
    assert steps_per_epoch(file, samples) >= 20 or micro <= 2
    assert file["optimization"]["global_batch_size"] >= micro * max(1, gpus)


def test_ten_images_are_enough_for_a_step_on_each_rank() -> None:
    assert steps_per_epoch(content(10), 10) == 5
    assert content(10)["optimization"]["epochs"] == 100
    assert steps_per_epoch(content(10, gpus=8), 10) == 1


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(("size", "expected"), [((32, 32), 32), ((28, 28), 28), ((60, 80), 60)])
def test_small_images_keep_their_size(size: tuple[int, int], expected: int, gpus: int) -> None:
    file = content(size=size, gpus=gpus)
    assert file["data"]["image_size"] == expected
    assert "crop_padding" in file["data"]["augment"]
    assert ("args" in file["model"]) == (gpus > 0), "ResNet-18 would reduce them to one pixel"


def test_large_images_are_reduced_most_on_a_cpu() -> None:
    assert content(size=(1500, 2000), gpus=1)["data"]["image_size"] == 224
    few, many = (content(samples, (1500, 2000))["data"]["image_size"] for samples in (50, 5000))
    assert 48 <= many < few <= 224
    assert content(5000, (1500, 2000), task="detection")["data"]["image_size"] == [96, 128]


def test_a_cpu_trains_a_minute_and_a_gpu_as_its_recipe() -> None:
    epochs = [content(samples)["optimization"]["epochs"] for samples in (100, 1_000, 50_000)]
    assert epochs[0] == 40 and 20 < epochs[1] < 30 and epochs[2] == 3
    assert content(1_000, read_s=0.02)["optimization"]["epochs"] < 20, "decoding is part of it"
    assert content(1_000, gpus=1)["optimization"]["epochs"] == 100


def test_the_learning_rate_follows_the_batch() -> None:
    whole, half, quarter = (content(samples)["optimization"] for samples in (2_560, 1_280, 640))
    assert [file["global_batch_size"] for file in (whole, half, quarter)] == [128, 64, 32]
    assert whole["optimizer"]["lr"] == 2 * quarter["optimizer"]["lr"]
    assert content(40)["optimization"]["optimizer"] == quarter["optimizer"], "too few steps for less"
    whole, half = (content(samples, gpus=1)["optimization"] for samples in (5_120, 2_560))
    assert whole["optimizer"] == half["optimizer"] | {"lr": 2 * half["optimizer"]["lr"]}


def test_an_epoch_of_a_long_text_has_several_evaluations() -> None:
    survey = Survey("causal_lm", "text", {"sequence_length": 128}, 8_000)
    chosen = FirstFile(name="exp", start=start_of("causal_lm"), root="book.txt", survey=survey)
    file = yaml.safe_load(first_file(chosen, Path("exp.yaml")))
    assert (file["optimization"]["epochs"], file["evaluation"]) == (1, {"every_steps": 125})
    assert "image_size" not in file["data"] and file["model"]["name"] == "gpt"


def test_without_validation_data_there_is_no_evaluation() -> None:
    file = content(changes={"has_val": False})
    assert "evaluation" not in file and "best" not in file["checkpoint"]


def test_several_classes_per_image_have_their_metric() -> None:
    file = content(changes={"args": {"target": "classes"}})
    assert file["checkpoint"]["best"]["metric"] == "map_multilabel"
    assert "label_smoothing" not in file["optimization"]


def test_images_are_enlarged_only_for_a_model_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hpc_train.experiment.validate.model_facts.facts", lambda *_, **__: {"fitting_size": 224}
    )
    file = content(size=(32, 32), model="timm/vit_tiny_patch16_224")
    assert file["data"]["image_size"] == 224 and file["optimization"]["epochs"] == 3, "costs more"
    monkeypatch.setattr("hpc_train.experiment.validate.model_facts.facts", lambda *_, **__: {})
    assert content(size=(32, 32), model="timm/resnet50")["data"]["image_size"] == 32


def test_each_rank_of_a_job_has_a_micro_batch() -> None:
    job = JobSection({"nodes": 2, "gpus_per_node": 4}, ranks=8, has_gpus=True)
    file = content(1_000, job=job)
    assert [file["optimization"][key] for key in ("global_batch_size", "micro_batch_size")] == [32, 4]
    assert file["precision"] == "bf16" and file["slurm"]["nodes"] == 2


def gray_and_one_class_missing_in_val(root: Path) -> Path:
    write_folder(root, {"train": 60, "val": 20}, (28, 28), mode="L")
    for path in (root / "val" / "cross").iterdir():
        path.unlink()
    return root


#: Folder, metric, the value to reach, and the epochs if fewer suffice.
TRAINED: dict[str, tuple[Callable[[Path], Path], str, float, int]] = {
    "ten images": (
        lambda root: write_folder(root, {"train": 5, "val": 5}, (64, 64), shapes=("circle", "cross")),
        "accuracy", 0.7, 60,
    ),
    "gray, a class missing in val": (gray_and_one_class_missing_in_val, "accuracy", 0.8, 12),
    "list": (lambda root: write_list(root, {"train": 160, "val": 40}, (32, 32)), "accuracy", 0.8, 15),
    "boxes": (lambda root: write_boxes(root, {"train": 40, "val": 12}, (64, 48)), "map50", 0.25, 12),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_file_trains_to_an_accuracy(name: str, tmp_path: Path) -> None:
    make, metric, expected, epochs = TRAINED[name]
    root = make(tmp_path / "data")
    assert hpc_train("init", "-y", "--local", "--root", root).code == 0
    for command in (["validate", "exp.yaml"], ["prepare", "exp.yaml"]):
        succeeded(*command)
    done = succeeded("submit", "exp.yaml", "--local", "--json", f"optimization.epochs={epochs}")
    (run,) = json.loads(done.out)["runs"]
    rows = map(json.loads, Path(run["path"], "metrics.jsonl").read_text().splitlines())
    assert max(row[metric] for row in rows if row["split"] == "val") >= expected
