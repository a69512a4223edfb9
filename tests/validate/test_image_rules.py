"""Sizes and channels of images that the model can't take are refused before a run is queued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.validate import model_facts
from hpc_train.registry import parts
from tests.config.files import GOOD, code_and_key, problems_of

VIT = "model={name: timm/vit}"
CIFAR = "data={name: torchvision/CIFAR10, root: x}"


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """The questions about models; every model refuses the size."""
    asked: list[list[Any]] = []

    def answer(question: str | None) -> dict[str, Any]:
        if question is None:
            return {"timm": ["vit"], "torchvision": ["resnet18"], "datasets": ["CIFAR10", "Food101", "MNIST"]}
        asked.append(json.loads(question))
        return {"size_refusal": "Wrong height", "fitting_size": 224}

    monkeypatch.setattr(model_facts, "_answer", answer)
    return asked


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
    own = {"tasks": {"resizes": "x:y"}}
    monkeypatch.setattr(
        "hpc_train.experiment.validate.part_rules.parts", lambda kind: parts(kind) | own.get(kind, {})
    )
    assert problems_of(tmp_path, GOOD, *overrides) == []
    assert questions == []


@pytest.mark.slow
def test_a_vit_is_asked_whether_it_takes_cifars_images(tmp_path: Path) -> None:
    model = "model.name=timm/vit_base_patch16_224"
    (line,) = problems_of(tmp_path, GOOD, model, CIFAR)
    assert code_and_key(line) == ("model.image-size", "data.image_size")
    assert line.endswith("; write 224, or model.args: {img_size: 32}")
    assert problems_of(tmp_path, GOOD, model, CIFAR, "model.args={img_size: 32}") == []
    assert problems_of(tmp_path, GOOD, model, CIFAR, "data.image_size=224") == []


@pytest.mark.slow
def test_images_of_a_size_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    model = "model.name=timm/test_vit"
    (line,) = problems_of(tmp_path, GOOD, model, "data.image_size=50")
    assert code_and_key(line) == ("model.image-size", "data.image_size") and line.endswith("; write 160")
    (line,) = problems_of(tmp_path, GOOD, model, "data={name: synthetic, args: {image_size: 50}}")
    assert code_and_key(line) == ("model.image-size", "data.args.image_size")
    assert problems_of(tmp_path, GOOD, model, "data.image_size=32") == []
