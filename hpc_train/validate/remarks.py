"""Remarks on settings that are valid but probably not intended; ``validate`` and ``plan`` print them."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from hpc_train.config.explanations import usual_mode
from hpc_train.config.problems import KeyPath, Problem
from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import task_facts


def remarks(experiment: Experiment) -> Iterator[Problem]:
    """Yield remarks on each ``mode`` for which a worse value of the task's metric is better."""
    metrics = task_facts(experiment.task).metrics
    for path, metric, mode in _modes(experiment):
        name = metric.rpartition("/")[2].removeprefix("ema_")
        # The task's own metric names: a class may be called error.
        usual = next((usual_mode(pattern) for pattern in metrics if fnmatchcase(name, pattern)), None)
        if usual is not None and mode != usual:
            lower = "lower" if mode == "min" else "higher"
            message = f"{mode} takes a {lower} {metric} for the better one"
            yield Problem((*path, "mode"), message, f"write {usual}, unless that is what you want")


def _modes(experiment: Experiment) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the sections that look for the best value of a metric, with the metric and its mode."""
    if (best := experiment.checkpoint.best) is not None:
        yield ("checkpoint", "best"), best.metric, best.mode
    if (stopping := experiment.early_stopping) is not None:
        yield ("early_stopping",), stopping.metric, stopping.mode
    if (search := experiment.sweep.search) is not None:
        yield ("sweep", "search"), search.metric, search.mode
