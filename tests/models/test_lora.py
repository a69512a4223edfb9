from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import LoraConfig, ModelConfig
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.building import build_model
from hpc_train.training.models.fine_tuning import LoraLinear, add_lora, freeze, merged, prepare_for_training
from tests.models.test_freezing import frozen


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4), "head": nn.Linear(4, 3)})


def adapted(model: nn.Module | None = None, **keys: Any) -> nn.Module:
    model = model or network()
    add_lora(model, LoraConfig(**{"rank": 2, "targets": ["up"], **keys}))
    return model


def test_the_model_computes_the_same_until_it_is_trained() -> None:
    plain, model, x = network(), adapted(), torch.rand(5, 4)
    assert torch.equal(model["up"](x), plain["up"](x))
    assert frozen(model) == {f"{name}.{key}" for name in ("up", "down", "head") for key in ("weight", "bias")}
    assert model["up"].lora_a.shape == (2, 4) and model["up"].lora_b.shape == (6, 2)
    assert model["up"].lora_a.abs().max() > 0


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (16.0, 8.0)])
def test_merged_weights_compute_what_the_adapter_does(alpha: float | None, scale: float) -> None:
    model, x = adapted(alpha=alpha, targets=["up", "down"]).double(), torch.rand(5, 4, dtype=torch.float64)
    for name in ("up", "down"):
        nn.init.normal_(model[name].lora_b)
    tensors = model.state_dict()
    plain = merged({name: (lambda value=value: value) for name, value in tensors.items()}, scale)
    assert plain.keys() == network().state_dict().keys()
    expected = functional.linear(x, plain["up.weight"](), tensors["up.bias"])
    torch.testing.assert_close(model["up"](x), expected, rtol=0, atol=1e-12)
    assert (expected - functional.linear(x, tensors["up.weight"], tensors["up.bias"])).abs().max() > 0.01


def trained(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


def test_a_head_of_the_file_is_trained_too_and_patterns_of_freeze_do_not_match_adapters() -> None:
    model = adapted(also_train=["head.*"])
    assert trained(model) == {"up.lora_a", "up.lora_b", "head.weight", "head.bias"}
    freeze(model, ["*", "!head.weight"])
    assert trained(model) == {"up.lora_a", "up.lora_b", "head.weight"}
    with pytest.raises(BadFileError, match=r"^model.freeze: '\*.lora_a' matches no parameter"):
        freeze(model, ["*.lora_a"])


def test_batchnorm_whose_parameters_are_frozen_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    lora = {"rank": 1, "targets": ["0"], "also_train": ["2.weight"]}
    prepare_for_training(model, ModelConfig.model_validate({"name": "m:f", "lora": lora}))
    model.train()(torch.rand(5, 4))
    assert [layer.training for layer in model] == [True, False, True, True]
    assert not model[1].running_mean.any() and model[2].running_mean.any()


class Reading(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.qkv.weight)


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize(
    ("model", "target", "why"),
    [
        (nn.MultiheadAttention(4, 2), "out_proj", "it is a NonDynamicallyQuantizableLinear, not an nn"),
        (nn.Sequential(Reading()), "0.qkv", "Reading reads its weight without calling it"),
        (nn.TransformerEncoderLayer(4, 2), "linear1", "TransformerEncoderLayer reads its weight without"),
        (tied(), "head", "its weight is shared (embedding.weight, head.weight)"),
    ],
)
def test_layers_whose_forward_is_not_called_are_refused(model: nn.Module, target: str, why: str) -> None:
    with pytest.raises(BadFileError, match=rf"model.lora.targets: {target} can't .*: {re.escape(why)}"):
        adapted(model, targets=[target])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"targets": ["upp"]},
            "model.lora.targets: 'upp' matches no linear layer of the model; did you mean",
        ),
        ({"also_train": ["haed.*"]}, "model.lora.also_train: 'haed.*' matches no parameter"),
    ],
)
def test_patterns_without_a_match_are_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BadFileError, match=re.escape(message)):
        adapted(**keys)


def test_a_new_head_must_be_trained(tmp_path: Any) -> None:
    def model(classes: int, **keys: Any) -> nn.Module:
        config = ModelConfig(name="tests.models.factories:mlp", **keys)
        made = build_model(config, DataInfo(classes, 3, (0.5,) * 3, (0.5,) * 3))
        prepare_for_training(made, config)
        return made

    save_file(model(5).state_dict(), path := tmp_path / "w.safetensors")
    lora = {"rank": 1, "targets": ["1"]}
    with pytest.raises(BadFileError, match=r"^model.lora: 3.bias would be frozen .*add '3\*' to also_train"):
        model(7, pretrained=str(path), lora=lora)
    assert isinstance(model(7, pretrained=str(path), lora=lora | {"also_train": ["3*"]})[1], LoraLinear)
