"""``data.normalize: weights``: the preprocessing that a model's pretrained weights were trained with."""

from __future__ import annotations

from typing import Any, NamedTuple

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import NormalizeConfig
from hpc_train.experiment.data_facts.image_facts import is_detector
from hpc_train.registry import split_name

_KEY = "data.normalize"
_REMEDY = "write {mean: […], std: […]}"


class _Preprocessing(NamedTuple):
    mean: list[float]
    std: list[float]
    #: None if the weights were not trained on images cropped this way: the file's value applies.
    interpolation: str | None = None
    eval_crop: float | None = None


def with_preprocessing(experiment: Experiment, *, download: bool = False) -> Experiment:
    """Return the experiment with ``data.normalize: weights`` resolved to explicit values.

    These are ``normalize.mean``, ``normalize.std`` and, for classification, ``interpolation`` and, unless
    the file gives one other than 1, ``eval_crop``. Uses the network only with ``download``. Raises
    BadFileError if the model's weights define none of them.
    """
    data = experiment.data
    if data.normalize is None or not data.normalize.from_weights:
        return experiment
    provider, name = split_name(experiment.model.name)
    if provider == "smp":
        from hpc_train.training.models.segmentation_models import preprocessing_of  # imports timm

        values = _Preprocessing(*preprocessing_of(name, experiment.model, download=download))
    else:
        values = _of_timm(name) if provider == "timm" else _of_torchvision(name)
    update: dict[str, Any] = {"normalize": NormalizeConfig(mean=values.mean, std=values.std)}
    if values.interpolation is not None:
        if values.interpolation not in ("bilinear", "bicubic"):
            raise BadFileError(
                f"{_KEY}: the weights of {experiment.model.name} want {values.interpolation} interpolation, "
                f"and only bilinear and bicubic are supported; {_REMEDY}"
            )
        update["interpolation"] = values.interpolation
    if values.eval_crop is not None and data.eval_crop == 1.0:
        update["eval_crop"] = values.eval_crop
    return experiment.model_copy(update={"data": data.model_copy(update=update)})


def _of_timm(name: str) -> _Preprocessing:
    import timm

    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag: building the model reports it
        config = None
    if config is None or not config.has_weights:
        raise BadFileError(
            f"{_KEY}: timm/{name} has no pretrained weights that define mean and std; {_REMEDY}"
        )
    if config.crop_mode != "center":
        raise BadFileError(
            f"{_KEY}: the weights of timm/{name} want crop_mode {config.crop_mode}, and only center is "
            f"supported; {_REMEDY}"
        )
    return _Preprocessing(
        list(config.mean), list(config.std), str(config.interpolation), float(config.crop_pct)
    )


def _of_torchvision(name: str) -> _Preprocessing:
    import torch
    import torchvision

    try:
        transforms = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    except (ValueError, AttributeError) as error:
        raise BadFileError(f"{_KEY}: torchvision/{name} has no pretrained weights; {_REMEDY}") from error
    if is_detector(f"torchvision/{name}"):  # which normalize images themselves
        with torch.device("meta"):
            transform: Any = torchvision.models.get_model(name, weights=None, weights_backbone=None).transform
        return _Preprocessing(list(transform.image_mean), list(transform.image_std))
    mean, std = list(transforms.mean), list(transforms.std)
    if not hasattr(transforms, "crop_size"):  # segmentation
        return _Preprocessing(mean, std)
    crop: float = transforms.crop_size[0] / transforms.resize_size[0]
    return _Preprocessing(mean, std, str(transforms.interpolation.value), min(1.0, crop))
