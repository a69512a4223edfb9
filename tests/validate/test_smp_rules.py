"""What ``validate`` says about smp's models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.validate import logging_rules, model_facts
from tests.config.files import GOOD, problems_of

NAMES = {
    "timm": ["resnet18", "convnext_tiny"],
    "smp": ["unet", "fpn"],
    "smp_encoders": ["resnet18", "resnet34"],
}
MASKS = "data={name: segmentation_folder, root: x, args: {num_classes: 3}}"


def problems(folder: Path, model: str, *overrides: str) -> list[str]:
    return problems_of(folder, GOOD, "task=segmentation", MASKS, f"model={{name: {model}}}", *overrides)


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(question: str | None) -> dict[str, Any]:
        return NAMES if question is None else {}

    monkeypatch.setattr(model_facts, "_answer", answer)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smp", "model.name: 'smp' names no model; write smp/unet"),
        ("smp/unett", "model.name: smp has no model 'unett'; did you mean smp/unet?"),
        ("smp/unet, args: {encoder_name: resnet43}", "encoder_name: smp has no encoder 'resnet43'; did"),
        ("smp/unet, args: {encoder_name: tu-resnet81}", "did you mean tu-resnet18?"),
        ("smp/unet, args: {encoder_name: convnext_tiny.in12k}", "did you mean tu-convnext_tiny?"),
        ("smp/unet, args: {encoder_name: xyz}", "write one like resnet34, or tu-<name of timm>"),
        ("smp/unet, args: {encoder_weights: ssl}", "model.args.encoder_weights: is not allowed here; write"),
        ("smp/unet, args: {aux_params: {classes: 3}}", "model.args.aux_params: is not allowed here; take"),
    ],
)  # fmt: skip
def test_mistakes_are_named(model: str, said: str, tmp_path: Path) -> None:
    (line,) = problems(tmp_path, model)
    assert said in line


@pytest.mark.parametrize("encoder", ["resnet18", "tu-resnet18", "tu-convnext_tiny.in12k"])
def test_encoders_of_both_libraries_pass(encoder: str, tmp_path: Path) -> None:
    assert problems(tmp_path, f"smp/unet, pretrained: true, args: {{encoder_name: {encoder}}}") == []
    assert problems(tmp_path, "smp/unet, pretrained: true", "data.normalize=weights") == []


def test_only_segmentation_uses_masks(tmp_path: Path) -> None:
    lines = problems_of(tmp_path, GOOD, "model={name: smp/unet}")
    assert lines == [
        "exp.yaml:2:7: task: classification can't use smp/unet, which returns masks; write segmentation"
    ]
    assert (
        "detection needs" in problems(tmp_path, "smp/unet", "task=detection", "data={name: coco, root: x}")[0]
    )


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging_rules, "find_spec", lambda name: None)
    (line,) = problems(tmp_path, "smp/unet")
    assert "not installed" in line and line.endswith(
        "run pip install 'hpc-train[smp]', or name another model"
    )
    assert problems(tmp_path, "smp/unet", "environment.python=/opt/python") == []
