from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.config.training_sections import OptimizerConfig
from hpc_train.errors import BadFileError
from hpc_train.training.optimization import make_optimizer, matched_groups

DEPTHS = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def made(target: nn.Module, depths: dict[str, int] | None = None, **keys: Any) -> torch.optim.Optimizer:
    config = OptimizerConfig(**{"name": "adamw", "lr": 0.1, **keys})
    return make_optimizer(config, dict(target.named_parameters()), 64, depths, matched_groups(config, target))


def settings(target: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(value): name for name, value in target.named_parameters()}
    return {
        names[id(value)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for value in group["params"]
    }


def test_the_first_group_that_matches_applies() -> None:
    groups = [{"match": ["1.*"], "lr_factor": 10.0}, {"match": ["*.bias"], "weight_decay": 0.0}]
    found = settings(target := model(), made(target, weight_decay=0.3, groups=groups))
    assert found == {
        "0.weight": (0.1, 0.3),
        "0.bias": (0.1, 0.0),
        "1.weight": (1.0, 0.3),
        "1.bias": (1.0, 0.3),
    }


def test_a_groups_factor_multiplies_its_layers_rate() -> None:
    groups = [{"match": ["*.bias"], "lr_factor": 2.0, "weight_decay": 0.5}]
    optimizer = made(target := model(), DEPTHS, layer_decay=0.5, groups=groups)
    rates = {name: lr for name, (lr, _) in settings(target, optimizer).items()}
    assert rates == {"1.bias": 0.2, "1.weight": 0.1, "0.bias": 0.1, "0.weight": 0.05}


def test_norms_and_biases_that_do_not_decay_stay_so_in_a_group() -> None:
    groups = [{"match": ["1.*"], "weight_decay": 0.5}]
    optimizer = made(target := model(), decay_norm_and_bias=False, groups=groups)
    found = settings(target, optimizer)
    assert (found["1.weight"][1], found["1.bias"][1]) == (0.5, 0.0)


def test_a_shared_parameter_is_matched_by_any_of_its_names() -> None:
    target = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    target["head"].weight = target["embedding"].weight
    config = OptimizerConfig(name="adamw", lr=0.1, groups=[{"match": ["head.*"]}])
    assert matched_groups(config, target) == {"embedding.weight": 0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"groups": [{"match": ["0.*"]}, {"match": ["2.*"]}]},
            "optimization.optimizer.groups[1].match: '2.*' matches no trained parameter of the model; did",
        ),
        (
            {"name": "Rprop", "groups": [{"match": ["0.*"], "weight_decay": 0.1}]},
            "optimization.optimizer.groups[0].weight_decay: Rprop has none; omit it",
        ),
    ],
)
def test_mistakes_are_named_with_their_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFileError) as error:
        made(model(), **keys)
    assert str(error.value).startswith(message)


def test_a_pattern_of_frozen_parameters_alone_is_a_mistake() -> None:
    target = model()
    target[0].requires_grad_(False)
    with pytest.raises(BadFileError, match=r"'0\.\*' matches no trained parameter"):
        made(target, groups=[{"match": ["0.*"]}])
