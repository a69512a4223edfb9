"""``data.normalize: weights``: the preprocessing that a model's pretrained weights were trained with."""

from __future__ import annotations

from typing import Any, cast

from hpc_train.config.schema import Experiment
from hpc_train.config.training_sections import NormalizeConfig
from hpc_train.errors import BadFileError
from hpc_train.registry import split_name

_KEY = "data.normalize"
_REMEDY = "write {mean: […], std: […]}"


def with_preprocessing(experiment: Experiment, *, download: bool = False) -> Experiment:
    """Return the experiment with ``data.normalize: weights`` resolved to explicit values.

    These are ``normalize.mean``, ``normalize.std`` and, except for smp, ``interpolation`` and, unless the
    file gives one other than 1, ``eval_crop``. Uses the network only with ``download``. Raises
    BadFileError if the model's weights define none of them.
    """
    data = experiment.data
    if data.normalize is None or not data.normalize.from_weights:
        return experiment
    provider, name = split_name(experiment.model.name)
    if provider == "smp":
        from hpc_train.models.segmentation_models import preprocessing_of  # imports timm

        mean, std = preprocessing_of(name, experiment.model, download=download)
        normalize = NormalizeConfig(mean=mean, std=std)
        return experiment.model_copy(update={"data": data.model_copy(update={"normalize": normalize})})
    mean, std, interpolation, crop = _of_timm(name) if provider == "timm" else _of_torchvision(name)
    if interpolation not in ("bilinear", "bicubic"):
        raise BadFileError(
            f"{_KEY}: the weights of {experiment.model.name} want {interpolation} interpolation, and only "
            f"bilinear and bicubic are supported; {_REMEDY}"
        )
    update = {
        "normalize": NormalizeConfig(mean=list(mean), std=list(std)),
        "interpolation": interpolation,
        "eval_crop": crop if data.eval_crop == 1.0 else data.eval_crop,
    }
    return experiment.model_copy(update={"data": data.model_copy(update=update)})


def _of_timm(name: str) -> tuple[Any, Any, str, float]:
    import timm

    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag: building the model reports it
        found = None
    if found is None or not found.has_weights:
        raise BadFileError(
            f"{_KEY}: timm/{name} has no pretrained weights that define mean and std; {_REMEDY}"
        )
    if found.crop_mode != "center":
        raise BadFileError(
            f"{_KEY}: the weights of timm/{name} want crop_mode {found.crop_mode}, and only center is "
            f"supported; {_REMEDY}"
        )
    return found.mean, found.std, str(found.interpolation), float(found.crop_pct)


def _of_torchvision(name: str) -> tuple[Any, Any, str, float]:
    import torchvision

    try:
        transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    except (ValueError, AttributeError) as error:
        raise BadFileError(f"{_KEY}: torchvision/{name} has no pretrained weights; {_REMEDY}") from error
    crop = cast(float, transforms.crop_size[0] / transforms.resize_size[0])
    return transforms.mean, transforms.std, str(transforms.interpolation.value), min(1.0, crop)
