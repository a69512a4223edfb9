"""What the checkpoint tests share: a model with every odd kind of tensor, trained a little, and its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.errors import HpcTrainError
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import FileEntry, Manifest, hash_file, listing
from hpc_train.training.checkpoint import writing
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.checkpoint.state import TrainingState
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.device import Precision
from hpc_train.training.strategies.base import RankContext, Strategy
from hpc_train.training.strategies.ddp import DDPStrategy
from hpc_train.training.strategies.fully_sharded import FSDPStrategy, ZeRO2Strategy
from hpc_train.training.strategies.zero1 import ZeRO1Strategy
from tests.forwards import PlainForward

STRATEGIES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "zero1": ZeRO1Strategy, "zero2": ZeRO2Strategy}


@cache
def saving_group() -> dist.ProcessGroup:
    """Return the group for saves alone: gradients go over the other one meanwhile. Collective at first."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


class OddModel(nn.Module):
    """Tied weights, a tensor smaller than the number of ranks, buffers of several dtypes, a constant one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.one = nn.Linear(width, 1)
        self.conv = nn.Conv2d(3, 4, 3)
        self.tied_a = nn.Linear(width, width, bias=False)
        self.tied_b = nn.Linear(width, width, bias=False)
        self.tied_b.weight = self.tied_a.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("counts", torch.arange(6, dtype=torch.int32).reshape(2, 3))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("constant", torch.ones(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tied_b(self.tied_a(self.norm(self.first(inputs)))).relu()
        images = inputs[:, :3, None, None].expand(-1, -1, 3, 3)
        return self.one(hidden).sum() + self.conv(images).square().mean()


class Trainee:
    """One rank's model and optimizer under a strategy; ``seed`` decides the weights."""

    def __init__(
        self,
        seed: int = 0,
        strategy: str = "ddp",
        rank: int = 0,
        world_size: int = 1,
        dtype: torch.dtype = torch.float32,
        width: int = 8,
    ) -> None:
        torch.manual_seed(seed)
        precision = Precision("test", dtype, dtype)
        context = RankContext(
            rank,
            Degrees(replicate=world_size) if strategy == "ddp" else Degrees(shard=world_size),
            torch.device("cpu"),
            precision,
            channels_last=strategy not in ("fsdp", "zero2"),
            parallel=ParallelConfig(),
        )
        self.rank, self.world_size, self.dtype = rank, world_size, dtype
        self.strategy: Strategy = STRATEGIES[strategy](context)
        self.model = OddModel(width)
        self.wrapped = self.strategy.place(self.model, [self.model.first])
        self.optimized = self.strategy.optimized()
        groups = [
            {"params": [p for p in self.optimized.values() if p.dim() > 1]},
            {"params": [p for p in self.optimized.values() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        # Of an eps of 1e-8 float16 makes 0, and NaN of 0 / 0.
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        self.state = TrainingState(
            self.wrapped, self.optimizer, torch.amp.GradScaler("cpu", init_scale=512.0), self.optimized
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.forward_and_backward(step)
            self.step()

    def forward_and_backward(self, step: int = 0) -> None:
        """Change buffers and gradients."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(4, 5, generator=generator).to(self.dtype)
        batch = Batch(step, 0, 1 / self.world_size, inputs, torch.zeros(4), torch.ones(4, dtype=torch.bool))
        self.strategy.accumulate([batch], PlainForward(lambda model, batch: model(batch.inputs)))

    def step(self) -> None:
        """Change weights and the optimizer's state."""
        self.optimizer.step()
        self.strategy.weights_changed()
        self.optimizer.zero_grad()

    def checkpointer(self, run: RunPaths, attempt: int = 1, keep: int = 3) -> Checkpointer:
        group = saving_group() if self.world_size > 1 else None
        return Checkpointer(run, attempt, self.strategy, self.rank, self.world_size, group, keep=keep)

    def everything(self) -> dict[str, Tensor]:
        """Return all that must come back, as global tensors on the CPU. Collective."""
        named: dict[str, Tensor] = {f"m.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.optimized.items():
            for key, value in self.optimizer.state[parameter].items():
                named[f"o.{name}.{key}"] = value
        return {name: whole(value) for name, value in named.items()}


def whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone(memory_format=torch.contiguous_format)


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names that are not bitwise equal, or not on both sides."""
    names = left.keys() ^ right.keys()
    for name in left.keys() & right.keys():
        a, b = left[name], right[name]
        if a.dtype != b.dtype or a.shape != b.shape or octets(a) != octets(b):
            names.add(name)
    return sorted(names)


def octets(tensor: Tensor) -> bytes:
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def begin_and_finish(
    checkpointer: Checkpointer,
    state: TrainingState,
    step: int,
    before_commit: Callable[[], None] | None = None,
) -> None:
    checkpointer.begin(state, step, {}, before_commit)
    checkpointer.finish()


def begin_attempt(run: RunPaths, number: int) -> None:
    record = {"checkpoints": listing(run, number)}
    run.attempt(number).folder.mkdir(parents=True)
    run.attempt(number).record.write_text(json.dumps(record))


def forge(checkpoint: CheckpointPaths, **state: Any) -> None:
    """Change keys of ``state.json``, then make the manifest true again for whatever is in the folder."""
    if state:
        data = json.loads(checkpoint.state.read_text())
        checkpoint.state.write_text(json.dumps(data | state))
    old = Manifest.read(checkpoint)
    files = {
        name: FileEntry(path.stat().st_size, hash_file(path))
        for name in old.files
        if (path := checkpoint.folder / name).exists()
    }
    Manifest(old.step, old.attempt, old.world_size, files).write(checkpoint)


def assert_loads(
    run: RunPaths,
    step: int,
    expected: Trainee | dict[str, Tensor] | None = None,
    attempt: int = 1,
    **how: Any,
) -> dict[str, Any]:
    """See that the newest checkpoint is of this step, and restores all that is expected, if it is given.

    ``how``: of the trainee that loads it. Return the ``extra`` of the checkpoint.
    """
    other = Trainee(seed=2, **how)
    loaded = other.checkpointer(run, attempt).load_newest(other.state)
    assert loaded is not None and loaded.step == step
    if expected is not None:
        tensors = expected.everything() if isinstance(expected, Trainee) else expected
        assert differences(tensors, other.everything()) == []
    return loaded.extra


def folder_names(run: RunPaths) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def make_run(folder: Path) -> RunPaths:
    run = RunPaths(folder)
    begin_attempt(run, 1)
    return run


@contextmanager
def claimed_room(free: int = 2**40) -> Iterator[None]:
    """Have every disk say that there is room: what is full then is found out by writing."""
    patch = pytest.MonkeyPatch()
    patch.setattr(writing, "free_space", lambda _: free)
    try:
        yield
    finally:
        patch.undo()


def error_of(work: Callable[[], object]) -> str:
    """Return the type and message of the error that ``work`` raises, or that there is none."""
    try:
        work()
    except HpcTrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
