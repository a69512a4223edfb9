"""``smp/<architecture>``: the models of segmentation-models-pytorch, with its hub's weights of encoders.

``model.args`` are the arguments of the architecture's class: ``encoder_name``, ``encoder_depth``,
``decoder_…``. Other arguments of an encoder ``tu-<name>`` are passed to timm.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.fields import Arguments
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.validate.part_rules import unlisted
from hpc_train.experiment.validate.smp_rules import OF_TIMM, OWNED, encoder_problem, owned_arguments
from hpc_train.registry import importing
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.base import (
    Preprocessing,
    no_weights,
    parameter_names,
    unknown_argument,
    wrong_arguments,
)
from hpc_train.training.models.timm import hub_access, refuse_uncached_url
from hpc_train.training.models.weights import hub_report, keep_report, load_weights

#: The weights of encoders that ``model.pretrained: true`` loads; timm's have a tag in their names instead.
_WEIGHTS = "imagenet"


def listed_names() -> dict[str, list[str]]:
    """Return the architectures and encoders of smp; nothing if it is not installed."""
    try:
        return {"smp": architectures(), "smp_encoders": encoders()}
    except BadFileError:
        return {}


def architectures() -> list[str]:
    """Return the names after ``smp/``."""
    return sorted(_library().MODEL_ARCHITECTURES_MAPPING)


def encoders() -> list[str]:
    """Return the names of the library's own encoders, without timm's encoders (``tu-<name>``)."""
    return sorted(_library().encoders.get_encoder_names())


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build the architecture for the data's classes and channels; its forward returns logits (B, C, H, W)."""
    kind, encoder = _class_and_encoder(rest, config)
    arguments = {"in_channels": info.channels, "classes": info.num_classes} | config.args
    if config.pretrained is True:
        _refuse_without_weights(encoder)
        # The name of a timm encoder selects its weights.
        weights = True if encoder.startswith(OF_TIMM) else _WEIGHTS
        with _hub(encoder, download=download):
            model = _create(kind, config, arguments | {"encoder_weights": weights})
    else:
        model = _create(kind, config, arguments | {"encoder_weights": None})
    # Set as on timm's models: the layer that depends on the classes, and the image size.
    sizes = {"input_size": size} if (size := getattr(model.encoder, "input_size", None)) else {}
    # The convolution that produces the logits.
    head = model.get_submodule("segmentation_head")
    *_, name = (name for name, module in head.named_modules() if isinstance(module, nn.Conv2d))
    model.pretrained_cfg = {"classifier": f"segmentation_head.{name}"} | sizes  # type: ignore[assignment]
    if config.pretrained is True:
        random = {name for name in model.state_dict() if not name.startswith("encoder.")}
        keep_report(model, hub_report(model, f"the hub (encoder {encoder})", random))
    elif isinstance(config.pretrained, str):
        load_weights(model, config.pretrained)
    return model


def _refuse_without_weights(encoder: str) -> None:
    if encoder.startswith(OF_TIMM):
        return
    available = _library().encoders.encoders[encoder]["pretrained_settings"]
    if _WEIGHTS not in available:
        raise BadFileError(
            f"model.pretrained: smp's encoder {encoder} has weights of {', '.join(available)}, and only "
            f"those of {_WEIGHTS} are supported; name an encoder of timm with a tag, {OF_TIMM}<name>.<tag>"
        )


def preprocessing_of(rest: str, config: ModelConfig, *, download: bool) -> Preprocessing:
    """Return mean and std per channel that the encoder's pretrained weights were trained with.

    Raises BadFileError if they are not available; uses the network only with ``download``.
    """
    _, encoder = _class_and_encoder(rest, config)
    _refuse_without_weights(encoder)
    with _hub(encoder, download=download):
        spec = _library().encoders.get_preprocessing_params(encoder, _WEIGHTS)
    if spec["input_space"] != "RGB" or spec["input_range"] != [0, 1]:
        raise BadFileError(
            f"data.normalize: the weights of the encoder {encoder} want {spec['input_space']} images in the "
            f"range {spec['input_range']}, and only RGB in [0, 1] is supported; name another encoder"
        )
    return Preprocessing(spec["mean"], spec["std"])


def _library() -> Any:
    with importing("segmentation-models-pytorch", "smp", needed_by="model.name: smp/"):
        import segmentation_models_pytorch
    return segmentation_models_pytorch


def _class_and_encoder(rest: str, config: ModelConfig) -> tuple[type[nn.Module], str]:
    """Return the architecture's class and its encoder's name. Raises BadFileError for wrong arguments."""
    library = _library()
    kind = library.MODEL_ARCHITECTURES_MAPPING.get(rest)
    if kind is None:
        raise unlisted(("model", "name"), "smp", "model", rest, architectures()).as_error()
    for problem in owned_arguments(config.args):
        raise problem.as_error()
    encoder = config.args.get("encoder_name", inspect.signature(kind).parameters["encoder_name"].default)
    if misfit := encoder_problem(encoder, encoders(), timm.list_models()):
        raise misfit.as_error()
    assert isinstance(encoder, str)
    # timm's encoders pass unknown arguments on; smp's own encoders ignore them.
    for name in config.args.keys() - set(parameter_names(kind)) if encoder in encoders() else ():
        raise unknown_argument(config, name, _known_arguments(kind))
    return kind, encoder


def _known_arguments(kind: type[nn.Module]) -> list[str]:
    return [name for name in parameter_names(kind) if name not in OWNED]


def _create(kind: type[nn.Module], config: ModelConfig, arguments: Arguments) -> nn.Module:
    try:
        with warnings.catch_warnings():
            # Deprecation warnings about names of encoders and weights.
            warnings.filterwarnings("ignore", module=r"segmentation_models_pytorch\.")
            return _on_default_device(kind, arguments)
    except OSError:  # raised by the hub; some are ValueErrors, too
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        raise wrong_arguments(config, error, lambda: _known_arguments(kind)) from error


def _on_default_device(kind: type[nn.Module], arguments: Arguments) -> nn.Module:
    if torch.get_default_device().type != "meta":
        return kind(**arguments)
    try:
        return kind(**arguments)
    except RuntimeError:  # encoders mit_…: their constructor reads numbers from tensors
        with torch.device("cpu"):
            return kind(**arguments).to("meta")


@contextmanager
def _hub(encoder: str, *, download: bool) -> Iterator[None]:
    """Raise BadFileError if something of the hub is not available within the context."""
    try:
        with hub_access(download):
            if encoder.startswith(OF_TIMM):
                refuse_uncached_url(encoder.removeprefix(OF_TIMM), download=download)
            yield
    except BadFileError:
        raise
    except Exception as error:  # the hub client and the network raise many unrelated classes
        raise no_weights(f"smp's encoder {encoder}", error) from error
