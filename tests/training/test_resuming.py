"""What a rank makes of a checkpoint: other versions are reported, or refused where the file asks for that."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hpc_train.errors import BadFileError, ExitCode
from hpc_train.experiment.topology.degrees import Degrees
from hpc_train.launchers.rank_processes import common_environment
from hpc_train.rank.env import THREADS_BY_SHARE
from hpc_train.run.versions import versions
from hpc_train.training.checkpoint.checkpointer import Loaded
from hpc_train.training.checkpoint.control_group import ControlGroup
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.resuming import (
    Hardware,
    OtherVersionsError,
    Resumed,
    conditions,
    difference,
    processor,
    refuse_other_classes,
    take_over,
)
from tests.run.runs import small_run
from tests.training.resumes import resume


def resume_with(*, strict: bool, **versions_then: Any) -> Resumed:
    """Load a checkpoint of step 7 that was saved with these versions, and otherwise today's."""
    position = {"step": 7, "skipped": []}
    return resume(saved({"position": position, "versions": versions() | versions_then}), strict=strict)


def saved(extra: dict[str, Any]) -> SimpleNamespace:
    """Return a checkpointer whose newest checkpoint, of step 7, has this besides its tensors."""
    return SimpleNamespace(load_newest=lambda state: Loaded(7, extra), ranks=ALONE)


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
        caplog.clear()
        assert resume_with(strict=True).position == Position(7)
    assert caplog.text == "", "the same versions"


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
    source = SimpleNamespace(train=range(3), info=DataInfo(2, 3, (), (), ("a", "b")))
    then = {"num_samples": 5, "classes": hashlib.sha256(b"a\nb").hexdigest()[:16]}
    refuse_other_classes(Loaded(7, {"data": then}), cast(Any, source))
    refuse_other_classes(Loaded(7, {}), cast(Any, source))
    source.info = DataInfo(2, 3, (), (), ("a", "c"))
    with pytest.raises(BadFileError, match="the classes are not those that checkpoint 7 was trained on"):
        refuse_other_classes(Loaded(7, {"data": then}), cast(Any, source))


CPU = torch.device("cpu")
ALONE = ControlGroup(0, 1, None)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads by this rank's share of the cores, as the launcher tells."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(THREADS_BY_SHARE, "1")
    yield
    torch.set_num_threads(before)


def taken_over(then: object) -> tuple[Hardware, list[str]]:
    warnings: list[str] = []
    return take_over(then, 7, CPU, ALONE, warnings.append), warnings


def hardware(**changes: Any) -> dict[str, Any]:
    return asdict(Hardware(processor(CPU), [2])) | changes


def test_threads_of_the_checkpoint_are_used_on_fewer_and_on_more_cores() -> None:
    now, warnings = taken_over(hardware(threads=[1]))
    assert (torch.get_num_threads(), now.threads, warnings) == (1, [1], [])
    now, warnings = taken_over(hardware(threads=[3]))
    assert (torch.get_num_threads(), now.threads) == (3, [3])
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "a rank computes with 3 threads as before, where its share of the cores is 1: slower"
    )


def test_threads_that_the_user_set_stay_and_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(THREADS_BY_SHARE)
    now, warnings = taken_over(hardware(threads=[3]))
    assert (torch.get_num_threads(), now.threads) == (2, [2])
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "checkpoint 7 was computed with other threads per rank: 3 then, 2 now (OMP_NUM"
    )


def test_another_processor_is_reported() -> None:
    _, warnings = taken_over(hardware(processor="Abacus 3000"))
    words = (
        f"checkpoint 7 was computed on another processor: Abacus 3000 → {processor(CPU)}; the weights may "
    )
    assert warnings == [f"{words}differ in the last bit from here on"]


@pytest.mark.parametrize(
    "then",
    [
        None,
        [],
        {},
        "same",
        hardware(threads=[2, 2]),
        hardware(threads=["3"]),
        hardware(threads=[0], processor=3),
    ],
)
def test_the_same_no_or_forged_facts_and_other_numbers_of_ranks_change_nothing(then: object) -> None:
    assert taken_over(hardware() if then == "same" else then) == (Hardware(processor(CPU), [2]), [])


def test_the_local_launcher_distinguishes_its_own_number_from_the_users(tmp_path: Path) -> None:
    paths = small_run(tmp_path)
    bare = {
        key: value for key, value in os.environ.items() if key not in {"OMP_NUM_THREADS", THREADS_BY_SHARE}
    }
    ours = common_environment(bare, paths, 1, 1)
    assert ours["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0))) and THREADS_BY_SHARE in ours
    theirs = common_environment(bare | {"OMP_NUM_THREADS": "5"}, paths, 1, 1)
    assert theirs["OMP_NUM_THREADS"] == "5" and THREADS_BY_SHARE not in theirs


TWO = conditions(2, "ddp", Degrees(replicate=2))
ONE = conditions(1, "ddp", Degrees())


def difference_of(then: dict[str, Any], now: dict[str, Any], **facts: bool) -> str | None:
    return difference(then, now, 7, **({"has_batchnorm": False, "is_synced": False} | facts))


@pytest.mark.parametrize(
    ("then", "now", "change"),
    [
        (TWO, ONE, "1 rank under ddp from checkpoint 7 of 2 ranks under ddp"),
        (
            TWO,
            conditions(2, "fsdp", Degrees(shard=2)),
            "2 ranks under fsdp from checkpoint 7 of 2 ranks under ddp",
        ),
        (
            conditions(4, "hsdp", Degrees(replicate=2, shard=2)),
            conditions(4, "hsdp", Degrees(shard=4)),
            "4 ranks under hsdp (shard 4) from checkpoint 7 of 4 ranks under hsdp (replicate 2 × shard 2)",
        ),
    ],
    ids=["ranks", "strategy", "degrees"],
)
@pytest.mark.parametrize("has_batchnorm", [False, True])
def test_what_differs_is_reported(
    then: dict[str, Any], now: dict[str, Any], change: str, has_batchnorm: bool
) -> None:
    """BatchNorm's statistics do not depend on the ranks, unless they are synchronized."""
    assert difference_of({"position": {}, "seed": 3} | now, now, has_batchnorm=True, is_synced=True) is None
    report = difference_of(then, now, has_batchnorm=has_batchnorm)
    assert report is not None and report.startswith(f"continuing with {change}: the same micro-batches in ")
    assert report.endswith("weights equal an uninterrupted run's up to rounding, not bitwise")


def test_synced_statistics_and_other_stages_promise_no_equal_weights() -> None:
    synced = difference_of(TWO, ONE, has_batchnorm=True, is_synced=True)
    assert synced is not None and "parallel.sync_batchnorm" in synced and "rounding" not in synced
    stages = difference_of(TWO, conditions(2, "pipeline", Degrees(pipeline=2)))
    assert stages is not None and "dropout behind a pipeline's first stage" in stages
