"""What a rank makes of a checkpoint: other versions are reported, or refused where the file asks for that."""

from __future__ import annotations

import hashlib
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_train.checkpoint.checkpointer import Loaded
from hpc_train.checkpoint.control_group import ControlGroup
from hpc_train.datasets.sampler import Position
from hpc_train.errors import BadFileError, ExitCode
from hpc_train.run.versions import versions
from hpc_train.training.resuming import OtherVersionsError, Resumed, refuse_other_classes
from tests.training.resumes import resume


def resume_with(*, strict: bool, **versions_then: Any) -> Resumed:
    """Load a checkpoint of step 7 that was saved with these versions, and otherwise today's."""
    position = {"step": 7, "skipped": []}
    return resume(saved({"position": position, "versions": versions() | versions_then}), strict=strict)


def saved(extra: dict[str, Any]) -> SimpleNamespace:
    """Return a checkpointer whose newest checkpoint, of step 7, has this besides its tensors."""
    return SimpleNamespace(load_newest=lambda state: Loaded(7, extra), ranks=ControlGroup(0, 1, None))


@pytest.mark.fault(41)
@pytest.mark.parametrize("package", ["torch", "python"])
def test_other_versions_are_refused_by_the_rank_where_the_file_asks(package: str) -> None:
    with pytest.raises(OtherVersionsError) as raised:
        resume_with(strict=True, **{package: "0.0.1"})
    assert f"environment.strict: checkpoint 7 was saved with other versions: {package} 0.0.1 → " in str(
        raised.value
    )
    assert "resume with environment.strict=false" in str(raised.value)
    assert raised.value.exit_code == ExitCode.ENVIRONMENT, "not the code of a run that diverged"


@pytest.mark.fault(41)
def test_other_versions_are_otherwise_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume_with(strict=False, torch="0.0.1").position == Position(7)
    assert "checkpoint 7 was saved with other versions: torch 0.0.1 → " in caplog.text


def test_the_same_versions_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resume_with(strict=True).position == Position(7)
    assert caplog.text == ""


@pytest.mark.parametrize("extra", [{}, {"position": None}])
def test_a_checkpoint_without_the_position_of_training_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(BadFileError, match=r"checkpoint 7: state\.json .* position of training"):
        resume(saved(extra))


def test_the_learning_rate_is_that_of_the_checkpoints_step() -> None:
    """A save before the next step, of a best checkpoint that a resume evaluates, records it."""
    rates_set: list[int] = []
    resume(saved({"position": {"step": 7, "skipped": []}}), set_learning_rate=rates_set.append)
    assert rates_set == [6]
    resume(saved({"position": {"step": 0, "skipped": []}}), set_learning_rate=rates_set.append)
    assert rates_set == [6]


def test_an_evaluation_refuses_data_of_other_classes() -> None:
    """Other numbers of samples are fine: it may be another set of data."""
    source = SimpleNamespace(train=range(3), info=SimpleNamespace(class_names=["a", "b"], mean=(), std=()))
    then = {"num_samples": 5, "classes": hashlib.sha256(b"a\nb").hexdigest()[:16]}
    refuse_other_classes(Loaded(7, {"data": then}), cast(Any, source))
    refuse_other_classes(Loaded(7, {}), cast(Any, source))
    source.info.class_names = ["a", "c"]
    with pytest.raises(BadFileError, match="the classes are not those that checkpoint 7 was trained on"):
        refuse_other_classes(Loaded(7, {"data": then}), cast(Any, source))
