from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.training.models.blocks import find_blocks
from tests.models.factories import OwnBlocks, mlp


@pytest.mark.parametrize(
    ("create", "name", "kind", "count"),
    [
        (timm.create_model, "vit_tiny_patch16_224", "Block", 12),
        (timm.create_model, "convnext_atto", "ConvNeXtBlock", 12),
        (timm.create_model, "resnet18", "BasicBlock", 8),
        (timm.create_model, "swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),
        (timm.create_model, "efficientnet_b0", "InvertedResidual", 15),
        (torchvision.models.get_model, "resnet50", "Bottleneck", 16),
        (torchvision.models.get_model, "vit_b_16", "EncoderBlock", 12),
        (torchvision.models.get_model, "convnext_tiny", "CNBlock", 18),
        (torchvision.models.get_model, "swin_t", "SwinTransformerBlock", 12),
        (torchvision.models.get_model, "mobilenet_v2", "InvertedResidual", 17),
    ],
)
def test_blocks_of_timm_and_torchvision_are_found(create: Any, name: str, kind: str, count: int) -> None:
    with torch.device("meta"):
        blocks = find_blocks(create(name, num_classes=10))
    assert [type(block).__name__ for block in blocks] == [kind] * count


def test_a_models_own_method_is_asked() -> None:
    model = OwnBlocks()
    assert find_blocks(model) == [model.first, model.second]
    assert find_blocks(mlp(10)) == [], "which has none"


class _Nested(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.inner = nn.Sequential(*(_Nested(depth - 1) for _ in range(2 if depth else 0)))


def test_blocks_are_not_inside_each_other() -> None:
    model = nn.Sequential(_Nested(1), _Nested(1))
    assert find_blocks(model) == list(model)


class _Says(nn.Module):
    """``blocks()`` returns what ``said`` makes of the layers."""

    said: Any

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def blocks(self) -> Any:
        return type(self).said(self)


def _saying(said: Any) -> _Says:
    return type("_Own", (_Says,), {"said": staticmethod(said)})()


@pytest.mark.parametrize("said", [lambda m: m.layers, lambda m: tuple(m.layers), lambda m: iter(m.layers)])
def test_a_models_own_blocks_may_be_any_sequence_of_them(said: Any) -> None:
    model = _saying(said)
    assert find_blocks(model) == list(model.layers)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (lambda _: None, r"returned None; write a list of submodules"),
        (lambda m: m.layers[0][0], r"returned a Linear; write a list of submodules"),
        (lambda _: "layers.0", r"returned a str; write"),
        (lambda _: ["layers.0"], r"returned a list with a str in it; write"),
        (lambda _: [nn.Linear(2, 2)], r"returned a Linear that is not one of its submodules"),
        (lambda m: [m], r"returned a _Own that is not one of its submodules"),
        (lambda m: [*m.layers, m.layers[0]], r"returned layers\.0, which is listed twice"),
        (lambda m: [m.layers[0], m.layers[0][0]], r"returned layers\.0\.0, which is inside layers\.0"),
    ],
)
def test_a_models_own_blocks_that_are_none_are_refused(said: Any, words: str) -> None:
    with pytest.raises(BadFileError, match=rf"^model\.name: blocks\(\) {words}"):
        find_blocks(_saying(said))
