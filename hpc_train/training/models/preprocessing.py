"""``data.normalize: weights``: the preprocessing that a model's pretrained weights were trained with."""

from __future__ import annotations

import pkgutil
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import NormalizeConfig
from hpc_train.experiment.data_facts.built_in import MODELS
from hpc_train.registry import is_factory, split_name
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.base import WeightsPreprocessing, no_preprocessing


def with_preprocessing(experiment: Experiment, *, download: bool = False) -> Experiment:
    """Return the experiment with ``data.normalize: weights`` resolved to explicit values.

    These are ``normalize.mean``, ``normalize.std`` and, for classification, ``interpolation`` and, unless
    the file gives one other than 1, ``eval_crop``. Uses the network only with ``download``. Raises
    BadFileError if the model's weights define none of them.
    """
    data = experiment.data
    if data.normalize is None or not data.normalize.from_weights:
        return experiment
    provider, rest = split_name(experiment.model.name)
    preprocessing_of: WeightsPreprocessing = pkgutil.resolve_name(MODELS[provider].preprocessing)
    values = preprocessing_of(rest, experiment.model, download=download)
    update: dict[str, Any] = {"normalize": NormalizeConfig(mean=values.mean, std=values.std)}
    if values.interpolation is not None:
        if values.interpolation not in ("bilinear", "bicubic"):
            raise no_preprocessing(
                f"the weights of {experiment.model.name} want {values.interpolation} interpolation, and only "
                "bilinear and bicubic are supported"
            )
        update["interpolation"] = values.interpolation
    if values.eval_crop is not None and data.eval_crop == 1.0:
        update["eval_crop"] = values.eval_crop
    return experiment.model_copy(update={"data": data.model_copy(update=update)})


#: Differences of mean and standard deviation that matter (assumed): data sets of photos differ by 0.02.
_TOLERANCE = 0.05


def normalized_otherwise(experiment: Experiment, info: DataInfo) -> str | None:
    """Return a line if pretrained weights expect another normalization than the data's default.

    None if the file has ``data.normalize``, or nothing is known of the weights. The network is not used.
    """
    model = experiment.model
    if model.pretrained is not True or experiment.data.normalize is not None or is_factory(model.name):
        return None
    provider, rest = split_name(model.name)
    facts = MODELS.get(provider)
    if facts is None or facts.preprocessing is None:
        return None
    try:
        values = pkgutil.resolve_name(facts.preprocessing)(rest, model, download=False)
    except BadFileError:
        return None
    pairs = [*zip(values.mean, info.mean, strict=False), *zip(values.std, info.std, strict=False)]
    if len(values.mean) != len(info.mean) or all(abs(ours - theirs) <= _TOLERANCE for ours, theirs in pairs):
        return None
    return (
        f"the weights of {model.name} were trained with mean {values.mean} and std {values.std}, and images "
        f"are normalized with {[*info.mean]} and {[*info.std]}; write data.normalize: weights"
    )
