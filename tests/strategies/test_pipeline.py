"""Stages over ranks against plain PyTorch on one device: the same weights, gradients, losses and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.experiment.validate.model_rules import GPTArgs
from hpc_train.training.checkpoint.state import NamedTensors
from hpc_train.training.datasets.types import Batch
from hpc_train.training.models.blocks import find_blocks
from hpc_train.training.models.gpt import GPT
from hpc_train.training.models.splitting import split_model
from hpc_train.training.strategies.buffers import buffers_kept
from hpc_train.training.strategies.stages import OutputSpecs, make_contiguous
from hpc_train.training.train_state import Ema
from tests.forwards import PlainForward, dealt
from tests.parallelism.groups import Groups
from tests.parallelism.training import whole
from tests.rank_context import make_strategy

STEPS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with closing(Groups()) as started:
        yield started


@dataclass(frozen=True)
class Case:
    model: str
    degrees: Degrees
    parallel: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 4
    precision: str = "fp64"
    max_norm: float = 0.5

    @property
    def name(self) -> str:
        return str(self.parallel.get("strategy", "pipeline"))

    @property
    def words(self) -> str:
        above = [f"{axis}{size}" for axis, size in vars(self.degrees).items() if size > 1]
        return "-".join([self.model, self.name, self.parallel.get("schedule", "1f1b"), *above])


class Averaging(nn.Module):
    """Keeps a running mean, in a new tensor each time, for evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs - self.mean
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean()
        return inputs


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(31, 16, GPTArgs(num_layers=4, dim=16, tie_embeddings=False))
    if kind == "gpt-llama":
        args = GPTArgs(style="llama", num_layers=4, dim=16, num_kv_heads=2, tie_embeddings=False)
        return GPT(31, 16, args)
    if kind == "gpt-dropout":
        return GPT(31, 16, GPTArgs(num_layers=4, dim=16, tie_embeddings=False, dropout=0.2))
    if kind == "resnet":
        return timm.create_model("test_resnet", num_classes=5)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 4, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)
    if kind == "vit-averaging":
        model.blocks[1].mlp.drop1 = Averaging()
    if kind == "vit-frozen":
        model.patch_embed.requires_grad_(False)
        model.cls_token.requires_grad_(False)
        model.pos_embed.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    return model


def make_batch(kind: str, step: int, number: int, weight: float) -> Batch:
    generator = torch.Generator().manual_seed(100 * step + number)
    valid = torch.ones(2, dtype=torch.bool)
    if kind.startswith("gpt"):
        tokens = torch.randint(0, 31, (2, 9), generator=generator)
        return Batch(step, number, weight, tokens[:, :-1], tokens[:, 1:], valid)
    images = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    return Batch(step, number, weight, images, torch.randint(0, 5, (2,), generator=generator), valid)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch.inputs)
    return nn.functional.cross_entropy(outputs.flatten(0, -2).double(), batch.targets.flatten())


def slots(case: Case, step: int, data_rank: int) -> list[Batch]:
    def make(number: int, weight: float) -> Batch:
        return make_batch(case.model, step, number, weight)

    return dealt(make, case.micro_batches, data_rank, case.degrees.data_ranks)


def strategy_of(rank: int, case: Case) -> Any:
    parallel = ParallelConfig(**{"strategy": "pipeline", **case.parallel})
    return make_strategy(case.name, rank, case.degrees, case.precision, parallel=parallel)


def train(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    """Train on one rank; return what it holds, in pieces."""
    strategy = strategy_of(rank, case)
    model = make_model(case.model)
    wrapped = strategy.place(model, find_blocks(model))
    wrapped.train()
    parameters = strategy.optimized()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = slots(case, step, case.degrees.data_rank(rank))
        losses.append(strategy.accumulate(batches, PlainForward(loss_of)))
        norms.append(strategy.clip_gradients(case.max_norm))
        optimizer.step()
    buffers = dict(strategy.model.named_buffers())
    forwards = {int(value) for name, value in buffers.items() if name.endswith("num_batches_tracked")}
    strategy.share_buffers(all_persistent=True)
    wrapped.eval()
    with torch.no_grad():
        outputs = [wrapped(make_batch(case.model, 9, number, 0).inputs) for number in (0, 1)]
    tensors = NamedTensors.of(strategy.model).tensors
    gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    return {
        "losses": torch.stack(losses),
        "norms": torch.stack(norms),
        "weights": whole(strategy, tensors, tensors, has_one_writer=True),
        "gradients": whole(strategy, gradients, parameters, has_one_writer=True),
        "outputs": torch.stack(outputs),
        "owns_loss": strategy.owns_loss,
        "forwards": forwards,
        "elements": sum(value.numel() for value in model.parameters() if not value.is_meta),
    }


def plain_training(case: Case) -> dict[str, Any]:
    """The same on one device, by plain PyTorch; other buffers than BatchNorm's are the first data rank's."""
    model = make_model(case.model).double().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for number in range(case.micro_batches):
            is_lost = case.model == "vit-averaging" and number % case.degrees.data_ranks
            kept = buffers_kept(model) if is_lost else nullcontext()
            with kept:
                loss = loss_of(model, make_batch(case.model, step, number, 0)) / case.micro_batches
                loss.backward()
            total += loss.detach()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.max_norm))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = [model(make_batch(case.model, 9, number, 0).inputs) for number in (0, 1)]
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    weights = dict(model.state_dict())
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "weights": weights,
            "gradients": gradients, "outputs": torch.stack(outputs)}  # fmt: skip


def assert_equals_plain_training(case: Case, ranks: Sequence[dict[str, Any]], within: float = 1e-9) -> None:
    expected = plain_training(case)
    close = {"rtol": within, "atol": within, "check_dtype": False}
    torch.testing.assert_close(sum(rank["losses"] for rank in ranks), expected["losses"], **close)
    for what in ("weights", "gradients"):
        found = ranks[0][what]
        assert set(found) == set(expected[what])
        for name, value in expected[what].items():
            torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}", **close)
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], expected["norms"], **close)
    assert sum(rank["owns_loss"] for rank in ranks) == case.degrees.data_ranks
    for rank in ranks:
        assert rank["outputs"].shape == expected["outputs"].shape
        if rank["owns_loss"]:
            torch.testing.assert_close(rank["outputs"], expected["outputs"], **close)


TWO, FOUR = Degrees(pipeline=2), Degrees(pipeline=4)
INTERLEAVED = {"schedule": "interleaved"}
CASES = [
    Case("vit", TWO, {"schedule": "gpipe"}),
    Case("vit", TWO, INTERLEAVED),
    Case("gpt", TWO),
    Case("gpt", TWO, {"strategy": "split"}),
    Case("resnet", TWO),
    # All of stage 0, and nothing of stage 2, which is on the same rank.
    Case("vit-frozen", TWO, INTERLEAVED),
    Case("resnet", Degrees(shard=2)),
    Case("vit", FOUR, {"schedule": "gpipe"}, micro_batches=3),
    Case("gpt", FOUR, micro_batches=5),
    # Fewer slots than stages.
    Case("gpt", FOUR, micro_batches=2),
    # Spare slots.
    Case("resnet", Degrees(pipeline=2, shard=2), micro_batches=5),
    Case("gpt", Degrees(pipeline=2, shard=2), INTERLEAVED, micro_batches=3),
    Case("vit", Degrees(pipeline=2, replicate=2), {"strategy": "split"}, micro_batches=3),
    Case("vit-averaging", Degrees(pipeline=2, shard=2), micro_batches=3),
    Case("vit", Degrees(pipeline=2, tensor=2)),
    Case("gpt-llama", Degrees(pipeline=2, tensor=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.words)
def test_training_and_evaluation_equal_plain_pytorch(groups: Groups, case: Case) -> None:
    ranks = groups.run(case.degrees.world_size, train, case)
    assert_equals_plain_training(case, ranks)
    for found in ranks if case.model == "resnet" else ():
        # All ranks' micro-batches; neither spare slots nor the rehearsal count.
        assert found["forwards"] == {STEPS * case.micro_batches}
    if case.degrees.pipeline > 1:
        total = sum(value.numel() for value in make_model(case.model).parameters())
        assert max(rank["elements"] for rank in ranks) < 0.9 * total, "others' layers are let go"


def losses_in(rank: int, world_size: int, case: Case) -> Tensor:
    return train(rank, world_size, case)["losses"]


@pytest.mark.slow
def test_bf16_passes_between_stages_as_fsdp_computes(groups: Groups) -> None:
    case = Case("gpt", TWO, precision="bf16")
    losses = sum(groups.run(2, losses_in, case))
    # bf16 has 8 bits: rounding of logits of about 1 is 0.4 %.
    torch.testing.assert_close(losses, plain_training(case)["losses"], rtol=4e-3, atol=0)


@dataclass(frozen=True)
class SeededForward(PlainForward):
    """Draws as the micro-batch and the stage say."""

    def begin(self, batch: Batch, stage: int = 0) -> AbstractContextManager[object]:
        torch.manual_seed(100 * batch.number + stage)
        return nullcontext()


def gradients_with_dropout(rank: int, world_size: int) -> dict[str, Tensor]:
    case = Case("gpt-dropout", TWO)
    strategy = strategy_of(rank, case)
    model = make_model(case.model)
    strategy.place(model, find_blocks(model))
    strategy.accumulate(slots(case, 0, 0), SeededForward(loss_of))
    return {name: value.grad.full_tensor() for name, value in strategy.optimized().items()}


@pytest.mark.slow
def test_each_stage_draws_from_streams_of_its_own(groups: Groups) -> None:
    found = {name: value for rank in groups.run(2, gradients_with_dropout) for name, value in rank.items()}
    model = make_model("gpt-dropout").double()
    stages = split_model(model, find_blocks(model), 2)

    def forward(tokens: Tensor, number: int) -> Tensor:
        value = tokens
        for index, stage in enumerate(stages):
            torch.manual_seed(100 * number + index)
            value = stage(value)
        return value

    for batch in slots(Case("gpt-dropout", TWO), 0, 0):
        outputs = forward(batch.inputs, batch.number)
        (nn.functional.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten()) / 4).backward()
    expected = {name: value.grad for name, value in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def names_and_average(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank of two stages shows of them, and what an average of them does to an evaluation."""
    strategy = strategy_of(rank, Case("gpt", TWO, INTERLEAVED))
    model = make_model("gpt")
    names = list(model.state_dict())
    wrapped = strategy.place(model, find_blocks(model)).eval()
    ema = Ema(strategy.model, 0.5)
    inputs = make_batch("gpt", 0, 0, 0).inputs
    with torch.no_grad():
        before = wrapped(inputs)
        for value in strategy.optimized().values():
            value.zero_()
        with ema.swapped():
            averaged = wrapped(inputs)
    shown = NamedTensors.of(strategy.model).tensors
    return {
        "all": names,
        "state": list(shown),
        "parameters": [name for name, _ in strategy.model.named_parameters()],
        "optimized": list(strategy.optimized()),
        "same": all(shown[name] is value for name, value in strategy.optimized().items()),
        "sharded": sum(isinstance(module, FSDPModule) for module in strategy.model.modules()),
        "training": {module.training for module in strategy.model.modules()},
        "is_like_before": torch.equal(before, averaged) and bool(before.any() or not strategy.owns_loss),
    }


@pytest.mark.slow
def test_a_rank_with_two_stages_shows_the_models_own_names(groups: Groups) -> None:
    found = groups.run(2, names_and_average)
    assert sorted(found[0]["state"] + found[1]["state"]) == sorted(found[0]["all"])
    for rank in found:
        assert rank["state"] == rank["parameters"] == rank["optimized"]
        assert rank["optimized"] == [name for name in rank["all"] if name in rank["optimized"]]
        assert rank["same"]
        assert rank["sharded"] == 4, "two stages and a block in each"
        assert rank["training"] == {False}
        assert rank["is_like_before"], "the averages are what was there before"
    assert "layers.0.mlp.up.weight" in found[0]["state"] and "layers.2.mlp.up.weight" in found[0]["state"]


def count_reductions(rank: int, world_size: int, parallel: dict[str, Any]) -> list[int]:
    """Return how often a rank's sharded groups reduced gradients, by step, of four slots each."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as sharded

    case = Case("gpt", Degrees(pipeline=2, shard=2), parallel, micro_batches=8)
    strategy = strategy_of(rank, case)
    model = make_model("gpt")
    strategy.place(model, find_blocks(model))
    plain, calls = sharded.foreach_reduce, []

    def counted(*args: Any, **keys: Any) -> Any:
        calls.append(1)
        return plain(*args, **keys)

    sharded.foreach_reduce = counted
    counts = []
    try:
        for step in range(2):
            calls.clear()
            strategy.accumulate(slots(case, step, case.degrees.data_rank(rank)), PlainForward(loss_of))
            counts.append(len(calls))
    finally:
        sharded.foreach_reduce = plain
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"strategy": "split"}], ids=["1f1b", "split"])
def test_gradients_are_reduced_once_a_step(groups: Groups, parallel: dict[str, Any]) -> None:
    # Two blocks, and what else a stage has.
    assert groups.run(4, count_reductions, parallel) == [[3, 3]] * 4


def said_by(rank: int, world_size: int, case: Case, step_to_fail: int) -> str:
    """Return what is raised to the user when a block refuses from a step on."""
    strategy = strategy_of(rank, case)
    model = make_model(case.model)
    blocks = find_blocks(model)

    def refuse(*inputs: Any) -> None:
        raise BadFileError("model.name: this one refuses")

    try:
        strategy.place(model, blocks)
        for step in range(2):
            if step == step_to_fail:
                blocks[-1].register_forward_pre_hook(refuse)
            strategy.accumulate(slots(case, step, 0), PlainForward(loss_of))
    except BadFileError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"schedule": "gpipe"}, INTERLEAVED], ids=["1f1b", "gpipe", "alone"])
def test_what_a_forward_raises_reaches_the_user_as_it_is(groups: Groups, parallel: dict[str, Any]) -> None:
    for step in (0, 1):
        said = groups.run(1, said_by, Case("gpt", Degrees(), parallel), step)
        assert said == ["model.name: this one refuses"]


@pytest.mark.slow
def test_slots_that_make_no_equal_rounds_are_refused_by_all_ranks(groups: Groups) -> None:
    for said in groups.run(2, said_by, Case("gpt", TWO, INTERLEAVED, micro_batches=5), 2):
        assert said.startswith(
            "parallel.schedule: interleaved runs micro-batches of 2 ranks in 2 equal rounds"
        )


def refused(rank: int, world_size: int, kind: str) -> str:
    strategy = strategy_of(rank, Case("vit", TWO))
    model = make_model("vit")
    if kind == "frozen":
        model.requires_grad_(False)
        model.patch_embed.requires_grad_(True)
    elif kind == "compiled":
        model.compile()
    with pytest.raises(BadFileError) as caught:
        strategy.place(model, find_blocks(model))
    return str(caught.value)


@pytest.mark.slow
def test_a_stage_without_anything_to_train_and_a_model_compiled_whole_are_refused(groups: Groups) -> None:
    for said in groups.run(2, refused, "frozen"):
        assert said.startswith("parallel.pipeline: all parameters of stage 1 of 2 are frozen; write fewer")
    for said in groups.run(2, refused, "compiled"):
        assert said.startswith("compile.scope: model compiles the forward of the whole model")
        assert "write blocks" in said


def gpt_of_uneven_heads() -> nn.Module:
    model = make_model("gpt")
    model.layers[3].attention.num_heads = 3
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: make_model("resnet"), "parallel.tensor: ResNet has no layers that 2 ranks can share"),
        # Of one stage alone: those of the other must not wait for it.
        (gpt_of_uneven_heads, "parallel.tensor: 2 ranks can't share 3 heads of layers.3."),
    ],
)
def test_what_ranks_of_a_stage_cant_share_is_refused_by_those_of_all(
    model: Callable[[], nn.Module], said: str
) -> None:
    whole = model()
    with pytest.raises(BadFileError) as caught:
        strategy_of(0, Case("vit", Degrees(pipeline=2, tensor=2))).place(whole, find_blocks(whole))
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"stages_per_rank": 2}, "parallel.stages_per_rank: 1f1b has one stage per rank; take it out"),
        ({"strategy": "split", "stages_per_rank": 2}, "split has one stage per rank; take it out"),
        ({**INTERLEAVED, "stages_per_rank": 1}, "interleaved needs at least 2 stages per rank; write 2"),
        ({"args": {"chunks": 2}}, "parallel.args.chunks: does not apply to strategy pipeline; take it out"),
    ],
)
def test_stages_that_the_schedule_does_not_have_are_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(BadFileError) as caught:
        strategy_of(0, Case("gpt", TWO, parallel))
    assert said in str(caught.value)


@pytest.mark.parametrize("outputs", [{"out": torch.zeros(2)}, (torch.zeros(2), None)])
def test_a_stage_that_returns_no_tensors_is_refused(outputs: Any) -> None:
    stage = nn.Identity()
    make_contiguous(stage)
    with pytest.raises(BadFileError, match=r"can't be cut .*: it returns a (dict|tuple), not a tensor"):
        OutputSpecs.of(stage(outputs))
