"""``python -m hpc_train.models.names``: what commands, which don't import torch, ask of timm and torchvision.

Prints one JSON object. Without arguments: the names of models and data sets, for hints in ``validate``.
With ``--batchnorm NAME [--args JSON]``: whether that model has BatchNorm, built without memory.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from typing import Any

import torch

from hpc_train.config.training_sections import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.building import build_model
from hpc_train.models.inspection import has_batchnorm
from hpc_train.runtime.data_info import DataInfo


def list_names() -> dict[str, list[str]]:
    """Return the names that the built-in providers know, and what can optimise and schedule."""
    import timm
    import timm.optim

    from hpc_train.models.torchvision import model_names

    return {
        "timm": timm.list_models(),
        "torchvision": model_names(),
        "datasets": _dataset_names(),
        "timm_optimizers": timm.optim.list_optimizers(),
        "torch_schedules": [name for name in torch.optim.lr_scheduler.__all__ if name != "LRScheduler"],
    }


def batchnorm(name: str, args: dict[str, Any]) -> dict[str, bool]:
    """Tell of a model, as the file names it, whether it has BatchNorm; it is built on the meta device."""
    info = DataInfo(num_classes=10, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name, args=args), info)
    return {"has_batchnorm": has_batchnorm(model)}


def _dataset_names() -> list[str]:
    from torchvision import datasets

    return sorted(name for name in datasets.__all__ if _has_splits(getattr(datasets, name)))


def _has_splits(kind: object) -> bool:
    """Tell whether a class of torchvision.datasets has targets, and parts training from test data."""
    if not inspect.isclass(kind):
        return False
    parameters = inspect.signature(kind).parameters
    has_targets = "target_transform" in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )
    return has_targets and bool({"train", "split"} & parameters.keys())


def main(arguments: list[str] | None = None) -> int:
    """Print the answer; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpc_train.models.names", allow_abbrev=False)
    parser.add_argument("--batchnorm", metavar="NAME")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON")
    given = parser.parse_args(arguments)
    try:
        answer = batchnorm(given.batchnorm, given.args) if given.batchnorm else list_names()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
