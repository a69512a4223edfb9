"""The loop's end by an error that all ranks raise alike: the save under way is not thrown away."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hpc_train.errors import NonFiniteError, StorageError
from hpc_train.experiment.config.schema import CheckpointConfig, EvaluationConfig
from hpc_train.experiment.config.training_sections import CompileConfig
from hpc_train.experiment.topology.batch_arithmetic import DEFAULT_SAVE_EVERY_MIN
from hpc_train.paths import RunPaths
from hpc_train.rank.signals import StopFlag
from hpc_train.run.attempts import AttemptRecord, EventLog, read_events
from hpc_train.training.checkpoint import writing
from hpc_train.training.checkpoint.checkpointer import Checkpointer
from hpc_train.training.compiling import Compilation
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement, StepFlags
from hpc_train.training.distributed.device import Precision
from hpc_train.training.distributed.process_group import Group
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.evaluation import Evaluator, Validation
from hpc_train.training.evaluation_outputs import EvaluationFiles, TaskFiles
from hpc_train.training.forward import TrainingSums
from hpc_train.training.health.progress import Progress
from hpc_train.training.loop import AutoInterval, BadSampleCount, Cadence, Saves, Trainer
from hpc_train.training.meters import Meters
from hpc_train.training.model_selection import ModelSelection
from hpc_train.training.non_finite import Guard, RollbackError
from hpc_train.training.optimization import Optimization
from hpc_train.training.step_times import FirstStep, StepProgress
from hpc_train.training.train_state import TrainState
from tests.checkpoint.checkpoint_runs import Trainee, folder_names
from tests.experiments import tiny_experiment
from tests.forwards import training_forward
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.usefixtures("one_rank_group")

LIMIT_S = HANG_LIMIT_S
CPU = torch.device("cpu")
#: Steps done before the one whose loss is NaN.
GOOD_STEPS = 3


class Task:
    """A loss that is NaN from a certain step on, in an evaluation always."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.inputs)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs * (torch.nan if batch.step >= GOOD_STEPS else 1)

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"count": torch.tensor(1.0), "loss": torch.tensor(torch.nan)}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return sums


class Steps:
    """Steps all of whose data are there."""

    def __init__(self, count: int = 10) -> None:
        self._steps = iter(range(count))

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> tuple[int, list[Batch]]:
        step = next(self._steps)
        return step, [batch_of(step)]

    def is_ready(self, within_s: float = 0.0) -> bool:
        return True


def batch_of(step: int) -> Batch:
    return Batch(step, 0, 1.0, torch.randn(4, 5), torch.zeros(4), torch.ones(4, dtype=torch.bool))


def make_trainer(run: RunPaths, policy: str, *, evaluate_every: int = 100, task: Any = None) -> Trainer:
    """Save after each step, keeping two; under ``skip`` the run has skipped as many as it may."""
    trainee = Trainee()
    config = tiny_experiment({"on_non_finite": policy, "max_non_finite": 1}).optimization
    precision = Precision("test", torch.float32, torch.float32)
    meters = Meters(1, 4, 4, 1000, None)
    checkpointer = trainee.checkpointer(run, keep=2)
    optimization = Optimization(trainee.optimizer, lambda step: 1.0, precision, CPU)
    group = Group(0, 1, CPU, None, None, Timeouts())  # type: ignore[arg-type]
    agreement, progress = Agreement(group, StopFlag()), Progress()
    state = TrainState(trainee.model, trainee.wrapped, trainee.strategy, optimization)
    step_progress = StepProgress(progress, meters.forward_time)
    forward = training_forward(
        task or Task(),
        scale=optimization.scale,
        on_begin=step_progress.begin_forward,
        on_end=step_progress.end_forward,
        training_sums=TrainingSums.of(task or Task(), CPU),
    )
    return Trainer(
        state=state,
        forward=forward,
        training=Steps(),
        step=0,
        cadence=Cadence(EvaluationConfig(every_steps=evaluate_every), CheckpointConfig(every_steps=1), 10, 4),
        guard=Guard(config, trainee.model, norm_counts=True, skips=1),
        max_norm=None,
        evaluator=Evaluator(state, forward, Validation(lambda: [batch_of(0)], 1), agreement, progress),
        selection=ModelSelection(cast(Any, None), agreement),
        saves=Saves(checkpointer, trainee.state, meters, lambda step: {}, lambda save: None),
        meters=meters,
        agreement=agreement,
        progress=progress,
        step_progress=step_progress,
        first_step=FirstStep(meters.times, Compilation(lambda graph, s: None), CompileConfig()),
        bad_samples=BadSampleCount(lambda: 0, lambda total: None),
        on_event=lambda event: None,
    )


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, work: str, until: str, of: str) -> None:
    """Have the thread that writes begin ``owner.work`` only once the checkpointer's ``until`` waits for it.

    ``of``: where the checkpointer keeps the save that ``until`` would wait for.
    """
    is_awaited = threading.Event()
    really_work, really_wait = getattr(owner, work), getattr(Checkpointer, until)

    def begin_late(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert is_awaited.wait(LIMIT_S)
            is_awaited.clear()
        return really_work(*arguments)

    def wait(checkpointer: Checkpointer) -> Any:
        if getattr(checkpointer, of) is not None:
            is_awaited.set()
        return really_wait(checkpointer)

    monkeypatch.setattr(owner, work, begin_late)
    monkeypatch.setattr(Checkpointer, until, wait)


def hold_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, writing.CheckpointWriter, "_commit", "finish", "_under_way")


@pytest.mark.fault(20)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_loss_that_is_not_finite_ends_no_save_that_was_begun_before(
    policy: str, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_saves(monkeypatch)
    kind = RollbackError if policy == "rollback" else NonFiniteError
    with pytest.raises(kind, match="is NaN or infinite"):
        make_trainer(run, policy).train()
    assert folder_names(run)[-1] == f"step-{GOOD_STEPS:08d}"


@pytest.mark.fault(20)
def test_an_evaluation_that_is_not_finite_ends_no_save_that_was_begun_before(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_saves(monkeypatch)
    with pytest.raises(NonFiniteError, match="the val loss is nan at step 2"):
        make_trainer(run, "stop", evaluate_every=2).train()
    assert folder_names(run) == ["step-00000001"]


@pytest.mark.parametrize(("waited_s", "saved"), [(59.0, [2]), (60.0, [1, 2])])
def test_a_save_is_due_by_the_time_since_the_last_one(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, waited_s: float, saved: list[int]
) -> None:
    trainer = make_trainer(run, "skip")
    trainer.cadence = Cadence(EvaluationConfig(every_steps=100), CheckpointConfig(every_min=1), 2, 4)
    trainer.training = Steps(2)
    now = trainer._save_began_at + waited_s
    monkeypatch.setattr("hpc_train.training.loop.time.monotonic", lambda: now)
    assert trainer.train()
    assert folder_names(run) == [f"step-{step:08d}" for step in saved]


@pytest.mark.parametrize(("waited_s", "saved"), [(119.0, [2]), (120.0, [1, 2])])
def test_an_automatic_interval_replaces_that_of_the_file(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, waited_s: float, saved: list[int]
) -> None:
    """Of one crash after an hour, with a stall of 2 s per save: √(2 · 2 s · 3600 s)."""
    trainer, attempt = make_trainer(run, "skip"), run.attempt(1)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    times = {"end": "2026-11-21T07:00:00+00:00", "events": {"first_step": "2026-11-21T06:00:00.000+00:00"}}
    measured: dict[str, Any] = {"checkpoint_stall_s": 20.0, "save_interval": {"saves": 10}}
    crashed = AttemptRecord(1, times["end"], [], None, cause="crash", **times, **measured)
    now = trainer._save_began_at
    monkeypatch.setattr("hpc_train.training.loop.time.monotonic", lambda: now)
    events = EventLog(attempt)
    trainer.interval = AutoInterval(events, [crashed])
    trainer.cadence = Cadence(EvaluationConfig(every_steps=100), CheckpointConfig(every_min=10), 2, 4)
    trainer.training = Steps(2)
    now += waited_s
    assert trainer.train()
    assert folder_names(run) == [f"step-{step:08d}" for step in saved]
    trainer.interval.saved(stall_s=13.0)  # the mean is 3 s now
    events.note("first_step")
    noted = read_events(attempt).save_interval
    assert noted == {"every_s": pytest.approx((6 * (3600 + waited_s)) ** 0.5), "saves": 1, "stall_s": 3.0,
                     "interruptions": 1, "mtbf_s": pytest.approx(3600 + waited_s)}  # fmt: skip


def test_a_step_takes_no_longer_because_a_save_copies_the_weights(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rows, now = make_trainer(run, "skip"), list[Any](), 0.0
    trainer.cadence = Cadence(EvaluationConfig(every_steps=100), CheckpointConfig(every_steps=1), 3, 4)
    trainer.training, times = Steps(3), trainer.meters.times
    checkpointer, really_close = trainer.saves.checkpointer, trainer.saves.close
    really_wait = checkpointer.wait_staged

    def wait_long() -> None:
        nonlocal now
        now += 5.0
        really_wait()

    def close() -> None:
        rows.append(times.row(3))
        really_close()

    monkeypatch.setattr("hpc_train.training.loop.time.monotonic", lambda: now)
    monkeypatch.setattr(checkpointer, "wait_staged", wait_long)
    monkeypatch.setattr(trainer.saves, "close", close)
    times.row(0)
    assert trainer.train() and now >= 15.0
    assert rows[0]["step_s"] < 1e-6


def test_before_a_rollback_old_checkpoints_are_gone(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ranks would look at what goes away meanwhile."""
    hold(monkeypatch, writing.checkpoints, "prune", "close", "_clearing")
    with pytest.raises(RollbackError):
        make_trainer(run, "rollback").train()
    assert folder_names(run) == ["step-00000002", "step-00000003"]


def test_a_loss_that_is_not_finite_ends_the_next_step(run: RunPaths) -> None:
    trainer = make_trainer(run, "stop")
    trainer.cadence = replace(trainer.cadence, checkpoint=CheckpointConfig())
    with pytest.raises(NonFiniteError, match="the train loss is NaN or infinite on a rank"):
        trainer.train()
    assert trainer.step == GOOD_STEPS + 2, "the step that met it, and the one whose exchange reported it"


def test_a_save_that_failed_ends_the_next_step(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    trainer = make_trainer(run, "stop")
    trainer.cadence = replace(trainer.cadence, checkpoint=CheckpointConfig(every_steps=2))
    monkeypatch.setattr(writing.CheckpointWriter, "_commit", refuse)
    has_failed = StepFlags(has_failed=True)
    monkeypatch.setattr(trainer, "_own_flags", lambda: has_failed if trainer.step == 2 else StepFlags())
    with pytest.raises(StorageError, match="full"):
        trainer.train()
    assert trainer.step == 3


def test_bad_samples_of_all_ranks_are_checked_after_the_step(run: RunPaths) -> None:
    seen: list[int] = []
    trainer = make_trainer(run, "rollback")
    trainer.bad_samples = BadSampleCount(lambda: trainer.step, seen.append)
    with pytest.raises(RollbackError):
        trainer.train()
    assert [count for count in seen if count] == [1, 2, 3]


def test_the_first_batch_is_shown_once_before_anything_is_computed_of_it(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, seen = make_trainer(run, "rollback"), []
    task = trainer.forward.task
    forward = task.forward
    monkeypatch.setattr(task, "forward", lambda *given: seen.append("forward") or forward(*given))  # type: ignore[func-returns-value]
    trainer.first_step.on_batch = lambda batch: seen.append(f"batch of step {batch.step}")
    with pytest.raises(RollbackError):
        trainer.train()
    assert seen == ["batch of step 0", *["forward"] * (GOOD_STEPS + 1)]


def test_files_of_an_evaluation_precede_its_row(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(run, "rollback", evaluate_every=GOOD_STEPS)
    output = TaskFiles(cast(Any, SimpleNamespace(files=lambda sums: {"table.csv": b"1,2"})))
    assert trainer.evaluator is not None
    trainer.evaluator = replace(trainer.evaluator, outputs=[output], folder=EvaluationFiles(run))
    table, seen = run.evaluation(GOOD_STEPS) / "table.csv", []
    monkeypatch.setattr(trainer.meters, "val_row", lambda step, _: seen.append((step, table.read_bytes())))
    with pytest.raises(RollbackError):
        trainer.train()
    assert seen == [(GOOD_STEPS, b"1,2")]


STEPS_PER_EPOCH = 5
TOTAL_STEPS = 12


def cadence(evaluation: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None) -> Cadence:
    configs = EvaluationConfig(**evaluation or {}), CheckpointConfig(**checkpoint or {})
    return Cadence(*configs, TOTAL_STEPS, STEPS_PER_EPOCH)


@pytest.mark.parametrize(("evaluation", "steps"), [
    ({}, [5, 10, 12]),
    ({"every_epochs": 1}, [5, 10, 12]),
    ({"every_epochs": 2}, [10, 12]),
    ({"every_epochs": 9}, [12]),
    ({"every_steps": 4}, [4, 8, 12]),
    ({"every_steps": 7}, [7, 12]),
    ({"every_steps": 1}, list(range(1, 13))),
])  # fmt: skip
def test_evaluations_are_due_by_interval_and_at_end(evaluation: dict[str, Any], steps: list[int]) -> None:
    """And never before the first step."""
    schedule = cadence(evaluation)
    assert [step for step in range(TOTAL_STEPS + 1) if schedule.evaluates(step)] == steps


def test_a_save_takes_the_place_of_an_evaluation_by_a_job() -> None:
    found = replace(cadence(checkpoint={"every_steps": 4}), by_job=True)
    steps = range(TOTAL_STEPS + 1)
    assert [step for step in steps if found.evaluates_by_job(step)] == [5, 10, 12]
    assert not any(map(found.evaluates, steps))
    assert [step for step in steps if step and found.saves(step)] == [4, 5, 8, 10, 12]


@pytest.mark.parametrize(("checkpoint", "steps", "every_s"), [
    ({}, [12], DEFAULT_SAVE_EVERY_MIN * 60),
    ({"every_min": 0.5}, [12], 30.0),
    ({"every_steps": 4}, [4, 8, 12], None),
    ({"every_steps": 5}, [5, 10, 12], None),
    ({"every_steps": 100}, [12], None),
    ({"every_steps": 4, "keep_every": 6}, [4, 6, 8, 12], None),
    ({"keep_every": 5}, [5, 10, 12], DEFAULT_SAVE_EVERY_MIN * 60),
])  # fmt: skip
def test_saves_by_steps_or_by_time_and_always_at_the_end(
    checkpoint: dict[str, Any], steps: list[int], every_s: float | None
) -> None:
    found = cadence(checkpoint=checkpoint)
    assert [step for step in range(1, TOTAL_STEPS + 1) if found.saves(step)] == steps
    assert found.save_every_s == every_s
