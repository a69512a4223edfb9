"""float8 linear layers on the CPU, by torchao's emulation: what is converted, and training near bf16's.

What only a GPU can show (the products themselves) is in tests/gpu.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.topology.batch_arithmetic import BatchArithmetic
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.paths import RunPaths
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import Precision, choose_precision
from hpc_train.training.strategies.base import RankContext
from hpc_train.training.train_state import TrainState, build, use_float8
from tests.checkpoint.checkpoint_runs import make_run, saving_group, whole
from tests.forwards import PlainForward, optimizer_step
from tests.parallelism.batches import INFO, slots
from tests.parallelism.cases import ADAMW, experiment_of
from tests.ranks import run_ranks

CPU = torch.device("cpu")
#: As ``choose_precision`` gives them on a GPU.
FP8 = Precision("fp8", torch.float32, torch.bfloat16, has_float8_linears=True)
BF16 = Precision("bf16", torch.float32, torch.bfloat16)
MODEL = (
    "model={name: timm/test_vit, args: {img_size: 16, patch_size: 8, embed_dim: 32, depth: 3, num_heads: 2}}"
)


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 1


def make_block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.Sequential(nn.Linear(width, 16, bias=False)), Own(16, 16))


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.slow  # torchao imports the compiler
def test_linear_layers_inside_blocks_are_converted_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(16, 16), make_block(32), make_block(24), nn.Linear(16, 16))
    parameters = dict(model.named_parameters())
    use_float8([model[1], model[2], model[3]], CPU)
    assert converted(model) == ["1.0", "1.1.0"], "24 is no multiple of 16, a block itself can't be replaced"
    assert list(parameters) == [name for name, _ in model.named_parameters()]
    assert all(value is parameters[name] for name, value in model.named_parameters()), "the same tensors"


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [[], [make_block(24)], [nn.Linear(16, 16)]])
def test_nothing_to_convert_is_refused(blocks: list[nn.Module]) -> None:
    with pytest.raises(BadFileError, match=r"^precision: fp8 finds no linear layer .*; write bf16$"):
        use_float8(blocks, CPU)


@pytest.mark.slow
def test_products_are_those_of_float8() -> None:
    """Three bits of mantissa: equal to plain float32 within them, and not beyond."""
    torch.manual_seed(0)
    block, plain = nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32)
    block[0].load_state_dict(plain.state_dict())
    use_float8([block], CPU)
    inputs = torch.randn(7, 32)  # 7 rows: a number that 16 does not divide
    outputs = block(inputs).detach(), plain(inputs).detach()
    for found, expected in (outputs, gradients_of(block, plain, inputs)):
        error = float((found - expected).norm() / expected.norm())
        assert 1e-3 < error < 2**-4


def gradients_of(block: nn.Module, plain: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    gradients = []
    for module in (block, plain):
        module(inputs).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
    return gradients[0], gradients[1]


# --- where it is refused


def test_a_cpu_and_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    instead = "write bf16, or use such a GPU"
    needed = r"precision: fp8 needs an NVIDIA GPU of compute capability 9\.0 or higher \(H100\), and"
    with pytest.raises(BadFileError, match=rf"^{needed} device is cpu; {instead}$"):
        choose_precision("fp8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BadFileError, match=rf"^{needed} NVIDIA A100 has 8\.0; {instead}$"):
        choose_precision("fp8", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_precision("fp8", torch.device("cuda", 0)) == FP8


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(BadFileError, match=r"^precision: fp8 needs the package torchao.*hpc-train\[fp8\]"):
        use_float8([make_block(32)], CPU)


# --- trained on ranks, beside bf16


class Trainee:
    """What the worker builds on a rank for this precision."""

    def __init__(self, rank: int, world_size: int, precision: Precision, *overrides: str) -> None:
        batch = ("optimization.global_batch_size=16", "optimization.micro_batch_size=4")
        config: Experiment = experiment_of((MODEL, ADAMW, *batch, *overrides))
        is_replicated = config.parallel.strategy == "ddp"
        degrees = Degrees(replicate=world_size) if is_replicated else Degrees(shard=world_size)
        context = RankContext(rank, degrees, CPU, precision, parallel=config.parallel)
        batches = BatchArithmetic.of(config.optimization, 1000, world_size)
        self.precision = precision
        self.micro_batches = slots(0, rank, world_size, 4, torch.float32)
        self.train_state: TrainState = build(config, INFO, batches, context)
        self.world_size = world_size

    def gradients(self) -> dict[str, Tensor]:
        """Return those of one step, whole."""
        strategy = self.train_state.strategy
        strategy.accumulate(self.micro_batches, PlainForward(self._loss))
        held = {name: p.grad for name, p in strategy.optimized().items() if p.grad is not None}
        return {name: whole(value) for name, value in held.items()}

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = batch.inputs
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=not self.train_state.strategy.handles_mixed_precision
        ):
            return nn.functional.cross_entropy(model(inputs).float(), batch.targets)

    def step(self) -> None:
        optimizer_step(self.train_state.optimization)
        self.train_state.strategy.weights_changed()

    def checkpointer(self, run: RunPaths, rank: int) -> Checkpointer:
        return Checkpointer(run, 1, self.train_state.strategy, rank, self.world_size, saving_group())

    def everything(self) -> dict[str, Tensor]:
        """Return weights and the optimizer's state, whole. Collective."""
        state = self.train_state.optimization.optimizer.state
        found = dict(self.train_state.model.state_dict())
        for name, parameter in self.train_state.strategy.optimized().items():
            found |= {f"{name}.{key}": value for key, value in state[parameter].items()}
        return {name: whole(value) for name, value in found.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the L2 norm of what all tensors together are apart, of ``expected``'s norm."""
    assert found.keys() == expected.keys()
    ours, theirs = (torch.cat([each[name].flatten() for name in expected]) for each in (found, expected))
    return float((ours - theirs).norm() / theirs.norm())


def beside_bf16(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """Return how far a step's gradients are from bf16's; check checkpoints both ways. Collective."""
    found = {}
    for strategy in ("ddp", "fsdp"):  # the one that autocasts, and the one that casts by itself
        override = f"parallel.strategy={strategy}"
        ours, theirs = (Trainee(rank, world_size, each, override) for each in (FP8, BF16))
        gradients = ours.gradients()
        assert all(value.dtype == torch.float32 for value in gradients.values())
        found[strategy] = distance(gradients, theirs.gradients())
        again = Trainee(rank, world_size, FP8, override, "activation_checkpointing=selective")
        found[f"{strategy}, checkpointed"] = distance(again.gradients(), gradients)
        ours.step()
        theirs.step()
        for one, other in ((ours, theirs), (theirs, ours)):
            run = runs_of(rank, folder, f"{strategy}-{one.precision.name}")
            one.checkpointer(run, rank).save(one.train_state.state, 1, {})
            expected = one.everything()
            assert other.checkpointer(run, rank).load_newest(other.train_state.state) is not None
            loaded = other.everything()
            assert expected.keys() == loaded.keys()
            for name, value in expected.items():
                assert torch.equal(value, loaded[name]) and value.dtype == loaded[name].dtype, name
            one.gradients()  # differ from here on
            one.step()
    return found


def runs_of(rank: int, folder: Path, name: str) -> RunPaths:
    run = make_run(folder / name) if rank == 0 else RunPaths(folder / name)
    dist.barrier()
    return run


@pytest.mark.slow
def test_training_is_near_bf16_and_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """e5m2 keeps two bits of a gradient's mantissa, so that a rounding is up to 2^-3 of it; fewer than two
    roundings meet in one number, and most are smaller. A wrong factor anywhere in a block would be seen.
    """
    found = run_ranks(2, beside_bf16, tmp_path, folder=tmp_path)
    assert found[0] == found[1]
    for case, apart in found[0].items():
        assert apart == 0 if "checkpointed" in case else 1e-3 < apart < 2**-3, case
