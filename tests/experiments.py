"""Small experiments for tests that need a checked file, whatever it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_train.experiment.config.schema import Experiment


def tiny_experiment(optimization: Mapping[str, Any] | None = None, **sections: Any) -> Experiment:
    """Return an experiment with these keys of ``optimization`` and these sections instead of the defaults."""
    defaults = {
        "steps": 4,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    file = {
        "name": "tiny",
        "task": "classification",
        "model": {"name": "timm/resnet18"},
        "data": {"name": "digits"},
        "optimization": defaults | dict(optimization or {}),
    }
    return Experiment.model_validate(file | sections)
