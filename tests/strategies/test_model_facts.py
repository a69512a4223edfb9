from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.validate.child_process import ChildError, one_child
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.building import build_model
from hpc_train.training.models.splitting import split_model
from hpc_train.training.strategies.model_facts import _facts_of_size, facts
from hpc_train.training.strategies.tensor import refuse_unshared
from tests.waiting import HANG_LIMIT_S

VIT = "timm/vit_tiny_patch16_224"


def built(name: str, args: dict[str, Any]) -> nn.Module:
    info = DataInfo(num_classes=3, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.device("meta"):
        return build_model(ModelConfig(name=name, args=args), info)


def is_taken(act: Callable[[], object]) -> bool:
    try:
        act()
    except BadFileError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args", "most"),
    [
        ("timm/test_resnet", {}, 3),
        ("timm/test_vit", {}, 6),
        (VIT, {}, 12),
        (VIT, {"attn_drop_rate": 0.1}, 12),
        ("timm/resnet18", {}, 8),
        ("timm/convnext_tiny", {}, 18),
        ("torchvision/vit_b_16", {}, 12),
        ("torchvision/resnet18", {}, 8),
        ("torchvision/convnext_tiny", {}, 18),
        ("torchvision/swin_t", {}, 12),
        # Between some blocks lists pass, in others blocks share a tensor.
        ("timm/pit_ti_224", {}, 3),
        ("timm/coat_tiny", {}, 1),
    ],
)
def test_facts_are_what_sharing_and_splitting_do(name: str, args: dict[str, Any], most: int) -> None:
    told, model = facts(name, args), built(name, args)
    assert told["most_stages"] == most
    for stages in (most, most + 1):
        is_cut = is_taken(lambda: split_model(model, find_blocks(model), stages))
        assert is_cut == (stages == most)
    numbers = told["shared"].values()
    for ranks in (2, 3, 4, 5, 8):
        fits = told["dropout_key"] is None and any(numbers) and not any(each % ranks for each in numbers)
        assert is_taken(lambda: refuse_unshared(model, ranks, "write 1")) == fits


def test_numbers_are_said_once_and_what_drops_weights_of_attention_by_its_key() -> None:
    assert facts(VIT, {}) == {
        "has_batchnorm": False,
        "shared": {
            "heads of blocks.0.attn (num_heads)": 3,
            "columns of blocks.0.attn.qkv": 192,
            "columns of blocks.0.mlp.fc1": 768,
        },
        "dropout_key": None,
        "most_stages": 12,
    }
    assert facts(VIT, {"attn_drop_rate": 0.1})["dropout_key"] == "model.args.attn_drop_rate"


@pytest.mark.parametrize(
    ("name", "args", "answer"),
    [
        ("timm/resnet18", {}, True),
        ("timm/resnet18", {"norm_layer": "groupnorm"}, False),
        ("torchvision/vgg11", {}, False),
    ],
)
def test_batchnorm_is_told_of_a_model_and_its_args(name: str, args: dict[str, Any], answer: bool) -> None:
    assert facts(name, args)["has_batchnorm"] is answer


@pytest.mark.slow
def test_a_child_returns_results_and_passes_errors_on() -> None:
    function = "hpc_train.training.strategies.model_facts:answer"
    with one_child() as child:
        for name, args in (("timm/test_resnet", {}), ("timm/test_vit", {"depth": 2})):
            assert child.call(function, name, args, limit_s=HANG_LIMIT_S) == facts(name, args)
        with pytest.raises(ChildError, match="did you mean"):
            child.call(function, "timm/resnet19", {}, limit_s=HANG_LIMIT_S)


@pytest.mark.parametrize(
    ("name", "args", "size", "told"),
    [
        ("timm/test_vit", {}, 50, ("should be divisible by patch size", 160, False)),
        ("timm/test_vit", {}, 32, None),
        (VIT, {}, 32, ("doesn't match model (224)", 224, True)),
        (VIT, {"img_size": 32}, 32, None),
        ("torchvision/vgg11", {}, 8, ("Output size is too small", 224, False)),
    ],
)
def test_a_size_that_the_model_cannot_take_is_reported_with_one_that_it_takes(
    name: str, args: dict[str, Any], size: int, told: tuple[str, int, bool] | None
) -> None:
    found = facts(name, args, size)
    if told is None:
        assert "size_refusal" not in found
    else:
        assert told[0] in found["size_refusal"]
        assert (found["fitting_size"], found["takes_img_size"]) == told[1:]


def test_a_model_that_fails_at_its_own_size_too_is_refused_nothing() -> None:
    class Broken(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not on the meta device")

    assert _facts_of_size("timm/broken", Broken(), 32) == {}
