"""Sizes and channels of images that the model can't take are refused before a run is queued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.training_sections import DataConfig, NormalizeConfig
from hpc_train.data_facts.channels import model_problem
from hpc_train.datasets.normalize import Normalize
from hpc_train.datasets.types import DataInfo
from hpc_train.errors import BadFileError
from hpc_train.registry import _NOUNS, parts
from hpc_train.validate import model_facts
from tests.config.files import GOOD, problems_of

VIT = "model={name: timm/vit}"
CIFAR = "data={name: torchvision/CIFAR10, root: x}"
REFUSAL = {"size_refusal": "Input height (32) doesn't match model (224).", "fitting_size": 224}


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The questions about models; every model refuses the size, and can be built for another."""
    asked: list[list[Any]] = []

    def answer(question: str | None) -> dict[str, Any]:
        if question is None:
            return {"timm": ["vit"], "torchvision": ["resnet18"], "datasets": ["CIFAR10", "Food101", "MNIST"]}
        asked.append(json.loads(question))
        return REFUSAL | {"takes_img_size": True}

    monkeypatch.setattr(model_facts, "_answer", answer)
    return asked


def test_the_data_sets_own_size_is_asked_for(tmp_path: Path, questions: list[list[Any]]) -> None:
    (line,) = problems_of(tmp_path, GOOD, VIT, CIFAR)
    assert line == (
        "command line: data.image_size: is missing, and timm/vit can't take the 32×32 images of "
        "torchvision/CIFAR10 (Input height (32) doesn't match model (224)); write 224, or model.args: "
        "{img_size: 32}"
    )
    assert questions == [["timm/vit", {}, 32]]


@pytest.mark.parametrize(
    ("data", "key", "size"),
    [
        ("data={name: digits}", "image_size: is missing", 32),
        ("data={name: synthetic}", "image_size: is missing", 32),
        ("data={name: synthetic, args: {image_size: 50}}", "args.image_size: timm/vit can't", 50),
        ("data={name: torchvision/MNIST, root: x}", "image_size: is missing", 28),
        ("data={name: torchvision/CIFAR10, root: x, image_size: 48}", "image_size: timm/vit can't", 48),
        ("data={name: torchvision/Food101, root: x, image_size: 48}", "image_size: timm/vit can't", 48),
    ],
)
def test_the_size_that_the_model_is_given_is_asked_for(
    data: str, key: str, size: int, tmp_path: Path, questions: list[list[Any]]
) -> None:
    (line,) = problems_of(tmp_path, GOOD, VIT, data)
    assert f"data.{key}" in line and questions == [["timm/vit", {}, size]]


@pytest.mark.parametrize(
    "overrides",
    [
        (VIT, "data={name: torchvision/Food101, root: x}"),  # images of many sizes
        (VIT, "data={name: imagefolder, root: x}"),
        (VIT, "data={name: 'my_data:build'}"),
        (CIFAR,),  # the user's own model
        (VIT, CIFAR, "task=resizes"),  # which may resize images
    ],
)
def test_nothing_is_asked_without_need(
    overrides: tuple[str, ...], tmp_path: Path, questions: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {kind: parts(kind) for kind in _NOUNS} | {"tasks": parts("tasks") | {"resizes": "x:y"}}
    monkeypatch.setattr("hpc_train.validate.part_rules.parts", known.get)
    assert problems_of(tmp_path, GOOD, *overrides) == []
    assert questions == []


@pytest.mark.slow
def test_a_vit_is_asked_whether_it_takes_cifars_images(tmp_path: Path) -> None:
    model = "model.name=timm/vit_base_patch16_224"
    (line,) = problems_of(tmp_path, GOOD, model, CIFAR)
    assert (
        "data.image_size: is missing" in line
        and "32×32 images of torchvision/CIFAR10 (Input height (32)" in line
    )
    assert line.endswith("; write 224, or model.args: {img_size: 32}")
    assert problems_of(tmp_path, GOOD, model, CIFAR, "model.args={img_size: 32}") == []
    assert problems_of(tmp_path, GOOD, model, CIFAR, "data.image_size=224") == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("model={name: torchvision/resnet18}", "data={name: synthetic, args: {channels: 2}}"),
            "model.name: torchvision's models take 1 or 3 channels and the data have 2; use timm's",
        ),
        (
            ("model={name: timm/vit, args: {in_chans: 3}}", "data={name: torchvision/MNIST, root: x}"),
            "model.args.in_chans: 3 channels, and the images of torchvision/MNIST have 1; take it out",
        ),
        (
            ("data={name: imagefolder, root: x, normalize: {mean: [0.5], std: [0.2]}}",),
            "data.normalize.mean: [0.5] has 1 values, but images have 3 channels; write 3",
        ),
    ],
)
def test_channels_that_do_not_fit_are_refused(
    overrides: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_facts, "_answer", lambda question: {})
    assert said in problems_of(tmp_path, GOOD, *overrides)[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("model={name: torchvision/resnet18}", "data={name: torchvision/MNIST, root: x}"),
        ("model={name: timm/vit, args: {in_chans: 1}}", "data={name: torchvision/MNIST, root: x}"),
        ("model={name: timm/vit, args: {in_chans: 1}}", "data={name: torchvision/Food101, root: x}"),
        ("data={name: digits, args: {channels: 3}, normalize: {mean: [1, 1, 1], std: [1, 1, 1]}}",),
        ("model={name: torchvision/resnet18}", "data={name: 'my_data:build'}"),
    ],
)
def test_channels_that_fit_or_are_unknown_pass(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_facts, "_answer", lambda question: {})
    assert problems_of(tmp_path, GOOD, *overrides) == []


def test_ranks_refuse_channels_in_the_same_words(tmp_path: Path) -> None:
    data = DataConfig(name="imagefolder", root="x", normalize=NormalizeConfig(mean=[0.5], std=[0.2]))
    given = "data={name: imagefolder, root: x, normalize: {mean: [0.5], std: [0.2]}}"
    line, *_ = problems_of(tmp_path, GOOD, given)
    with pytest.raises(BadFileError) as error:
        Normalize(DataInfo(2, 3, (0.5,) * 3, (0.2,) * 3), data)
    assert line.endswith(str(error.value))
    assert model_problem("torchvision/resnet18", 2) is not None and model_problem("timm/resnet18", 2) is None


SMP = "model={name: smp/fpn}"
MASKS = "data={name: segmentation_folder, root: x, args: {num_classes: 3}}"


def test_sizes_of_masks_are_asked_for_in_training_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[Any]] = []

    def answer(question: str | None) -> dict[str, Any]:
        if question is None:
            return {"timm": [], "torchvision": [], "smp": ["fpn"], "smp_encoders": ["resnet34"]}
        asked.append(json.loads(question))
        return {"size_refusal": "Wrong shape", "fitting_size": [192, 256], "takes_img_size": False}

    monkeypatch.setattr(model_facts, "_answer", answer)
    sizes = ("data.image_size=[180, 240]", "data.eval_size=250")
    lines = problems_of(tmp_path, GOOD, "task=segmentation", SMP, MASKS, *sizes)
    assert lines == [
        f"command line: data.{key}: smp/fpn can't take images of {sides} (Wrong shape); write [192, 256]"
        for key, sides in (("image_size", "180×240"), ("eval_size", "250×250"))
    ]
    assert asked == [["smp/fpn", {}, [180, 240]], ["smp/fpn", {}, 250]]
