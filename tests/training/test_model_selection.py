"""``checkpoint.best`` and ``early_stopping`` in the loop: what is saved, kept, and when the run ends."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import BestConfig, CheckpointConfig, EarlyStoppingConfig, Experiment
from hpc_train.paths import RunPaths
from hpc_train.run.best import BestSoFar
from hpc_train.run.checkpoints import kept_best
from hpc_train.run.early_stopping import MedianRule
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.consensus import Agreement
from hpc_train.training.loop import Saves, Trainer
from hpc_train.training.model_selection import ModelSelection, check_metrics
from tests.checkpoint.checkpoint_runs import Trainee, folder_names
from tests.experiments import tiny_experiment
from tests.run.test_checkpoints import write_checkpoint
from tests.training.test_loop import Task, make_trainer

pytestmark = pytest.mark.usefixtures("one_rank_group")

#: Of the evaluations after steps 1, 2, …
ACCURACIES = [0.1, 0.6, 0.4, 0.5, 0.2, 0.7, 0.3, 0.3, 0.3, 0.3]
BEST, STOPPING = BestConfig(metric="accuracy", mode="max"), EarlyStoppingConfig(
    metric="accuracy", mode="max", patience=3
)  # fmt: skip


class StepTask(Task):
    """A loss that training can lower, and the accuracies above, by the step of the trainer."""

    trainer: Trainer

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs

    def sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"accuracy": torch.tensor(ACCURACIES[self.trainer.step - 1], dtype=torch.float64)}


def experiment(*, best: BestConfig | None = None, **sections: Any) -> Experiment:
    config = tiny_experiment({"steps": 10}, **sections)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"best": best})})


def trainer_of(
    run: RunPaths, rows: list[dict[str, Any]], *, keep: int = 2, every: int = 100, **sections: Any
) -> Trainer:
    """Evaluate after each step, save every ``every`` steps; ``rows``: those of evaluations so far."""
    task = StepTask()
    trainer, trainee = make_trainer(run, "stop", evaluate_every=1, task=task), Trainee()
    task.trainer = trainer
    trainer.cadence = replace(trainer.cadence, checkpoint=CheckpointConfig(every_steps=every))
    selection = ModelSelection.of(experiment(**sections), trainer.agreement, rows)
    trainer.selection = selection
    trainer.saves = Saves(
        trainee.checkpointer(run, keep=keep),
        trainer.state.state,
        trainer.meters,
        lambda step: selection.extra(),
        lambda save: None,
    )
    return trainer


def rows_of(accuracies: list[float]) -> list[dict[str, Any]]:
    """Return the rows of evaluations after steps 1, 2, …"""
    return [
        {"split": "val", "step": step, "accuracy": accuracy} for step, accuracy in enumerate(accuracies, 1)
    ]


def test_the_best_checkpoint_is_saved_at_its_step_and_never_pruned(run: RunPaths) -> None:
    assert trainer_of(run, [], best=BEST, every=3).train()
    # 1, 2 and 6 were the best, 3, 6 and 9 due, 10 is the last; two are kept, and the best.
    assert folder_names(run) == ["step-00000006", "step-00000009", "step-00000010"]
    found = kept_best(run)
    assert found is not None and (found.metric, found.value, found.step) == ("accuracy", 0.7, 6)


def test_without_the_key_nothing_else_is_saved(run: RunPaths) -> None:
    assert trainer_of(run, [], every=3).train()
    assert folder_names(run) == ["step-00000009", "step-00000010"]
    assert kept_best(run) is None
    assert "best" not in json.loads(run.checkpoint(10).manifest.read_text())


@pytest.mark.parametrize("sections", [{"best": BEST}, {"early_stopping": STOPPING}, {}])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_the_best_evaluation_is_shown_whatever_names_its_metric(
    run: RunPaths, sections: dict[str, Any], num_rows: int
) -> None:
    """Without a key, the task's first metric; also after a resume."""
    selection = trainer_of(run, rows_of(ACCURACIES[:num_rows]), **sections).selection
    assert (selection.shown_best() is None) == (num_rows == 0)
    for step in range(num_rows + 1, 6):
        selection.evaluated(step, {"accuracy": ACCURACIES[step - 1]})
    assert selection.shown_best() == {"metric": "accuracy", "value": 0.6, "step": 2, "mode": "max"}


def test_of_an_own_task_the_first_metric_is_shown(run: RunPaths) -> None:
    selection = trainer_of(run, [{"split": "val", "step": 1, "dice_error": 0.5, "dice": 0.2}]).selection
    selection.evaluated(2, {"dice_error": 0.3, "dice": 0.1})
    selection.evaluated(3, {"dice_error": 0.4, "dice": 0.9})
    assert selection.shown_best() == {"metric": "dice_error", "value": 0.3, "step": 2, "mode": "min"}


def resumed(run: RunPaths, num_rows: int, step: int, **sections: Any) -> Trainer:
    """Return the trainer of a run that resumes at ``step`` with these rows of evaluations."""
    trainer = trainer_of(run, rows_of(ACCURACIES[:num_rows]), **sections)
    trainer.step = step
    trainer.training._steps = iter(range(step, 10))  # type: ignore[attr-defined]
    if num_rows == step:
        trainer.meters.has_val_row = lambda step: True  # type: ignore[method-assign]
    return trainer


def test_the_run_stops_after_patience_evaluations_without_improvement(run: RunPaths) -> None:
    trainer = trainer_of(run, [], best=BEST, early_stopping=STOPPING)
    assert trainer.train()
    assert trainer.step == 5
    assert folder_names(run) == ["step-00000002", "step-00000005"], "the best, and the last one"
    assert trainer.selection is not None
    assert trainer.selection.reason == (
        "stopped early: no better accuracy in 3 evaluations (accuracy 0.6 at step 2)"
    )


def test_a_resumed_run_continues_the_count(run: RunPaths) -> None:
    """Three evaluations without improvement, two of them before."""
    trainer = resumed(run, 4, 4, early_stopping=STOPPING, best=BEST)
    assert trainer.train()
    assert trainer.step == 5
    best = kept_best(run)
    assert best is not None and best.step == 2


def test_a_run_that_had_stopped_trains_no_further_step(run: RunPaths) -> None:
    """Killed between its last checkpoint and its status."""
    trainer = resumed(run, 5, 5, early_stopping=STOPPING)
    assert trainer.train()
    assert trainer.step == 5


def test_an_evaluation_that_was_cut_short_makes_its_checkpoint_the_best(run: RunPaths) -> None:
    assert resumed(run, 5, 6, best=BEST).train()
    assert folder_names(run) == ["step-00000006", "step-00000010"]


def test_an_unknown_metric_ends_the_run_at_its_first_evaluation(run: RunPaths) -> None:
    stopping = EarlyStoppingConfig(metric="acuracy", mode="max", patience=3)
    trainer = trainer_of(run, [], early_stopping=stopping)
    expected = "early_stopping.metric: acuracy is not a metric .* write one of accuracy"
    with pytest.raises(BadFileError, match=expected):
        trainer.train()
    assert trainer.step == 1


def test_rank_0_decides_for_all() -> None:
    """Another rank sees no rows."""

    class Follower(Agreement):
        def __init__(self) -> None:
            self.decision = 0

        def rank_0_says(self, value: int) -> int:
            return self.decision

    agreement = Follower()
    selection = ModelSelection.of(experiment(best=BEST, early_stopping=STOPPING), agreement, ())
    agreement.decision = 1
    selection.evaluated(10, {"accuracy": 0.5})
    assert selection.saves(10) and not selection.has_stopped
    agreement.decision = 2
    selection.evaluated(20, {"accuracy": 0.5})
    assert selection.saves(20) and selection.has_stopped
    assert ModelSelection.of(experiment(early_stopping=STOPPING), agreement, ()).has_stopped


def alone() -> Agreement:
    agreement = Agreement.__new__(Agreement)
    agreement.rank_0_says = lambda said: said  # type: ignore[method-assign]
    return agreement


def test_a_best_that_is_followed_from_a_resume_on_has_a_checkpoint(run: RunPaths) -> None:
    for step in (3, 4):
        write_checkpoint(run, step, attempt=1)
    selection = ModelSelection.of(experiment(best=BEST), alone(), rows_of([0.9, 0.8, 0.5, 0.6, 0.7]), run)
    assert selection.best is not None and selection.best.best is not None
    assert (selection.best.best.step, selection.best.best.value) == (4, 0.6)
    selection.evaluated(6, {"accuracy": 0.65})
    assert selection.saves(6)


def test_a_metric_that_only_some_evaluations_have_is_no_improvement() -> None:
    selection = ModelSelection.of(experiment(best=BEST, early_stopping=STOPPING), alone(), ())
    selection.evaluated(1, {"loss": 1.0}, ["accuracy"])
    assert not selection.saves(1) and not selection.has_stopped
    selection.evaluated(2, {"loss": 1.0, "accuracy": 0.5}, ["accuracy"])
    assert selection.saves(2)
    selection.evaluated(3, {"loss": 1.0}, ["accuracy"])
    rows = [{"step": step, "loss": 1.0} | ({"accuracy": 0.5} if step == 2 else {}) for step in (1, 2, 3)]
    resumed = ModelSelection.of(selection.config, alone(), rows, optional=["accuracy"])
    assert resumed.stopping == selection.stopping
    with pytest.raises(BadFileError, match=r"^checkpoint\.best\.metric: accuracy is not a metric"):
        selection.evaluated(3, {"loss": 1.0}, ["iou_cat"])


def test_metrics_of_the_average_are_known_before_training() -> None:
    config = experiment(best=BestConfig(metric="ema_accuracy", mode="max"))
    with pytest.raises(BadFileError, match=r"checkpoint.best.metric: ema_accuracy .* one of accuracy, loss$"):
        check_metrics(config, ["loss", "accuracy"])
    ema = config.optimization.model_copy(update={"ema": True})
    check_metrics(config.model_copy(update={"optimization": ema}), ["loss", "accuracy"])


def other_run(folder: Path, accuracies: list[float]) -> None:
    """Write the evaluations of another run of the experiment."""
    folder.mkdir()
    RunPaths(folder).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows_of(accuracies)))


def median_selection(run: RunPaths, rows: list[dict[str, Any]], **keys: Any) -> ModelSelection:
    stopping = EarlyStoppingConfig(metric="accuracy", mode="max", **keys)
    return ModelSelection.of(experiment(early_stopping=stopping), alone(), rows, run)


def test_a_run_below_the_median_of_others_at_its_step_ends(run: RunPaths) -> None:
    for name, accuracies in {"a": [0.2, 0.3], "b": [0.2, 0.9], "c": [0.2, 0.7], "d": [0.9]}.items():
        other_run(run.folder.with_name(name), accuracies)
    run.folder.with_name("e").mkdir()  # has not evaluated yet
    selection = median_selection(run, [], median_after=1)
    selection.evaluated(1, {"accuracy": 0.55})
    assert not selection.has_stopped and selection.reason is None
    selection.evaluated(2, {"accuracy": 0.5})  # the best so far is 0.55; d has not reached step 2
    assert selection.has_stopped and selection.saves(2)
    assert selection.reason == ("stopped early: best accuracy by step 2: 0.55; median of 3 other runs: 0.7")
    rows = rows_of([0.55, 0.55])
    assert median_selection(run, rows, median_after=1).has_stopped, "a run that resumes ends there too"
    assert not median_selection(run, rows, median_after=3).has_stopped
    (run.folder.with_name("c") / "metrics.jsonl").unlink()
    assert not median_selection(run, rows, median_after=1).has_stopped, "two others say little"


def test_an_extended_run_is_counted_once(run: RunPaths) -> None:
    for name, accuracies in (("a", [0.9]), ("b", [0.9]), ("c", [0.9]), ("longer", [0.9, 0.9])):
        other_run(run.siblings.folder / name, accuracies)
    rows = rows_of([0.5])
    assert median_selection(run, rows, median_after=1).reason is not None
    for name in ("a", "b"):
        (run.siblings.folder / name / "run.json").write_text('{"extended_by": ["longer"]}')
    assert not median_selection(run, rows, median_after=1).has_stopped, "two others say little"


def test_a_lower_loss_than_the_median_goes_on(run: RunPaths) -> None:
    for name in "abc":
        other_run(run.folder.with_name(name), [0.4])
    stopping = {"metric": "accuracy", "mode": "min", "median_after": 1}
    rule = MedianRule(run, EarlyStoppingConfig.model_validate(stopping))
    found = {}
    for value in (0.3, 0.4, 0.5, math.nan):
        so_far = BestSoFar("accuracy", "min")
        so_far.add(1, value)
        found[value] = rule.reason(so_far, 1)
    assert [reason is not None for reason in found.values()] == [False, False, True, True]
