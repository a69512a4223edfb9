"""Activation checkpointing against the same training without it: bitwise equal, with less kept."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hpc_train.errors import BadFileError
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.activation_checkpointing import checkpoint_activations
from hpc_train.training.datasets.types import Batch
from hpc_train.training.models.blocks import find_blocks
from tests.checkpoint.checkpoint_runs import whole
from tests.forwards import PlainForward
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

# torch says with each compiled block under a policy that in-place operations may be wrong: they are not here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

WIDTH = 8
SETTINGS = ("blocks", "every 2", "selective")


class Block(nn.Module):
    """Whatever a second forward could get wrong: statistics, a buffer that is read, all random streams."""

    calls: Tensor

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(drop)
        self.register_buffer("calls", torch.zeros(()))
        self.num_forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_forwards += 1
        self.count()
        hidden = self.norm(self.first(inputs)) * self.calls
        hidden = self.drop(hidden.relu_()) * random.random() * float(np.random.random())
        return inputs + self.drop(self.second(hidden))

    def count(self) -> None:
        self.calls += 1


class Replacing(Block):
    """Puts another tensor in the buffer's place."""

    def count(self) -> None:
        self.calls = self.calls + 1


def make_model(block: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(block() for _ in range(4))).double()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def loss_of(model: nn.Module, number: int) -> Tensor:
    seed(number)
    return model(torch.randn(5, WIDTH, dtype=torch.float64)).square().mean()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Two steps of two micro-batches. Returns weights, gradients, buffers and what is drawn next."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            loss_of(model, 10 * step + number).backward()
        optimizer.step()
    return (
        {name: value.clone() for name, value in model.state_dict().items()}
        | {f"{name}.grad": value.grad for name, value in model.named_parameters() if value.grad is not None}
        | {"torch": torch.rand(1), "others": torch.tensor([np.random.random(), random.random()])}
    )


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@contextmanager
def saved_for_backward() -> Iterator[list[Tensor]]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize("block", [Block, Replacing])
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_is_bitwise_equal(setting: str, block: type[nn.Module]) -> None:
    expected = trained(make_model())
    model = make_model(block)
    checkpoint_activations(list(model)[1:], setting)
    assert_equal(trained(model), expected)


@pytest.mark.parametrize("setting", ["blocks", "selective"])
def test_several_forwards_may_come_before_their_backwards(setting: str) -> None:
    """As in a pipeline, where a buffer that was read has changed by then; plain torch refuses that."""
    plain, model = make_model(), make_model()
    checkpoint_activations(list(model)[1:], setting)
    for number in range(2):
        loss_of(plain, number).backward()
    losses = [loss_of(model, number) for number in range(2)]
    for loss in losses:
        loss.backward()
    assert_equal(_gradients(model), _gradients(plain))
    assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    ("setting", "again"), [("blocks", [1, 1, 1, 1]), ("every 2", [0, 1, 0, 1]), ("off", [0] * 4)]
)
def test_chosen_blocks_are_computed_twice(setting: str, again: list[int]) -> None:
    model = make_model()
    blocks: list[Any] = list(model)[1:]
    checkpoint_activations(blocks, setting)
    loss_of(model, 0).backward()
    assert [block.num_forwards for block in blocks] == [1 + more for more in again]


def test_evaluation_pays_nothing() -> None:
    model = make_model()
    checkpoint_activations(list(model)[1:], "blocks")
    with saved_for_backward() as saved, torch.no_grad():
        loss_of(model, 0)
    assert not saved
    expected, model = make_model().eval(), model.eval()
    model.load_state_dict(expected.state_dict())
    with saved_for_backward() as plain:
        loss_of(expected, 0)
    with saved_for_backward() as saved:
        loss_of(model, 0)
    assert len(saved) == len(plain)


def test_fewer_tensors_are_kept() -> None:
    kept = {}
    for setting in ("off", "every 2", "blocks"):
        model = make_model()
        checkpoint_activations(list(model)[1:], setting)
        with saved_for_backward() as saved:
            loss_of(model, 0)
        parameters = {value.data_ptr() for value in model.parameters()}
        kept[setting] = len([tensor for tensor in saved if tensor.data_ptr() not in parameters])
    assert kept["blocks"] < kept["every 2"] < kept["off"]


class Attending(nn.Module):
    """A transformer's block in small, with attention of torch's own."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.qkv(inputs).view(1, 1, -1, 3 * WIDTH).chunk(3, dim=-1)
        attended = scaled_dot_product_attention(query, key, value, dropout_p=self.drop)
        return inputs + self.out(nn.functional.gelu(attended.view_as(inputs)))


def operations_in_backward(model: nn.Module) -> list[str]:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    loss = model(torch.randn(5, WIDTH)).square().mean()
    with Listening():
        loss.backward()
    return names


def test_selective_computes_no_product_and_no_attention_again() -> None:
    counts = {}
    for setting in ("off", "selective", "blocks"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attending(), Attending())
        checkpoint_activations(list(model)[1:], setting)
        counts[setting] = operations_in_backward(model)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name in ("addmm", attention, "mm"):
        assert counts["selective"].count(name) == counts["off"].count(name)
    assert counts["blocks"].count(attention) == 2 and counts["blocks"].count("addmm") > 0
    assert counts["selective"].count("gelu") == 2 and counts["off"].count("gelu") == 0


def test_attention_that_drops_is_computed_again_so_that_later_draws_are_the_same() -> None:
    from hpc_train.training.activation_checkpointing import CheckpointPolicy, _selective

    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensors = [torch.zeros(1)] * 3
    assert _selective(None, attention, *tensors, 0.0) == CheckpointPolicy.MUST_SAVE
    assert _selective(None, attention, *tensors, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _selective(None, attention, *tensors, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE


class Overwriting(Block):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs).sigmoid()).relu_()


def test_what_is_kept_and_then_changed_in_place_is_named() -> None:
    model = make_model(Overwriting)
    checkpoint_activations(list(model)[1:], "selective")
    with pytest.raises(BadFileError, match=r"^activation_checkpointing: .*in place.*write blocks"):
        loss_of(model, 0).backward()


class ChangingItsInput(Block):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.relu_())


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_block_that_changes_its_input_in_place_is_named(setting: str) -> None:
    model = make_model(ChangingItsInput)
    checkpoint_activations(list(model)[1:], setting)
    with pytest.raises(BadFileError, match=r"^activation_checkpointing: .*ChangingItsInput, .*; .*write off"):
        loss_of(model, 0)


def test_without_blocks_it_is_refused() -> None:
    checkpoint_activations([], "off")
    with pytest.raises(BadFileError, match=r"^activation_checkpointing: blocks needs repeated blocks"):
        checkpoint_activations([], "blocks")


def test_names_stay_and_a_copy_trains_its_own_weights() -> None:
    model = make_model()
    names = list(model.state_dict())
    checkpoint_activations(list(model)[1:], "blocks")
    assert list(model.state_dict()) == names and find_blocks(model) == list(model)[1:]
    twin = copy.deepcopy(model)
    loss_of(twin, 0).backward()
    assert twin[1].calls == 1 and model[1].calls == 0
    assert all(value.grad is None for value in model.parameters())
    assert all(value.grad is not None for value in twin.parameters())


class Breaking(Block):
    """Code that the compiler leaves in the middle, so that torch computes the block in Python."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        torch._dynamo.graph_break()
        return inputs + self.second(hidden.relu())


class Normalising(Block):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(self.norm(self.first(inputs)).relu())


@pytest.mark.slow
@pytest.mark.parametrize("block", [Normalising, Breaking])
@pytest.mark.parametrize("setting", ["blocks", "selective"])
def test_compiled_blocks_count_each_batch_once(setting: str, block: type[nn.Module]) -> None:
    torch._dynamo.reset()
    expected = trained(make_model(block))
    model = make_model(block)
    checkpoint_activations(list(model)[1:], setting)
    for each in list(model)[1:]:
        each.compile(backend="aot_eager_decomp_partition")
    torch.testing.assert_close(trained(model), expected, rtol=0, atol=1e-12)


# --- under the strategies

STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp", "zero2")


def gradients_of(rank: int, strategy: str, setting: str, compiled: str) -> dict[str, Tensor]:
    """Gradients of two slots of each rank, and the buffers of rank 0."""
    torch._dynamo.reset()
    degrees = Degrees(replicate=2) if strategy in ("ddp", "zero1") else Degrees(shard=2)
    model = make_model(Normalising)
    blocks = list(model)[1:]
    checkpoint_activations(blocks, setting)
    for target in {"no": [], "blocks": blocks, "model": [model]}[compiled]:
        target.compile(backend="aot_eager_decomp_partition")
    placed = make_strategy(strategy, rank, degrees)
    placed.place(model, blocks)
    batches = [
        Batch(0, number, 0.25, torch.zeros(0), torch.zeros(0), torch.zeros(0)) for number in (rank, 2 + rank)
    ]
    placed.accumulate(batches, PlainForward(lambda module, batch: loss_of(module, batch.number)))
    placed.share_buffers(all_persistent=True)
    return {name: whole(value.grad) for name, value in model.named_parameters()} | {
        name: value.clone() for name, value in model.named_buffers()
    }


def cases() -> Iterator[tuple[str, str, str]]:
    for strategy, setting in product(STRATEGIES, ("off", *SETTINGS)):
        yield strategy, setting, "no"
    # hsdp and zero2 differ from fsdp in what is outside of blocks.
    yield from product(("ddp", "zero1", "fsdp"), ("blocks", "selective"), ("blocks", "model"))


def all_gradients(rank: int, world_size: int) -> dict[tuple[str, str, str], Any]:
    """Return what each case came to, or how it failed."""
    found: dict[tuple[str, str, str], Any] = {}
    for case in cases():
        try:
            found[case] = gradients_of(rank, *case)
        except Exception as error:
            found[case] = repr(error)[:500]
    return found


@pytest.mark.slow
def test_gradients_are_the_same_under_every_strategy_and_compiled(tmp_path: Path) -> None:
    for found in run_ranks(2, all_gradients, folder=tmp_path):
        expected = found["ddp", "off", "no"]
        wrong = {}
        for case, values in found.items():
            try:
                torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
            except (AssertionError, TypeError) as error:
                wrong[case] = values if isinstance(values, str) else str(error)
        assert not wrong
