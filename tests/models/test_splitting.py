from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.errors import BadFileError
from hpc_train.experiment.validate.model_rules import GPTArgs
from hpc_train.training.models import torchvision as torchvision_plugin
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.gpt import GPT
from hpc_train.training.models.splitting import Stage, most_stages, split_model

Make = Callable[[], nn.Module]


def _split(model: nn.Module, num_stages: int) -> list[Stage]:
    return split_model(model, find_blocks(model), num_stages)


def _images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def _tokens() -> Tensor:
    return torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(1))


def _gpt(*, tie_embeddings: bool = False, dropout: float = 0.0) -> nn.Module:
    return GPT(31, 16, GPTArgs(num_layers=4, dim=16, tie_embeddings=tie_embeddings, dropout=dropout))


def _llama() -> nn.Module:
    args = GPTArgs(style="llama", num_layers=4, dim=16, num_kv_heads=2, tie_embeddings=False)
    return GPT(31, 16, args)


def _tiny_vit(**args: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, num_classes=5, **args)


def _torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 16, 4, 3, 48, 96, dropout=0.1, num_classes=5)


class _Residual(nn.Module):
    def __init__(self, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(functional.relu(self.norm(self.linear(x))))


class _Outer(nn.Module):
    """Residual blocks and a head; subclasses say the forward."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Residual(dropout=dropout) for _ in range(num_blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Result = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]


def _own(**methods: Any) -> type[_Outer]:
    """Return a class like ``_Outer`` with these methods."""
    return type("_Own", (_Outer,), methods)


def _result(model: nn.Module, output: Tensor) -> Result:
    gradients = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return output.detach().clone(), gradients, {n: b.clone() for n, b in model.named_buffers()}


def _whole(model: nn.Module, inputs: Tensor) -> Result:
    output = model(inputs)
    output.square().sum().backward()
    return _result(model, output)


def _by_stages(model: nn.Module, stages: Sequence[Stage], inputs: Tensor) -> Result:
    """Run stages as a pipeline does: what each takes is cut off the graph of the one before."""
    values: tuple[Tensor, ...] = (inputs,)
    passes: list[tuple[dict[int, Tensor], tuple[Tensor, ...]]] = []
    for stage in stages:
        taken = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        gradients: dict[int, Tensor] = {}
        for i, value in enumerate(taken):
            if value.requires_grad:
                # A hook, since what arrives in .grad may be laid out, and then be added up, in another order.
                value.register_hook(partial(gradients.__setitem__, i))
        given = stage(*taken)
        values = given if isinstance(given, tuple) else (given,)
        passes.append((gradients, values))
    values[0].square().sum().backward()
    for (_, given), (gradients, _) in reversed(list(pairwise(passes))):
        torch.autograd.backward([given[i] for i in gradients], list(gradients.values()))
    return _result(model, values[0])


def _assert_same_numbers(model: nn.Module, stages: Sequence[Stage], inputs: Tensor) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for mode in (True, False):
        results = []
        for run in (_whole, lambda model, inputs: _by_stages(model, stages, inputs)):
            model.load_state_dict(before)
            model.zero_grad()
            for module in (model, *stages):
                module.train(mode)
            torch.manual_seed(3)
            results.append(run(model, inputs))
        (output, gradients, buffers), (output_2, gradients_2, buffers_2) = results
        assert torch.equal(output, output_2)
        for name in gradients:
            if gradients[name] is None:
                assert gradients_2[name] is None, name
            else:
                assert torch.equal(gradients[name], gradients_2[name]), name
        assert all(torch.equal(buffers[name], buffers_2[name]) for name in buffers)


def _assert_same_tensors(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Together the stages hold each name once, and it means the very tensor that it does in the model."""
    whole = model.state_dict(keep_vars=True)
    parts = [(name, value) for stage in stages for name, value in stage.state_dict(keep_vars=True).items()]
    assert sorted(name for name, _ in parts) == sorted(whole)
    assert all(value is whole[name] for name, value in parts)
    order = list(whole)
    for stage in stages:
        places = [order.index(name) for name in stage.state_dict()]
        assert places == sorted(places)


def _assert_is_cut(make: Make, inputs: Tensor, counts: Sequence[int]) -> None:
    torch.manual_seed(0)
    model = make()
    blocks = find_blocks(model)
    assert most_stages(model, blocks) >= max(counts)
    for num_stages in counts:
        stages = split_model(model, blocks, num_stages)
        assert len(stages) == num_stages
        assert all(set(stage.modules()) & set(blocks) for stage in stages)
        assert set(blocks) <= {module for stage in stages for module in stage.modules()}
        _assert_same_tensors(model, stages)
        _assert_same_numbers(model, stages, inputs)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_one_after_the_other_are_the_model(num_stages: int) -> None:
    _assert_is_cut(_Outer, torch.randn(3, 4), [num_stages])


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("make", [_gpt, _llama])
def test_the_language_model_is_cut(make: Make, num_stages: int) -> None:
    _assert_is_cut(make, _tokens(), [num_stages])


@pytest.mark.parametrize(
    "make", [lambda: _gpt(dropout=0.2), lambda: _Outer(dropout=0.3)], ids=["gpt", "residual"]
)
def test_dropout_draws_as_in_the_model(make: Make) -> None:
    model = make()
    inputs = _tokens() if isinstance(model, GPT) else torch.randn(3, 4)
    _assert_is_cut(make, inputs, [3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: _tiny_vit(drop_path_rate=0.2, drop_rate=0.1), 32),
        (lambda: timm.create_model("test_vit", num_classes=5), 160),
        (lambda: timm.create_model("convnext_atto", num_classes=5, drop_path_rate=0.2), 32),
        (lambda: timm.create_model("resnet18", num_classes=5), 32),
        (lambda: timm.create_model("eva02_tiny_patch14_224", img_size=28, embed_dim=48, num_classes=5), 28),
        (lambda: torchvision.models.get_model("resnet18", num_classes=5), 32),
        (_torchvision_vit, 32),
    ],
    ids=["vit_tiny", "test_vit", "convnext_atto", "resnet18", "eva02", "torchvision-resnet18", "vit_b"],
)
def test_timms_and_torchvisions_models_are_cut(make: Make, size: int) -> None:
    _assert_is_cut(make, _images(size), [2, 3, 4])


def test_a_model_without_repeated_blocks_is_cut_between_layers() -> None:
    def make() -> nn.Module:
        act = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
        layers = (nn.Linear(4, 8), act, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        return nn.Sequential(*layers)

    model = make()
    stages = split_model(model, [], 3)
    _assert_same_tensors(model, stages)
    _assert_same_numbers(model, stages, torch.randn(3, 4))


def test_parameters_are_balanced() -> None:
    model = nn.Sequential(*(_Residual(width) for width in (9, 1, 1, 1, 8)))
    sizes = [[name.partition(".")[0] for name in stage.state_dict()] for stage in _split(model, 2)]
    assert [set(names) for names in sizes] == [{"0"}, {"1", "2", "3", "4"}]
    model = nn.Sequential(*(_Residual(4) for _ in range(6)))
    assert [sum(p.numel() for p in stage.parameters()) for stage in _split(model, 3)] == [56, 56, 56]


def test_what_is_large_outside_of_blocks_does_not_leave_a_stage_without_one() -> None:
    model = _Outer(num_blocks=3)
    model.head = nn.Linear(4, 1000)
    stages = split_model(model, list(model.layers), 3)
    assert [len([m for m in stage.modules() if isinstance(m, _Residual)]) for stage in stages] == [1, 1, 1]


@pytest.mark.slow
def test_a_stage_keeps_no_other_stages_tensors_alive() -> None:
    model = _gpt()
    stages = _split(model, 2)
    last = weakref.ref(stages[1].get_parameter("head.weight"))
    first = stages[0]
    del model, stages
    gc.collect()
    assert last() is None
    first(_tokens())


def test_a_model_on_the_meta_device_is_cut() -> None:
    with torch.device("meta"):
        model = _gpt()
    stages = _split(model, 4)
    assert all(tensor.is_meta for stage in stages for tensor in stage.state_dict().values())
    _assert_same_tensors(model, stages)


class _Several(_Outer):
    """What the stem makes is used by each block, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
        self.unused = nn.Linear(2, 2)
        self.alias = self.stem

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        if factor is not None:
            x = x * factor
        stem = self.stem(x)
        x = stem
        for layer in self.layers:
            x = layer(x) + stem * (self.scale + 1)
        return self.head(x)


def test_several_tensors_may_pass() -> None:
    _assert_is_cut(_Several, torch.randn(3, 4), [2, 3])
    model = _Several()
    stages = _split(model, 2)
    assert len(stages[0](torch.randn(3, 4))) == 2
    assert "unused.weight" in stages[1].state_dict()
    assert "alias.weight" in stages[0].state_dict()
    assert all("scale" in dict(stage.named_buffers()) for stage in stages)


class _DropsBetween(_Outer):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.dropout(layer(x), 0.5, training=self.training)
        return self.head(x)


def test_a_constant_of_the_mode_is_right_in_both() -> None:
    _assert_is_cut(_DropsBetween, torch.randn(3, 4), [2])


def test_the_mode_of_each_module_stays() -> None:
    model = _Outer()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    _split(model, 2)
    assert [module.training for module in model.modules()] == before


def test_hooks_of_the_model_are_called() -> None:
    model = torchvision.models.VisionTransformer(32, 16, 2, 3, 48, 96, num_classes=5)
    model.register_forward_pre_hook(torchvision_plugin._repeat_grey)
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    _assert_same_numbers(model, _split(model, 2), _images(32, channels=1))


class _Stage(nn.Module):
    """Holds blocks, and does what can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() > -1e9 else x
        return x


class _OfStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Stage() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_what_can_not_be_traced_stays_whole() -> None:
    model = _OfStages()
    blocks = [layer for part in model.parts for layer in part.layers]
    stages = split_model(model, blocks, 2)
    _assert_same_tensors(model, stages)
    _assert_same_numbers(model, stages, torch.randn(3, 4))
    with pytest.raises(BadFileError, match=r"parallel\.pipeline: .* write at most 2|other than tensors"):
        split_model(model, blocks, 3)


class _ByParts(_Outer):
    """Says its parts, since its forward can't be traced."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if x.sum() > -1e9 else x

    def pipeline_parts(self) -> list[nn.Module]:
        return [*self.layers, self.head]


def test_a_models_own_parts_are_taken() -> None:
    _assert_is_cut(_ByParts, torch.randn(3, 4), [2, 4])


class _LeavesOneOut(_ByParts):
    def pipeline_parts(self) -> list[nn.Module]:
        return [*self.layers[1:], self.head]


class _LeavesOutAFrozenOne(_LeavesOneOut):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def test_parts_may_omit_what_is_not_trained() -> None:
    first, last = _split(_LeavesOutAFrozenOne(), 2)
    assert "layers.1.linear.weight" in first.state_dict()
    assert "layers.0.linear.weight" in last.state_dict(), "the last has what no step uses"


_Branches = _own(forward=lambda m, x: _Outer.forward(m, x) if x.sum() > 0 else x)
_OtherInTraining = _own(forward=lambda m, x: _Outer.forward(m, x + 1 if m.training else x))
_DrawsNoise = _own(forward=lambda m, x: _Outer.forward(m, x * torch.rand(4)))
_TellsStrangers = _own(pipeline_parts=lambda m: [nn.Linear(4, 2)])
_TellsNames = _own(pipeline_parts=lambda m: ["layers.0", "head"])


class _SkipsLayers(_Outer):
    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x) if random.random() < 2 else x
        return self.head(x)


class _PassesSizes(_Outer):
    def forward(self, x: Tensor) -> Any:
        size = x.shape[0]
        for layer in self.layers:
            x = layer(x).reshape(size, 4)
        return self.head(x)


class _PassesSizesOfMethods(_Outer):
    def forward(self, x: Tensor) -> Any:
        size = x.size(0)
        for layer in self.layers:
            x = layer(x).reshape(size, 4)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "num_stages", "words"),
    [
        (_Branches, 2, "model.name: .*control flow.*; give its class a method pipeline_parts()"),
        (_OtherInTraining, 2, "model.name: .*between training and evaluation"),
        (_SkipsLayers, 2, "model.name: .*random numbers"),
        (_DrawsNoise, 2, "model.name: .*does not depend on the batch"),
        (_PassesSizes, 2, "model.name: .*other than tensors"),
        (_PassesSizesOfMethods, 2, "model.name: .*other than tensors"),
        (_TellsStrangers, 2, r"model.name: pipeline_parts\(\) returned a Linear that is not one of its"),
        (_TellsNames, 2, r"model.name: pipeline_parts\(\) returned a list with a str in it; write"),
        (_LeavesOneOut, 2, r"model.name: .*pipeline_parts\(\) returned holds layers.0\S*, which would not"),
        (_Outer, 5, "parallel.pipeline: 5 stages .* has 4; write at most 4"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), 2, "parallel.pipeline: .* has 1; write another"),
        (lambda: _gpt(tie_embeddings=True), 2, "model.name: .*token_embedding.* and head.* .*tie_embeddings"),
    ],
)
def test_what_can_not_be_cut_is_refused(make: Make, num_stages: int, words: str) -> None:
    model = make()
    before = set(vars(model))
    with pytest.raises(BadFileError, match=words):
        _split(model, num_stages)
    assert set(vars(model)) == before
    assert most_stages(model, find_blocks(model)) < num_stages


def test_tied_tensors_within_one_stage_are_no_matter() -> None:
    def make() -> nn.Module:
        model = _Outer()
        model.layers[1].linear.weight = model.layers[0].linear.weight
        return model

    _assert_is_cut(make, torch.randn(3, 4), [2, 3])
    with pytest.raises(BadFileError, match=r"layers\.0\.linear\.weight and layers\.1\.linear\.weight"):
        _split(make(), 4)
