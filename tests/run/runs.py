"""A small experiment and its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.create import create_run


def small_experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "small",
            "task": "classification",
            "model": {"name": "timm/resnet18"},
            "data": {"name": "digits"},
            "optimization": {
                "steps": 10,
                "global_batch_size": 8,
                "micro_batch_size": 4,
                "optimizer": {"name": "sgd", "lr": 0.1},
            },
        }
        | changes
    )


def small_run(folder: Path, **changes: Any) -> RunPaths:
    """Create the run ``abc`` under ``folder``."""
    paths = RunPaths(folder / "small" / "abc")
    assert create_run(paths, small_experiment(**changes), "abc", 10)
    return paths


def record_of(attempt: AttemptPaths) -> AttemptRecord:
    """Return the record of an attempt that has one."""
    record = read_record(attempt)
    assert record is not None
    return record
