"""Tasks of plug-ins; those that lack a method are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpc_train import registry
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.training.datasets.types import Batch, DataInfo
from hpc_train.training.forward import TrainingForward
from hpc_train.training.tasks.base import Task, class_table, make_task
from tests.forwards import training_forward

INFO = DataInfo(3, 1, (0.5,), (0.25,))
CPU = torch.device("cpu")


class NoSums:
    def __init__(self, *arguments: Any) -> None: ...

    def forward(self, model: nn.Module, batch: Batch) -> Any: ...

    def loss(self, outputs: Any, batch: Batch) -> Any: ...

    def metrics(self, sums: Any) -> Any: ...


class Inheriting(Task):
    """Has the protocol's own ``forward``."""

    target_spec: Any = None

    def __init__(self, *arguments: Any) -> None: ...

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(outputs, batch.targets)

    def sums(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return {"count": batch.valid.sum()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {}


def file_of(task: str) -> Experiment:
    return cast(Experiment, SimpleNamespace(task=task, data=SimpleNamespace(name="x")))


def made(name: str, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(registry, "_plug_ins", lambda kind: {"own": f"{__name__}:{name}"})
    return make_task(file_of("own"), INFO)


def forward_of(task: Task, to_input: Any) -> TrainingForward:
    return training_forward(task, to_device=to_input)


def normalised(batch: Batch) -> Batch:
    return replace(batch, inputs=batch.inputs.float() / 255)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (4, 3), dtype=torch.uint8, generator=generator)
    return Batch(0, 0, 1.0, inputs, torch.tensor([0, 1, 2, 0]), torch.tensor([True, True, True, False]))


def test_the_end_of_a_pipeline_moves_targets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []

    class Seeing(Inheriting):
        def loss(self, outputs: Any, batch: Batch) -> Tensor:
            seen.append(batch)
            return super().loss(outputs, batch)

    def never(batch: Batch) -> Batch:
        raise AssertionError("inputs are copied and normalised again")

    forward_of(Seeing(), never).loss_of(torch.rand(4, 3), batch())
    assert seen[0].inputs is None and torch.equal(seen[0].targets, batch().targets)
    assert torch.equal(seen[0].valid, batch().valid)


def test_forward_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = forward_of(made("Inheriting", monkeypatch), normalised)
    model = nn.Linear(3, 3)
    expected = functional.cross_entropy(model(normalised(batch()).inputs), batch().targets)
    assert torch.equal(forward.loss(model, batch()), expected)


def test_a_class_of_the_users_own_is_a_task() -> None:
    assert isinstance(make_task(file_of(f"{__name__}:Inheriting"), INFO), Inheriting)
    with pytest.raises(BadFileError, match=r"task: tests\.tasks\.test_base:CPU is device; name a class"):
        make_task(file_of(f"{__name__}:CPU"), INFO)


def test_a_task_without_sums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFileError, match="task: NoSums has no method sums"):
        made("NoSums", monkeypatch)


class NoArguments:
    """A task that can't be constructed as the protocol says."""


def test_a_task_that_takes_no_arguments_is_told_which() -> None:
    with pytest.raises(BadFileError, match=r"NoArguments .*write __init__\(self, experiment, info\)"):
        make_task(file_of(f"{__name__}:NoArguments"), INFO)


@pytest.mark.parametrize(("spec", "found"), [("int", "str"), ({"a": None}, "NoneType"), ({"a": 1}, "int")])
def test_a_target_spec_of_another_type_is_refused(
    spec: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inheriting, "target_spec", spec)
    with pytest.raises(BadFileError, match=f"Inheriting.target_spec is {found}; make it"):
        made("Inheriting", monkeypatch)


def test_a_class_name_that_is_not_utf8_is_escaped_in_tables() -> None:
    name = os.fsdecode(b"caf\xe9")
    table = class_table([name], [name], torch.tensor([[3]]))
    assert table == b"class,caf\\udce9\ncaf\\udce9,3\n"
