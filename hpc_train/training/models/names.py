"""Names of models, data sets and optimizers in libraries, for hints in ``validate``.

``validate.model_facts`` calls it in a child, since commands don't import torch; ``python -m
hpc_train.training.models.names`` prints them.
"""

from __future__ import annotations

import inspect
import json
from contextlib import suppress

from hpc_train.errors import BadFileError


def list_names() -> dict[str, list[str]]:
    """Return the names of the built-in providers and optimizers."""
    import timm
    import timm.optim
    from torchvision import datasets

    from hpc_train.training.models.torchvision import model_names

    return {
        "timm": timm.list_models(),
        "torchvision": model_names(),
        "datasets": sorted(name for name in datasets.__all__ if _has_splits(getattr(datasets, name))),
        "timm_optimizers": timm.optim.list_optimizers(),
        **_optimizer_arguments(),
        **_smp_names(),
    }


def _smp_names() -> dict[str, list[str]]:
    """Return the architectures and encoders of smp; nothing if it is not installed."""
    from hpc_train.training.models import segmentation_models

    try:
        return {"smp": segmentation_models.architectures(), "smp_encoders": segmentation_models.encoders()}
    except BadFileError:
        return {}


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
