"""Rules on the loss: ``optimization.loss`` and settings that change the targets, by the facts of the task."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.config.section_args import args_problems
from hpc_train.data_facts.by_name import data_facts, task_facts
from hpc_train.data_facts.losses import DiceArgs, Losses
from hpc_train.errors import shortened
from hpc_train.registry import suggestion
from hpc_train.validate.base import Rule, rule

_LOSS = ("optimization", "loss")


@rule("task", "optimization.loss")
def the_task_has_the_loss(experiment: Experiment) -> Iterator[Problem]:
    """``optimization.loss`` must be one of the task's, with arguments that it takes."""
    losses, loss = task_facts(experiment.task).losses, experiment.optimization.loss
    if losses is None or loss is None:
        return
    if loss.name not in losses:
        yield _unknown_loss(experiment.task, loss.name, losses)
        return
    yield from args_problems((*_LOSS, "args"), loss.name, losses[loss.name], loss.args)


def _unknown_loss(task: str, name: str, losses: Losses) -> Problem:
    remedy = suggestion(name, losses, None if losses else "take it out")
    list_of_losses = f" (it has {', '.join(losses)})" if losses else ""
    return Problem((*_LOSS, "name"), f"{task} has no loss '{shortened(name)}'{list_of_losses}", remedy)


@rule("task", "optimization.label_smoothing")
def smoothing_needs_classes(experiment: Experiment) -> Iterator[Problem]:
    """Label smoothing needs a task with classes."""
    if experiment.optimization.label_smoothing > 0 and task_facts(experiment.task).smooths_labels is False:
        message = f"spreads targets over classes, which {experiment.task} does not have"
        yield Problem(("optimization", "label_smoothing"), message, "take it out", on_key=True)


@rule("task", "optimization.loss", "optimization.label_smoothing")
def smoothing_needs_cross_entropy(experiment: Experiment) -> Iterator[Problem]:
    """Label smoothing changes the cross entropy, which ``dice`` alone does not have."""
    losses, loss = task_facts(experiment.task).losses, experiment.optimization.loss
    if experiment.optimization.label_smoothing == 0 or losses is None or loss is None:
        return
    if losses.get(loss.name) is DiceArgs and loss.args.get("cross_entropy", 0) == 0:
        message = "has no effect on dice, which has no cross entropy"
        remedy = "take it out, or write optimization.loss: {name: dice, args: {cross_entropy: 1}}"
        yield Problem(("optimization", "label_smoothing"), message, remedy, on_key=True)


@rule("task", "data.name", "optimization.mixup", "optimization.cutmix", "optimization.micro_batch_size")
def samples_can_be_mixed(experiment: Experiment) -> Iterator[Problem]:
    """mixup and CutMix need a task with soft targets, and pairs of samples in a micro-batch."""
    optimization = experiment.optimization
    for key in ("mixup", "cutmix"):
        if getattr(optimization, key) == 0:
            continue
        path, modality = ("optimization", key), data_facts(experiment.data.name).modality
        if task_facts(experiment.task).mixes_targets is False:
            message = f"mixes targets, which {experiment.task} can't"
            yield Problem(path, message, "take it out", on_key=True)
        elif key == "cutmix" and modality not in ("images", None):
            message = f"cuts out parts of images, and {shortened(experiment.data.name)} has {modality}"
            yield Problem(path, message, "take it out, or write mixup", on_key=True)
        elif optimization.micro_batch_size == 1:
            message = "mixes the samples of a micro-batch, which has one"
            yield Problem(path, message, "write a larger optimization.micro_batch_size", on_key=True)
        elif optimization.micro_batch_size == "auto":
            message = "mixes the samples of a micro-batch, and auto would make its size depend on memory"
            yield Problem(path, message, "write a number for optimization.micro_batch_size", on_key=True)


RULES: tuple[Rule, ...] = (
    the_task_has_the_loss,
    smoothing_needs_classes,
    smoothing_needs_cross_entropy,
    samples_can_be_mixed,
)
