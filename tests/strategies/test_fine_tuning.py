"""Frozen parameters and rates by pattern under the strategies, against a bare loop of plain PyTorch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.random_numbers import seed_build, seed_forward
from hpc_train.training.models.building import build_model
from tests.parallelism.batches import INFO, micro_batch
from tests.parallelism.cases import RESNET, SGD, STEPS, VIT, Case, Choice, Shape
from tests.parallelism.training import Trained, train
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

#: Of both models: whole layers, with their BatchNorm, and parts of others.
FROZEN = "*1.*"
CONSTANT = "optimization.schedule={name: constant}"
GROUPS = (
    "optimization.optimizer={name: sgd, lr: 0.002, momentum: 0.9, weight_decay: 0.01, groups: ["
    '{match: ["head.*", "fc.*"], lr_factor: 10}, '
    '{match: ["*.bias"], lr_factor: 0.5, weight_decay: 0}]}'
)


def case(strategy: str, model: str, shape: Shape, *overrides: str) -> Case:
    model_without_head = GROUPS.replace('"head.*", "fc.*"', '"head.*"' if model == VIT else '"fc.*"')
    given = ("precision=fp64", CONSTANT, f'model.freeze=["{FROZEN}"]', model_without_head, *overrides)
    return Case(strategy, shape, (Choice("model", (model,)), Choice("rest", given)))


def train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, micro_batches: int) -> None:
    for step in range(STEPS):
        for number in range(micro_batches):
            seed_forward(seed, step, number, torch.device("cpu"))
            images, classes = micro_batch(step, number)
            (functional.cross_entropy(model(images), classes) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def bare_loop(config: Experiment, micro_batches: int) -> dict[str, Tensor]:
    """Train as the file says, by hand; return parameters and buffers."""
    seed_build(config.seed)
    model = build_model(config.model, INFO).double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not fnmatchcase(name, FROZEN))
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and not layer.weight.requires_grad:
            layer.eval()
    optimizer = torch.optim.SGD(_groups(model), momentum=0.9)
    train_by_hand(model, optimizer, config.seed, micro_batches)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    head = [value for name, value in trained if name.startswith(("head.", "fc."))]
    bias = [v for name, v in trained if name.endswith(".bias") and not any(v is each for each in head)]
    known = {id(value) for value in (*head, *bias)}
    rest = [value for _, value in trained if id(value) not in known]
    return [
        {"params": head, "lr": 0.02, "weight_decay": 0.01},
        {"params": bias, "lr": 0.001, "weight_decay": 0.0},
        {"params": rest, "lr": 0.002, "weight_decay": 0.01},
    ]


@pytest.mark.parametrize(
    ("strategy", "model", "shape", "overrides"),
    [
        pytest.param("ddp", RESNET, Shape(1, 2), (), marks=pytest.mark.soak),
        ("ddp", RESNET, Shape(2, 4), ("optimization.ema={decay: 0.9}",)),
        ("ddp", VIT, Shape(2, 4), ("activation_checkpointing=blocks",)),
        pytest.param("zero1", VIT, Shape(2, 4), (), marks=pytest.mark.soak),
        ("fsdp", VIT, Shape(2, 4), ("optimization.ema={decay: 0.9}",)),
        ("tensor", VIT, Shape(2, 4), ("parallel.tensor=2",)),
        ("pipeline", RESNET, Shape(2, 4), ()),
    ],
    ids=["one rank", "ddp", "activation checkpointing", "zero1", "fsdp", "tensor", "pipeline"],
)
def test_frozen_layers_and_rates_equal_plain_pytorch(
    strategy: str, model: str, shape: Shape, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    given = case(strategy, model, shape, *overrides)
    results: list[Trained] = run_ranks(shape.ranks, train, given, folder=tmp_path)
    expected = bare_loop(given.experiment, shape.micro_batches)
    seed_build(given.experiment.seed)
    before = build_model(given.experiment.model, INFO).double().state_dict()
    kept = [name for name in expected if torch.equal(expected[name], before[name])]
    assert any(name.endswith("running_var") for name in kept) == (model == RESNET)
    for name, value in results[0].weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=lambda m: f"{name}: {m}")
        if name in kept:
            assert torch.equal(value, before[name]), name
            assert not results[0].average or torch.equal(results[0].average[name], before[name]), name


def test_synchronized_batchnorm_leaves_frozen_layers_alone(tmp_path: Path) -> None:
    given = case("ddp", RESNET, Shape(2, 4), "parallel.sync_batchnorm=true")
    (one, _) = run_ranks(2, train, given, folder=tmp_path)
    seed_build(given.experiment.seed)
    before = build_model(given.experiment.model, INFO).double().state_dict()
    assert torch.equal(one.weights["bn1.running_mean"], before["bn1.running_mean"])
    assert not torch.equal(one.weights["layer2.0.bn2.running_mean"], before["layer2.0.bn2.running_mean"])


LORA = 'model.lora={rank: 2, targets: ["*.attn.qkv", "*.fc?"], alpha: 3, also_train: ["head.*"]}'


class PlainLora(nn.Module):
    """An adapter by hand, around the layer."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.scale * (x @ self.lora_a.T @ self.lora_b.T)
        return out


def bare_lora(config: Experiment, micro_batches: int) -> dict[str, Tensor]:
    """Train adapters by hand; return all tensors under the names that ours have."""
    seed_build(config.seed)
    model = build_model(config.model, INFO).requires_grad_(False)
    for name, layer in sorted(model.named_modules()):
        if isinstance(layer, nn.Linear) and (name.endswith(("attn.qkv", "fc1", "fc2"))):
            model.set_submodule(name, PlainLora(layer, 2, 1.5))
    model.double().train().get_submodule("head").requires_grad_(True)
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.002, momentum=0.9, weight_decay=0.01)
    train_by_hand(model, optimizer, config.seed, micro_batches)
    return {name.replace(".layer.", "."): value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        pytest.param("ddp", Shape(1, 2), marks=pytest.mark.soak),
        pytest.param("ddp", Shape(2, 4), marks=pytest.mark.soak),
        pytest.param("zero1", Shape(2, 4), marks=pytest.mark.soak),
        ("fsdp", Shape(2, 4)),
        ("pipeline", Shape(2, 4)),
    ],
    ids=["one rank", "ddp", "zero1", "fsdp", "pipeline"],
)
def test_adapters_equal_plain_pytorch(strategy: str, shape: Shape, tmp_path: Path) -> None:
    rest = Choice("rest", ("precision=fp64", CONSTANT, SGD, LORA))
    given = Case(strategy, shape, (Choice("model", (VIT,)), rest))
    results: list[Trained] = run_ranks(shape.ranks, train, given, folder=tmp_path)
    expected = bare_lora(given.experiment, shape.micro_batches)
    assert results[0].weights.keys() == expected.keys()
    assert expected["blocks.0.attn.qkv.lora_b"].abs().max() > 1e-4
    for name, value in results[0].weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=lambda m: f"{name}: {m}")
