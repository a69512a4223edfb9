from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import OptimizerConfig
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.optimization import Optimization, make_optimizer, matched_groups
from tests.forwards import optimizer_step
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def optimizer(
    name: str = "adamw", target: nn.Module | None = None, depths: dict[str, int] | None = None, **keys: Any
) -> torch.optim.Optimizer:
    target = model() if target is None else target
    config = OptimizerConfig(**{"name": name, "lr": 0.1, **keys})
    return make_optimizer(config, dict(target.named_parameters()), 64, depths, matched_groups(config, target))


def optimization(target: nn.Module, precision: str = "fp32", lr: float = 0.1) -> Optimization:
    made = make_optimizer(OptimizerConfig(name="sgd", lr=lr), dict(target.named_parameters()), 64)
    return Optimization(made, lambda step: 1.0, choose_precision(precision, CPU), CPU)


def scaler_state(owned: Optimization) -> dict[str, Any]:
    assert owned.scaler is not None
    return owned.scaler.state_dict()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", "torch.optim.sgd.SGD"),
        ("AdamW", "torch.optim.adamw.AdamW"),
        ("torch/adam", "torch.optim.adam.Adam"),
        ("lamb", "timm.optim.lamb.Lamb"),
        ("timm/sgd", "torch.optim.sgd.SGD"),
        ("timm/adamwlegacy", "timm.optim.adamw.AdamWLegacy"),
    ],
)
def test_names_are_torchs_classes_or_else_timms(name: str, kind: str) -> None:
    found = type(optimizer(name))
    assert f"{found.__module__}.{found.__qualname__}" == kind


@pytest.mark.parametrize("name", ["sgd", "AdamW", "torch/adam"])
@pytest.mark.parametrize("keys", [{}, {"args": {"fused": False}}, {"args": {"foreach": True}}])
def test_one_kernel_updates_all_parameters_unless_the_file_chooses(name: str, keys: dict[str, Any]) -> None:
    is_fused = optimizer(name, **keys).defaults["fused"]
    assert bool(is_fused) == (not keys)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_updates_equal_those_one_by_one(name: str) -> None:
    given = {"weight_decay": 0.1} | ({"momentum": 0.9} if name == "sgd" else {})
    trained = []
    for args in ({}, {"fused": False, "foreach": False}):
        target = model().double()
        made = optimizer(name, target, args=args, **given)
        for _ in range(5):
            target(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
            made.step()
            made.zero_grad()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in target.parameters()]))
    torch.testing.assert_close(*trained, rtol=0, atol=1e-12)


def test_sparse_gradients_are_not_given_to_kernels_that_refuse_them() -> None:
    target = nn.Embedding(4, 2, sparse=True)
    named = dict(target.named_parameters())
    made = make_optimizer(OptimizerConfig(name="sgd", lr=0.1), named, 64, may_fuse=False)
    target(torch.tensor([1])).sum().backward()
    made.step()


def test_fused_sgd_is_refused_where_steps_are_skipped_inside_it() -> None:
    config = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, args={"fused": True})
    with pytest.raises(BadFileError, match=r"optimizer\.args\.fused: .* fp16"):
        make_optimizer(config, dict(model().named_parameters()), 64, may_fuse=False)


@pytest.mark.slow
def test_torchs_optimizers_need_no_timm() -> None:
    code = (
        "import sys; from hpc_train.training import optimization as o; "
        "o._find('adamw'); o._find('torch/sgd'); "
        "sys.exit('timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("sgd", {}, {"momentum": 0, "nesterov": False}),
        ("timm/sgd", {}, {"momentum": 0.9, "nesterov": True}),
        ("timm/adamwlegacy", {}, {"weight_decay": 0.01}),
        ("timm/adamwlegacy", {"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ("adamw", {"args": {"betas": [0.8, 0.9]}}, {"betas": (0.8, 0.9)}),
        ("sgd", {"lr_per_batch": 256}, {"lr": pytest.approx(0.1 * 64 / 256)}),
    ],
)
def test_values_are_the_files_or_librarys(name: str, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    (group,) = optimizer(name, **keys).param_groups
    assert {key: group[key] for key in expected} == expected


def test_norms_and_biases_need_not_decay() -> None:
    target = model()
    groups = optimizer("sgd", target, weight_decay=0.5, decay_norm_and_bias=False).param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert [id(p) for p in groups[0]["params"]] == [id(target[0].weight), id(target[2].weight)]
    assert len(groups[1]["params"]) == 4


def test_frozen_parameters_are_excluded() -> None:
    target = model()
    target[0].requires_grad_(False)
    assert len(optimizer("sgd", target).param_groups[0]["params"]) == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "adamx"}, "optimizer.name: there is no optimizer 'adamx'; did you mean"),
        ({"name": "torch/adamv"}, "did you mean torch/adam"),
        ({"name": "timm/lam"}, "did you mean timm/lamb"),
        ({"name": "jax/sgd"}, "optimizer.name: there is no optimizer 'jax/sgd'"),
        ({"name": "lbfgs"}, "optimizer.name: lbfgs evaluates the loss several .*; write adamw$"),
        ({"name": "SparseAdam"}, "optimizer.name: SparseAdam supports sparse gradients only.*; write adam$"),
        ({"name": "torch/sparseadam"}, "optimizer.name: torch/sparseadam supports sparse gradients only"),
        ({"name": "adahessian"}, "optimizer.name: adahessian needs second derivatives.*; write adamw"),
        ({"name": "timm/kronw"}, "optimizer.name: timm/kronw keeps lists of tensors.*; write adamw"),
        ({"name": "torch/sparseadm"}, "there is no optimizer 'torch/sparseadm'; (?!.*sparseadam)"),
        ({"name": "timm/krom"}, "there is no optimizer 'timm/krom'; (?!.*kron)"),
        ({"name": "adamw", "momentum": 0.9}, "optimizer.momentum: adamw has no momentum"),
        ({"name": "rprop", "weight_decay": 0.1}, "optimizer.weight_decay: rprop has no weight_decay"),
        ({"name": "rprop", "decay_norm_and_bias": False}, "optimizer.decay_norm_and_bias: rprop"),
        ({"name": "sgd", "args": {"nestrov": True}}, "no argument 'nestrov'; did you mean 'nesterov'"),
        ({"name": "sgd", "args": {"lr": 1}}, "optimizer.args.lr: .*; write optimization.optimizer.lr$"),
        ({"name": "sgd", "args": {"nesterov": True}}, "optimizer.args: .* be built: ValueError: Nesterov"),
        ({"name": "adamw", "args": {"betas": [0.9]}}, "optimizer.args: adamw can't be built: IndexError: "),
        ({"name": "adamw", "args": {"betas": [2, 3]}}, "optimizer.args: .*built: ValueError: Invalid beta"),
        ({"groups": [{"match": ["0.*"]}, {"match": ["3.*"]}]}, r"groups\[1\].match: '3.\*' matches no .*did"),
        (
            {"name": "Rprop", "groups": [{"match": ["0.*"], "weight_decay": 0.1}]},
            r"optimizer.groups\[0\].weight_decay: Rprop has no weight_decay; take it out",
        ),
    ],
)
def test_mistakes_are_named_with_their_key(keys: Any, message: str) -> None:
    with pytest.raises(BadFileError, match=rf"^optimization\..*{message}"):
        optimizer(**keys)


DEPTHS = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "1.bias": 1, "2.weight": 2, "2.bias": 2}


def layered(target: nn.Module, name: str = "adamw", **keys: Any) -> torch.optim.Optimizer:
    return optimizer(name, target, DEPTHS, layer_decay=0.5, **keys)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_each_layer_has_its_own_rate_the_last_one_first(name: str) -> None:
    target = model()
    groups = layered(target, name, lr_per_batch=128).param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.05, 0.025, 0.0125])
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(p) for p in target[place].parameters()] for place in (2, 1, 0)
    ]


def test_layers_are_crossed_with_what_does_not_decay() -> None:
    groups = layered(model(), weight_decay=0.3, decay_norm_and_bias=False).param_groups
    found = [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
    assert found == [(0.1, 0.3, 1), (0.1, 0.0, 1), (0.05, 0.0, 2), (0.025, 0.3, 1), (0.025, 0.0, 1)]


def test_a_frozen_head_leaves_the_rates_below_it() -> None:
    target = model()
    target[2].requires_grad_(False)
    made = layered(target)
    assert [group["lr"] for group in made.param_groups] == [0.05, 0.025]
    owned = Optimization(made, lambda step: 0.5, choose_precision("fp32", CPU), CPU)
    assert owned.set_learning_rate(0) == 0.05, "the file's at its peak, 0.1, halved by the schedule"
    assert [group["lr"] for group in made.param_groups] == [0.025, 0.0125]


def test_clipping_under_fp16_sees_the_true_gradient() -> None:
    target = model()
    owned = optimization(target, "fp16")
    owned.scale(target(torch.ones(1, 4)).sum()).backward()
    norm = optimizer_step(owned, lambda: nn.utils.clip_grad_norm_(target.parameters(), 1e9))
    same = model()
    same(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in same.parameters()]))


def test_an_overflow_under_fp16_skips_the_step_and_halves_the_scale() -> None:
    target = model()
    assert optimization(target, "bf16").scaler is None
    owned = optimization(target, "fp16")
    before = [p.detach().clone() for p in target.parameters()]
    owned.scale(target(torch.ones(1, 4)).sum() * float("inf")).backward()
    norm = optimizer_step(owned, lambda: nn.utils.clip_grad_norm_(target.parameters(), 1.0))
    assert norm is not None and not norm.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), before, strict=True))
    assert scaler_state(owned)["scale"] == 2.0**15
    owned.scale(target(torch.ones(1, 4)).sum()).backward()
    optimizer_step(owned)
    assert not torch.equal(next(target.parameters()), before[0])
    assert scaler_state(owned) | {"_growth_tracker": 1} == scaler_state(owned)


def test_a_loaded_loss_scale_is_what_the_next_backward_uses() -> None:
    target = model()
    owned = optimization(target, "fp16")
    assert owned.scaler is not None
    owned.scaler.load_state_dict(scaler_state(owned) | {"scale": 8.0})
    inputs = torch.ones(1, 4)
    owned.scale(target(inputs).sum()).backward()
    scaled = next(target.parameters()).grad
    same = model()
    same(inputs).sum().backward()
    torch.testing.assert_close(scaled, next(same.parameters()).grad * 8)


@pytest.mark.slow
def test_an_overflow_in_one_ranks_shard_skips_the_step_on_all(tmp_path: Path) -> None:
    for rank_with_inf in (0, 1):
        results = run_ranks(2, _sharded_overflow, rank_with_inf, folder=tmp_path)
        assert results == [{"same": True, "scale": 2.0**15, "moved_after": True}] * 2


def _sharded_overflow(rank: int, world_size: int, rank_with_inf: int) -> dict[str, Any]:
    target = model()
    fully_shard(target, mesh=init_device_mesh("cpu", (world_size,)))
    owned = optimization(target, "fp16")
    before = _shards(target)
    owned.scale(target(torch.ones(1, 4)).sum()).backward()
    if rank == rank_with_inf:
        target[0].weight.grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr]
    optimizer_step(owned, lambda: nn.utils.clip_grad_norm_(target.parameters(), 1.0).full_tensor())  # type: ignore[attr-defined]
    same = all(torch.equal(a, b) for a, b in zip(_shards(target), before, strict=True))
    scale = scaler_state(owned)["scale"]
    owned.scale(target(torch.ones(1, 4)).sum()).backward()
    optimizer_step(owned)
    return {"same": same, "scale": scale, "moved_after": not torch.equal(_shards(target)[0], before[0])}


def _shards(target: nn.Module) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in target.parameters()]  # type: ignore[attr-defined]


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def settings(target: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(value): name for name, value in target.named_parameters()}
    return {
        names[id(value)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for value in group["params"]
    }


def test_the_first_group_that_matches_applies() -> None:
    groups = [{"match": ["1.*"], "lr_factor": 10.0}, {"match": ["*.bias"], "weight_decay": 0.0}]
    found = settings(target := two_layers(), optimizer(target=target, weight_decay=0.3, groups=groups))
    assert found == {
        "0.weight": (0.1, 0.3),
        "0.bias": (0.1, 0.0),
        "1.weight": (1.0, 0.3),
        "1.bias": (1.0, 0.3),
    }


def test_a_groups_factor_multiplies_its_layers_rate() -> None:
    groups = [{"match": ["*.bias"], "lr_factor": 2.0, "weight_decay": 0.5}]
    made = optimizer(
        "adamw",
        target := two_layers(),
        {name: DEPTHS[name] for name in dict(target.named_parameters())},
        layer_decay=0.5,
        groups=groups,
    )
    rates = {name: lr for name, (lr, _) in settings(target, made).items()}
    assert rates == {"1.bias": 0.2, "1.weight": 0.1, "0.bias": 0.1, "0.weight": 0.05}


def test_norms_and_biases_that_do_not_decay_stay_so_in_a_group() -> None:
    groups = [{"match": ["1.*"], "weight_decay": 0.5}]
    made = optimizer(target=(target := two_layers()), decay_norm_and_bias=False, groups=groups)
    found = settings(target, made)
    assert (found["1.weight"][1], found["1.bias"][1]) == (0.5, 0.0)


def test_a_shared_parameter_is_matched_by_any_of_its_names() -> None:
    target = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    target["head"].weight = target["embedding"].weight
    config = OptimizerConfig(name="adamw", lr=0.1, groups=[{"match": ["head.*"]}])
    assert matched_groups(config, target) == {"embedding.weight": 0}


def test_a_pattern_of_frozen_parameters_alone_is_a_mistake() -> None:
    target = two_layers()
    target[0].requires_grad_(False)
    with pytest.raises(BadFileError, match=r"'0\.\*' matches no trained parameter"):
        optimizer(target=target, groups=[{"match": ["0.*"]}])
