"""What the file check and the ranks both refuse, they refuse in the same words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.datasets.building import build_source
from hpc_train.distributed.precision import choose_precision
from hpc_train.errors import BadFileError
from hpc_train.strategies import sync_batchnorm
from hpc_train.strategies.base import RankContext
from hpc_train.strategies.fully_sharded import refuse_unshardable
from hpc_train.strategies.pipeline import PipelineStrategy
from hpc_train.topology.batch_arithmetic import BatchArithmetic
from hpc_train.topology.degrees import Degrees
from hpc_train.training.schedules import make_schedule
from hpc_train.validate import model_facts
from hpc_train.validate.loading import load
from hpc_train.validate.rules import check_start
from tests.config.files import GOOD, problems_of

CPU = torch.device("cpu")


def line_of_the_file(tmp_path: Path, *overrides: str) -> str:
    """Return the only problem of a file, without its place."""
    (line,) = problems_of(tmp_path, GOOD, *overrides)
    return line.removeprefix("command line: ").partition("exp.yaml:")[0]


def experiment_of(tmp_path: Path, *overrides: str) -> Experiment:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return load(path, overrides).experiment


def said_by(rank: Callable[[], object]) -> str:
    with pytest.raises(BadFileError) as caught:
        rank()
    return str(caught.value)


def as_words(problems: list[Problem]) -> str:
    (problem,) = problems
    return str(problem.as_error())


def test_more_ranks_than_micro_batches(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path)
    ranks = experiment.micro_batches + 1
    rank = said_by(lambda: BatchArithmetic.of(experiment.optimization, 10**6, ranks))
    assert rank == as_words(check_start(experiment, ranks))


def test_a_warm_up_as_long_as_the_run(tmp_path: Path) -> None:
    steps = ("optimization.epochs=", "optimization.steps=9")
    schedule = experiment_of(tmp_path, *steps).optimization.schedule
    changed = schedule.model_copy(update={"warmup_steps": 10})
    file = line_of_the_file(tmp_path, *steps, "optimization.schedule={warmup_steps: 10}")
    assert said_by(lambda: make_schedule(changed, 9, 3)) == file


def test_a_missing_root(tmp_path: Path) -> None:
    data = experiment_of(tmp_path).data.model_copy(update={"name": "imagefolder"})
    assert said_by(lambda: build_source(data)) == line_of_the_file(tmp_path, "data={name: imagefolder}")


def test_sync_batchnorm_beside_spare_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(tmp_path, "parallel.sync_batchnorm=true")
    micro_batches = experiment.micro_batches
    ranks = next(number for number in range(2, micro_batches) if micro_batches % number)
    monkeypatch.setattr(sync_batchnorm.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(sync_batchnorm.dist, "get_world_size", lambda: ranks)
    rank = said_by(lambda: sync_batchnorm.sync_batchnorm(nn.Identity(), CPU, micro_batches))
    assert rank == as_words(check_start(experiment, ranks))


def test_batchnorm_in_mixed_precision_where_parameters_are_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_facts, "has_batchnorm", lambda name, args: True)
    file = line_of_the_file(
        tmp_path, "model={name: timm/resnet18}", "precision=bf16", "parallel={strategy: fsdp}"
    )
    model, precision = nn.Sequential(nn.BatchNorm1d(2)), choose_precision("bf16", CPU)
    rank = said_by(lambda: refuse_unshardable(model, [], precision, "fsdp"))
    assert rank == file.replace("timm/resnet18", "this model")


def test_a_whole_model_compiled_for_stages(tmp_path: Path) -> None:
    file = line_of_the_file(tmp_path, "parallel={strategy: pipeline}", "compile={scope: model}")
    strategy = PipelineStrategy(RankContext(0, Degrees(), CPU, choose_precision("fp32", CPU)))
    model = nn.Linear(1, 1)
    model.compile()
    assert said_by(lambda: strategy._refuse_compiled(model)) == file
