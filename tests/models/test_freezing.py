from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.fine_tuning import freeze, prepare_for_training, selected

NAMES = ["stem.weight", "layer1.0.weight", "layer1.0.bias", "layer10.0.weight", "head.weight", "head.bias"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.Flatten(), nn.Linear(144, 2))


def frozen(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not value.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["layer1.*"], {"layer1.0.weight", "layer1.0.bias"}),
        (["*.bias", "stem*"], {"layer1.0.bias", "head.bias", "stem.weight"}),
        (["!head.*", "*"], {"stem.weight", "layer1.0.weight", "layer1.0.bias", "layer10.0.weight"}),
        (["layer?.0.weight"], {"layer1.0.weight"}),
    ],
)
def test_patterns_select_names(patterns: list[str], found: set[str]) -> None:
    assert selected(NAMES, patterns, "model.freeze") == found


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        ("layr1.*", "did you mean 'layer1.*'?"),
        ("!haed.weight", "did you mean 'head.weight'?"),
        ("xyz.*", "their names begin with head, layer1, layer10, stem"),
    ],
)
def test_a_pattern_without_a_match_is_named_with_what_is_close(pattern: str, remedy: str) -> None:
    with pytest.raises(BadFileError) as error:
        selected(NAMES, ["stem.*", pattern], "model.freeze")
    assert str(error.value) == f"model.freeze: '{pattern}' matches no parameter of the model; {remedy}"


def test_batchnorm_whose_parameters_are_frozen_stays_in_evaluation_mode() -> None:
    model = network()
    freeze(model, ["0.*", "1.*"])
    for each in (model, copy.deepcopy(model)):
        each.train()
        assert [layer.training for layer in each] == [True, False, True, True, True]
        assert frozen(each) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    copied = copy.deepcopy(model)
    copied[1].training = True
    copied.train(False)
    assert copied[1].training and not model[1].training, "the copy's own"


@pytest.mark.parametrize(
    ("pattern", "parameters", "is_training"),
    [("1.weight", {"1.weight"}, [True, True]), ("2.*", set(), [True, False])],
    ids=["partly trained", "named by its statistics"],
)
def test_batchnorm_is_in_evaluation_mode_only_if_nothing_of_it_is_trained(
    pattern: str, parameters: set[str], is_training: list[bool]
) -> None:
    model = network()
    freeze(model, [pattern])
    assert frozen(model) == parameters
    assert [layer.training for layer in model.train()[1:3]] == is_training


def test_a_shared_parameter_is_frozen_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model.add_module("other", nn.Linear(3, 3))
    model["head"].weight = model["embedding"].weight
    freeze(model, ["head.*"])
    assert frozen(model) == {"embedding.weight"}


def test_something_must_be_trained() -> None:
    with pytest.raises(BadFileError, match=r"^model.freeze: leaves no parameter to train; exclude some"):
        freeze(network(), ["*"])


def test_a_new_head_may_not_be_frozen_at_random_values(tmp_path: Path) -> None:
    def config(*patterns: str, **keys: str) -> ModelConfig:
        return ModelConfig(name="tests.models.factories:mlp", freeze=list(patterns), **keys)

    weights = build_model(config(), DataInfo(5, 3, (0.5,) * 3, (0.5,) * 3)).state_dict()
    save_file(weights, tmp_path / "w.safetensors")
    info = DataInfo(7, 3, (0.5,) * 3, (0.5,) * 3)
    given = config(pretrained=str(tmp_path / "w.safetensors"))
    prepare_for_training(build_model(given, info), config("1.*"))
    with pytest.raises(BadFileError, match=r"^model.freeze: 3.bias would be frozen at random values.*'!3\*'"):
        prepare_for_training(build_model(given, info), config("3.*"))
