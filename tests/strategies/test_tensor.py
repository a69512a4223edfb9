"""``strategy: tensor`` against plain PyTorch on one device: what ranks share is the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import timm.layers
import torch
import torchvision
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import OptimizerConfig, ScheduleConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.validate.model_rules import GPTArgs
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import choose_precision
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.gpt import GPT
from hpc_train.training.optimization import Optimization, _with_kernel, make_optimizer, make_schedule
from hpc_train.training.strategies.pieces import dealt_out
from hpc_train.training.strategies.tensor import _SharedDropout, refuse_unshared
from hpc_train.training.strategies.tensor_layers import find_shareable
from hpc_train.training.train_state import Ema
from tests.forwards import PlainForward, optimizer_step
from tests.parallelism.training import whole
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS = 3
MICRO_BATCHES = 4
MAX_NORM = 0.5
DECAY = 0.9
ADAMW = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1, args={"eps": 1e-3})
SGD = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9, weight_decay=0.1)

Tensors = dict[str, Tensor]


def vit(**options: Any) -> nn.Module:
    """Rows of q, k and v that two by two ranks cut within k, and not evenly."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 10, "depth": 2, "num_heads": 2, "num_classes": 4}
    return timm.create_model("test_vit", **(sizes | options))


def gpt() -> nn.Module:
    return GPT(11, 6, GPTArgs(num_layers=2, num_heads=4, dim=20))


def llama() -> nn.Module:
    """Of two ranks each has two heads, which share keys and values."""
    return GPT(11, 6, GPTArgs(style="llama", num_layers=2, num_heads=4, num_kv_heads=2, dim=16))


def glu() -> nn.Module:
    return vit(mlp_layer=timm.layers.GluMlp, mlp_ratio=4.0)


def swiglu() -> nn.Module:
    return vit(mlp_layer=timm.layers.SwiGLU)


def rope() -> nn.Module:
    return timm.create_model(
        "vit_small_patch16_rope_224",
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=4,
    )  # fmt: skip


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(16, 8, 2, 2, 12, 24, num_classes=4)


def convnext() -> nn.Module:
    return timm.create_model("test_convnext", num_classes=4)


def inputs_of(make: Callable[[], nn.Module], number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if make in (gpt, llama):
        tokens = torch.randint(11, (2, 7), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    size = 64 if make is convnext else 16
    images = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (2,), generator=generator)


def batch_of(make: Callable[[], nn.Module], step: int, number: int, weight: float) -> Batch:
    inputs, targets = inputs_of(make, 10 * step + number)
    return Batch(step, number, weight, inputs, targets, torch.ones(len(inputs), dtype=torch.bool))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    torch.manual_seed(100 * batch.step + batch.number)  # of dropout
    logits = model(batch.inputs)
    return nn.functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())


@dataclass(frozen=True)
class Training:
    make: Callable[[], nn.Module]
    optimizer: OptimizerConfig
    degrees: Degrees
    prepare: Callable[[list[nn.Module]], None] | None = None


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def place(rank: int, training: Training, precision: str = "fp64") -> tuple[Any, nn.Module]:
    strategy = make_strategy("tensor", rank, training.degrees, precision)
    model = build(training.make)
    blocks = find_blocks(model)
    if training.prepare is not None:
        training.prepare(blocks)
    strategy.place(model, blocks)
    return strategy, model


def train(rank: int, training: Training) -> dict[str, Any]:
    """Train on one rank; return what it reports and the pieces that it would save."""
    strategy, model = place(rank, training)
    parameters = strategy.optimized()
    optimizer = make_optimizer(training.optimizer, parameters, 8)
    ema = Ema(model, DECAY)
    degrees = training.degrees
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        numbers = range(degrees.data_rank(rank), MICRO_BATCHES, degrees.data_ranks)
        batches = [batch_of(training.make, step, number, 1 / MICRO_BATCHES) for number in numbers]
        losses.append(strategy.accumulate(batches, PlainForward(loss_of)))
        gradients = gathered(strategy, {name: p.grad for name, p in parameters.items()}, parameters)
        norms.append(strategy.clip_gradients(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    state, likes = {}, {}
    for name, p in parameters.items():
        for key, value in optimizer.state[p].items():
            state[f"{name}.{key}"], likes[f"{name}.{key}"] = value, p
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "gradients": gradients,
        "state": gathered(strategy, state, likes),
        "weights": gathered(strategy, parameters, parameters),
        "averages": gathered(strategy, {name: ema.averages[name] for name in parameters}, parameters),
    }


def gathered(strategy: Any, tensors: Mapping[str, Tensor], likes: Mapping[str, Tensor]) -> Tensors:
    found = whole(strategy, tensors, likes, has_one_writer=True)
    return {name: value.double() for name, value in found.items()}


def plain(make: Callable[[], nn.Module], config: OptimizerConfig) -> dict[str, Any]:
    """Train the whole model on one device with nothing of ours but the data."""
    model = build(make).double()
    parameters = dict(model.named_parameters())
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3, weight_decay=0.1)
    averages = {name: p.detach().clone() for name, p in parameters.items()}
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(MICRO_BATCHES):
            loss = loss_of(model, batch_of(make, step, number, 0)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        losses.append(total)
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        for name, p in parameters.items():
            averages[name].lerp_(p.detach(), 1 - DECAY)
    state = {
        f"{name}.{key}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()
    }
    weights = {name: p.detach() for name, p in parameters.items()}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "gradients": gradients,
            "state": state, "weights": weights, "averages": averages}  # fmt: skip


def assert_equal(ranks: list[dict[str, Any]], expected: Mapping[str, Any]) -> None:
    losses = torch.stack([rank["losses"] for rank in ranks])
    torch.testing.assert_close(losses.sum(0), expected["losses"], rtol=1e-9, atol=1e-12)
    for rank in ranks:
        assert torch.equal(rank["norms"], ranks[0]["norms"])
    torch.testing.assert_close(ranks[0]["norms"], expected["norms"], rtol=1e-9, atol=0)
    for what in ("gradients", "weights", "averages", "state"):
        wanted = {name: value.double() for name, value in expected[what].items()}
        torch.testing.assert_close(ranks[0][what], wanted, rtol=1e-9, atol=1e-9)


PAIRS = Degrees(shard=2, tensor=2)
COPIES = Degrees(replicate=2, tensor=2)
ALL_FOUR = Degrees(tensor=4)

ON_FOUR = [
    Training(vit, ADAMW, PAIRS),
    Training(vit, SGD, COPIES),
    Training(gpt, ADAMW, PAIRS),
    Training(gpt, SGD, ALL_FOUR),
    Training(llama, ADAMW, PAIRS),
]


@dataclass(frozen=True)
class Found:
    """What four ranks found, one after the other."""

    trained: list[list[dict[str, Any]]]
    overflow: list[tuple[float, bool]]


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = run_ranks(4, train_and_overflow, folder=tmp_path_factory.mktemp("ranks"))
    return Found([trained for trained, _ in found], [overflow for _, overflow in found])


def train_and_overflow(rank: int, world_size: int) -> tuple[list[dict[str, Any]], tuple[float, bool]]:
    return [train(rank, training) for training in ON_FOUR], overflow_on_one_part(rank)


@pytest.mark.slow
def test_training_equals_plain_pytorch_in_products_of_degrees(on_four: Found) -> None:
    for i, training in enumerate(ON_FOUR):
        ranks = [rank[i] for rank in on_four.trained]
        assert_equal(ranks, plain(training.make, training.optimizer))
        silent = [rank for rank in range(4) if training.degrees.tensor_rank(rank) > 0]
        assert all((ranks[rank]["losses"] == 0).all() for rank in silent)


def dropping() -> nn.Module:
    """Drops between the MLP's layers and behind each branch."""
    return vit(proj_drop_rate=0.3, drop_path_rate=0.2)


def dropping_torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(16, 8, 2, 2, 12, 24, dropout=0.3, num_classes=4)


def recompute(blocks: list[nn.Module]) -> None:
    checkpoint_activations(blocks, "blocks")


def trace(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.compile(backend="aot_eager")


TWO = Degrees(tensor=2)
ON_TWO = [
    Training(dropping, ADAMW, TWO),
    Training(dropping_torchvision_vit, SGD, TWO),
    Training(dropping, SGD, TWO, recompute),
    Training(vit, ADAMW, TWO, trace),
    Training(glu, SGD, TWO),
    Training(swiglu, ADAMW, TWO),
    Training(rope, ADAMW, TWO),
    Training(convnext, SGD, TWO),
]


def train_on_two(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [train(rank, training) for training in ON_TWO]


@pytest.mark.slow
def test_dropout_recomputation_compilation_and_other_models_equal_plain_pytorch(tmp_path: Path) -> None:
    found = run_ranks(2, train_on_two, folder=tmp_path)
    for i, training in enumerate(ON_TWO):
        assert_equal([rank[i] for rank in found], plain(training.make, training.optimizer))


def overflow_on_one_part(rank: int) -> tuple[float, bool]:
    """One rank's part of one gradient is infinite: nobody steps; then all do. Returns scale, and that."""
    training = Training(vit, ADAMW, PAIRS)
    strategy, model = place(rank, training, "fp16")
    parameters = strategy.optimized()
    precision = choose_precision("fp16", CPU)
    optimization = Optimization(
        make_optimizer(ADAMW, parameters, 8), make_schedule(ScheduleConfig(), 10, 10), precision, CPU
    )
    before = [p.to_local().clone() for p in model.parameters()]
    for is_finite in (False, True):
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        optimization.scale(torch.ones(()))
        if rank == 2 and not is_finite:
            parameters["blocks.1.mlp.fc2.weight"].grad.to_local().fill_(torch.inf)
        optimizer_step(optimization, lambda: strategy.clip_gradients(1.0))
        after = [p.to_local() for p in model.parameters()]
        has_moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert has_moved == is_finite
    return optimization.scaler.get_scale(), has_moved


@pytest.mark.slow
def test_an_overflow_in_one_ranks_part_is_one_on_all(on_four: Found) -> None:
    assert on_four.overflow == [(32768.0, True)] * 4


def dropping_weights_of_attention() -> nn.Module:
    return GPT(11, 6, GPTArgs(dropout=0.1))


def mlps(*widths: int) -> nn.Module:
    return nn.Sequential(*(timm.layers.Mlp(4, width) for width in widths))


@pytest.mark.parametrize(
    ("make", "ranks", "said"),
    [
        (lambda: vit(embed_dim=12, num_heads=4), 3, "3 ranks .* 4 heads of blocks.0.attn .*write 2 or 4$"),
        (gpt, 8, "8 ranks can't share 4 heads of layers.0.attention .*write 2 or 4$"),
        (llama, 4, r"4 ranks can't share 2 heads of layers.0.attention \(num_kv_heads\) evenly; write 2$"),
        (torchvision_vit, 5, "5 ranks .* 24 columns of .*mlp.0 evenly; write 8, 12 or 24$"),
        (lambda: mlps(7), 2, "7 columns of 0.fc1 evenly; write 7$"),
        (lambda: mlps(7, 5), 2, "7 columns of 0.fc1 evenly; write another parallel.strategy, like fsdp$"),
        (lambda: vit(attn_drop_rate=0.1), 2, r"model\.args\.attn_drop_rate: 2 ranks .*write 0, or"),
        (dropping_weights_of_attention, 2, r"model\.args\.dropout: 2 ranks .*write 0, or"),
    ],
)
def test_a_degree_that_does_not_divide_is_reported_with_ones_that_do(
    make: Callable[[], nn.Module], ranks: int, said: str
) -> None:
    with pytest.raises(BadFileError, match=said):
        refuse_unshared(make(), ranks, "take it out")


class Declared(nn.Module):
    """A plug-in's layers."""

    def __init__(self, plan: dict[str, str], dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(dropout)
        self._plan = plan

    def tensor_plan(self) -> dict[str, str]:
        return self._plan


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"up": "colums"}, r"Declared\.tensor_plan\(\) says 'colums' of up; write columns, rows, dropout or"),
        ({"norm": "columns"}, "names norm, which is no nn.Linear of it"),
        ({"top": "rows"}, "names top, which is no nn.Linear of it"),
        ({"up": "columns", "down": "rows"}, "3 ranks can't share 8 columns of 0.up evenly; write 2, 4 or 8"),
    ],
)
def test_a_plug_ins_plan_is_followed_or_its_mistake_said(plan: dict[str, str], said: str) -> None:
    with pytest.raises(BadFileError, match=said):
        refuse_unshared(nn.Sequential(Declared(plan)), 3, "take it out")


@pytest.mark.parametrize("how", ["dropout", "whole", None])
def test_a_plug_in_says_where_its_dropouts_lie(how: str | None) -> None:
    plan = {"up": "columns", "down": "rows"} | ({} if how is None else {"drop": how})
    module = Declared(plan, dropout=0.5)
    if how is None:
        with pytest.raises(BadFileError, match=r"does not name drop, a dropout; write dropout where it is"):
            find_shareable(module)
        return
    found = find_shareable(module)
    assert found is not None and found.layers == ("up", "down")
    assert found.dropouts == (("drop",) if how == "dropout" else ())


def test_heads_of_different_angles_stay_together() -> None:
    layers = timm.layers
    rope = layers.pos_embed_sincos.RotaryEmbeddingMixed(dim=8, depth=1, num_heads=2, feat_shape=[2, 2])
    assert find_shareable(layers.AttentionRope(8, 2)) is not None
    model = nn.ModuleDict({"rope": rope, "attn": layers.AttentionRope(8, 2)})
    with pytest.raises(BadFileError, match="ModuleDict has no layers that 2 ranks can share"):
        refuse_unshared(model, 2, "take it out")


def tied_mlps() -> nn.Module:
    first, second = timm.layers.Mlp(4), timm.layers.Mlp(4)
    second.fc1.weight = first.fc1.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    "model",
    [
        timm.layers.Attention(4, 2, qk_norm=True, norm_layer=nn.LayerNorm),
        timm.layers.Attention(4, 2, scale_norm=True, norm_layer=nn.LayerNorm),
        timm.layers.Mlp(4, use_conv=True),
        timm.layers.Mlp(4, norm_layer=nn.LayerNorm),
        tied_mlps(),
        torchvision.ops.MLP(4, [8, 8, 4]),
    ],
)
def test_layers_that_need_all_columns_or_are_tied_stay_whole(model: nn.Module) -> None:
    with pytest.raises(BadFileError, match="has no layers that 2 ranks can share"):
        refuse_unshared(model, 2, "take it out")


def test_a_model_without_layers_to_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.training.strategies.tensor.mesh_of", lambda context: None)
    with pytest.raises(BadFileError, match=r"Linear has no layers .*; write strategy: fsdp, or give"):
        place(0, Training(lambda: nn.Linear(4, 4), SGD, TWO))


@pytest.mark.parametrize("key", ["foreach", "fused"])
def test_parameters_of_several_meshes_update_one_by_one(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.training.optimization._num_meshes", lambda parameters: 2)
    assert _with_kernel({}, [], may_fuse=True) == {"foreach": False}
    assert _with_kernel({key: True}, [], may_fuse=True) == {key: True}


def test_rows_are_dealt_out_by_rank_then_part() -> None:
    # q, k and v of four rows each, two a rank.
    rows = torch.arange(12)
    assert dealt_out(rows, 3, 2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]


def test_ranks_drop_of_their_columns_what_plain_training_drops() -> None:
    plain, x, ranks = nn.Dropout(0.5), torch.randn(2, 3, 12), 3
    torch.manual_seed(1)
    expected = plain(x)
    found = []
    for rank, columns in enumerate(x.chunk(ranks, dim=-1)):
        mesh: Any = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda rank=rank: rank)
        torch.manual_seed(1)
        found.append(_SharedDropout(plain, mesh)(columns))
    assert torch.equal(torch.cat(found, dim=-1), expected)
