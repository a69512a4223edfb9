"""Names of models, data sets and optimizers in libraries, for hints in ``validate``.

``validate.model_facts`` calls it in a child, since commands don't import torch; ``python -m
hpc_train.training.models.names`` prints them.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from contextlib import suppress

from hpc_train.experiment.data_facts.built_in import MODELS


def list_names() -> dict[str, list[str]]:
    """Return the names of the built-in providers and optimizers."""
    import timm.optim
    from torchvision import datasets

    of_models: dict[str, list[str]] = {}
    for facts in MODELS.values():
        if facts.listed_by:
            of_models |= pkgutil.resolve_name(facts.listed_by)()
    return {
        **of_models,
        "datasets": sorted(name for name in datasets.__all__ if _has_splits(getattr(datasets, name))),
        "timm_optimizers": timm.optim.list_optimizers(),
        **_optimizer_arguments(),
    }


def _optimizer_arguments() -> dict[str, list[str]]:
    """Return the arguments of timm's optimizers; of those that need another package, none."""
    from timm import optim

    arguments = {}
    for name in optim.list_optimizers():
        with suppress(ImportError, AssertionError):
            kind = optim.get_optimizer_class(name, bind_defaults=False)
            arguments[f"timm_optimizers/{name}"] = list(inspect.signature(kind).parameters)
    return arguments


def _has_splits(kind: object) -> bool:
    """Return True if a class of torchvision.datasets has targets, and separates training from test data."""
    if not inspect.isclass(kind):
        return False
    parameters = inspect.signature(kind).parameters
    has_targets = "target_transform" in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )
    return has_targets and bool({"train", "split"} & parameters.keys())


if __name__ == "__main__":
    print(json.dumps(list_names()))
