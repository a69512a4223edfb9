"""Depths of parameters: timm's own for timm's models, and by blocks for all others."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
from timm.optim import param_groups_layer_decay
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.training.models.blocks import find_blocks, layer_depths
from hpc_train.training.optimization import make_optimizer
from tests.models.factories import mlp

DECAY = 0.75


class Marked(nn.Module):
    """Says its depths itself."""

    def __init__(self, said: dict[str, int]) -> None:
        super().__init__()
        self.late, self.early = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.said = said

    def layer_depths(self) -> dict[str, int]:
        return self.said


class Blocky(nn.Module):
    """Something before, between and behind two blocks, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.between, self.two = (nn.Linear(2, 2, bias=False) for _ in range(4))
        self.head = nn.Linear(2, 2)
        self.head.weight = self.stem.weight

    def blocks(self) -> list[nn.Module]:
        return [self.one, self.two]


def depths_of(model: nn.Module) -> dict[str, int]:
    return layer_depths(model, find_blocks(model))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto"])
def test_rates_are_those_of_timms_layer_decay(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
    named = dict(model.named_parameters())
    config = OptimizerConfig(
        name="adamw", lr=0.5, weight_decay=0.1, layer_decay=DECAY, decay_norm_and_bias=False
    )
    ours = make_optimizer(config, named, 64, depths_of(model)).param_groups
    theirs = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=DECAY)
    expected = {id(p): (0.5 * g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
    found = {id(p): (g["lr"], g["weight_decay"]) for g in ours for p in g["params"]}
    assert found.keys() == expected.keys() == {id(p) for p in named.values()}
    assert all(found[key] == pytest.approx(expected[key], rel=1e-12) for key in expected)
    assert len({rate for rate, _ in found.values()}) > 4


def test_torchvisions_models_are_ordered_by_their_blocks() -> None:
    with torch.device("meta"):
        depths = depths_of(torchvision.models.get_model("vit_b_16", num_classes=10))
    assert (depths["class_token"], depths["conv_proj.weight"]) == (0, 0)
    layers = [depths[f"encoder.layers.encoder_layer_{i}.mlp.0.weight"] for i in range(12)]
    assert layers == list(range(1, 13))
    assert (depths["encoder.ln.weight"], depths["heads.head.bias"]) == (13, 13)


def test_what_is_between_blocks_belongs_to_the_next() -> None:
    depths = depths_of(Blocky())
    assert depths == {
        "stem.weight": 0, "one.weight": 1, "between.weight": 2, "two.weight": 2, "head.bias": 3
    }  # fmt: skip


def test_a_models_own_word_counts_first() -> None:
    said = {"late.weight": 1, "early.weight": 0, "gone.weight": 7}
    assert depths_of(Marked(said)) == {"late.weight": 1, "early.weight": 0}
    with pytest.raises(BadFileError, match=r"layer_decay: the model's .* omits early\.weight"):
        depths_of(Marked({"late.weight": 1}))


def test_a_model_of_which_nothing_tells_layers_is_refused() -> None:
    with pytest.raises(BadFileError, match=r"optimizer\.layer_decay: the layers of this model are unknown"):
        depths_of(mlp(10))
