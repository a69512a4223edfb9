"""What a rank makes of a checkpoint: other versions are said, or refused where the file asks for that."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_train.checkpoint.checkpointer import Checkpointer, Loaded
from hpc_train.checkpoint.control_group import ControlGroup
from hpc_train.datasets.sampler import Position
from hpc_train.errors import BadFileError
from hpc_train.run.versions import versions
from hpc_train.topology.degrees import Degrees
from hpc_train.training.rank import Rank
from hpc_train.training.train_state import OtherVersionsError, Resumed, TrainState, resumed


def resume(*, strict: bool, **then: Any) -> Resumed:
    """Load, as one rank, a checkpoint of step 7 that was saved with these versions beside today's."""
    return resume_from({"position": {"step": 7, "skipped": []}, "versions": versions() | then}, strict=strict)


def resume_from(extra: dict[str, Any], *, strict: bool = False) -> Resumed:
    """Load, as one rank, a checkpoint of step 7 that says this beside its tensors."""
    rank = SimpleNamespace(
        experiment=SimpleNamespace(
            environment=SimpleNamespace(strict=strict),
            parallel=SimpleNamespace(strategy="ddp", sync_batchnorm=False),
        ),
        is_first=True,
        facts=SimpleNamespace(world_size=1),
        degrees=Degrees(),
        device=torch.device("cpu"),
    )
    checkpointer = SimpleNamespace(load_newest=lambda state: Loaded(7, extra), ranks=ControlGroup(0, 1, None))
    source = SimpleNamespace(train=range(3), info=SimpleNamespace(class_names=["a", "b"]))
    train_state = SimpleNamespace(state=None, has_batchnorm=False)
    return resumed(
        cast(Rank, rank), cast(Checkpointer, checkpointer), cast(TrainState, train_state), cast(Any, source)
    )


@pytest.mark.fault(41)
@pytest.mark.parametrize("package", ["torch", "python"])
def test_other_versions_are_refused_by_the_rank_where_the_file_asks(package: str) -> None:
    with pytest.raises(OtherVersionsError) as raised:
        resume(strict=True, **{package: "0.0.1"})
    assert f"environment.strict: checkpoint 7 was saved with other versions: {package} 0.0.1 → " in str(
        raised.value
    )
    assert "resume with environment.strict=false" in str(raised.value)


@pytest.mark.fault(41)
def test_other_versions_are_said_else(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume(strict=False, torch="0.0.1").position == Position(7)
    assert "checkpoint 7 was saved with other versions: torch 0.0.1 → " in caplog.text


def test_of_the_same_versions_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume(strict=True).position == Position(7)
    assert caplog.text == ""


@pytest.mark.parametrize("extra", [{}, {"position": None}])
def test_a_checkpoint_that_does_not_say_where_training_stood_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(BadFileError, match=r"checkpoint 7: state\.json .* position of training"):
        resume_from(extra)
