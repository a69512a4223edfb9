"""Twenty steps with mixed inputs and targets equal a bare PyTorch loop, as does the training accuracy.

Other losses and tasks, and evaluations, are compared in tests/parallelism/test_tasks.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import ParallelConfig
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.forward import Mixing, TrainingSums
from hpc_train.training.non_finite import Guard
from hpc_train.training.step import train_step
from hpc_train.training.tasks.base import make_task
from tests.experiments import tiny_experiment
from tests.forwards import dealt, make_train_state, training_forward
from tests.parallelism.training import whole
from tests.rank_context import make_strategy
from tests.ranks import run_ranks

CPU = torch.device("cpu")
STEPS, MICRO_BATCHES, SIZE, OUTPUTS = 20, 3, 4, 3
#: Name → shape of a target, and the keys of ``optimization``.
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "mixed": ((), {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}),
    "labels": ((OUTPUTS,), {"loss": "bce", "mixup": 0.4}),
}


def experiment(name: str) -> Experiment:
    sizes = {"steps": STEPS, "global_batch_size": MICRO_BATCHES * SIZE, "micro_batch_size": SIZE}
    return tiny_experiment({**sizes, "optimizer": {"name": "adamw", "lr": 0.01}, **SETTINGS[name][1]}, seed=3)


def info(name: str) -> DataInfo:
    return DataInfo(OUTPUTS, 1, (0.5,), (0.5,), target_shape=SETTINGS[name][0])


def make_batch(name: str, step: int, number: int, weight: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + number)
    inputs = torch.randn(SIZE, 1, 4, 4, generator=generator, dtype=torch.float64)
    shape, high = SETTINGS[name][0], 2 if SETTINGS[name][0] else OUTPUTS
    targets = torch.randint(high, (SIZE, *shape), generator=generator)
    valid = torch.ones(SIZE, dtype=torch.bool)
    return Batch(step, number, weight, inputs, targets, valid)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, OUTPUTS)
    return nn.Sequential(nn.Flatten(), *layers)


def train(rank: int, world_size: int, strategy_name: str) -> dict[str, dict[str, Any]]:
    """Return setting → losses, training sums and whole weights after all steps."""
    return {name: _train(rank, world_size, strategy_name, name) for name in SETTINGS}


def _train(rank: int, world_size: int, strategy_name: str, name: str) -> dict[str, Any]:
    degrees = Degrees(replicate=world_size) if strategy_name == "ddp" else Degrees(pipeline=world_size)
    strategy = make_strategy(strategy_name, rank, degrees, parallel=ParallelConfig(strategy=strategy_name))
    model = make_model()
    file = experiment(name)
    config, task = file.optimization, make_task(file, info(name))
    blocks = [model[1], model[3]]
    state = make_train_state(strategy, model, blocks, config.optimizer, MICRO_BATCHES * SIZE)
    state.wrapped.train()
    mixing, training_sums = Mixing.of(file, task), TrainingSums.of(task, CPU)
    forward = training_forward(task, seed=file.seed, mixing=mixing, training_sums=training_sums)
    guard, losses, sums = Guard(config, model, norm_counts=False), [], []
    for step in range(STEPS):
        make = partial(make_batch, name, step)
        batches = dealt(make, MICRO_BATCHES, degrees.data_rank(rank), degrees.data_ranks)
        forward.training_sums.begin(is_due=True)
        losses.append(train_step(state, step, batches, forward, guard, None).loss)
        sums.append(forward.training_sums.result(owns_loss=strategy.owns_loss)["accuracy"])
    held = dict(strategy.model.named_parameters())
    return {"losses": torch.stack(losses), "sums": torch.stack(sums), "weights": whole(strategy, held, held)}


def plain_loss(name: str, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of right predictions, written out."""
    targets = functional.one_hot(batch.targets, OUTPUTS) if name == "mixed" else batch.targets
    own = float(_mix(name, batch).own)
    targets = own * targets.double() + (1 - own) * targets.double().flip(0)
    if name == "labels":
        right = ((logits > 0) == (targets > 0.5)).all(1)
        return functional.binary_cross_entropy_with_logits(logits, targets), right.sum()
    right = logits.argmax(1) == targets.argmax(1)
    return functional.cross_entropy(logits, targets, label_smoothing=0.1), right.sum()


def _mix(name: str, batch: Batch) -> Any:
    mixing = Mixing.of(experiment(name), make_task(experiment(name), info(name)))
    assert mixing is not None
    return mixing.draw(batch.step, batch.number, batch.inputs)


def _mixed(name: str, batch: Batch) -> Tensor:
    mix = _mix(name, batch)
    if mix.box is None:
        return mix.own * batch.inputs + (1 - mix.own) * batch.inputs.flip(0)
    top, bottom, left, right = mix.box
    inputs = batch.inputs.clone()
    inputs[:, :, top:bottom, left:right] = batch.inputs.flip(0)[:, :, top:bottom, left:right]
    return inputs


def plain_training(name: str) -> dict[str, Any]:
    model = make_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, sums = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total, hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for number in range(MICRO_BATCHES):
            batch = make_batch(name, step, number)
            loss, right = plain_loss(name, model(_mixed(name, batch)), batch)
            (loss / MICRO_BATCHES).backward()
            total += loss.detach() / MICRO_BATCHES
            hits += right
        losses.append(total)
        sums.append(hits)
        optimizer.step()
    weights = {key: value.detach() for key, value in model.named_parameters()}
    return {"losses": torch.stack(losses), "sums": torch.stack(sums), "weights": weights}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "pipeline")])
def test_twenty_steps_equal_plain_pytorch(world_size: int, strategy: str, tmp_path: Path) -> None:
    ranks = run_ranks(world_size, train, strategy, folder=tmp_path)
    for name in SETTINGS:
        expected = plain_training(name)
        losses = sum(rank[name]["losses"] for rank in ranks)
        torch.testing.assert_close(losses, expected["losses"], rtol=1e-9, atol=1e-12)
        assert torch.equal(sum(rank[name]["sums"] for rank in ranks), expected["sums"]), name
        weights = ranks[0][name]["weights"]
        torch.testing.assert_close(weights, expected["weights"], rtol=1e-9, atol=1e-12)
