"""``hf/<name or folder>``: models of transformers for causal language models and image classification.

A folder holds ``config.json``, and weights for ``model.pretrained: true``; a name is one of the hub, which
only ``hpc-train prepare`` fetches. ``model.args`` are values of the model's configuration; for a classifier
also ``num_classes``, as for any model. Code that comes with a model never runs: neither that of its folder or
repository (``auto_map``) nor a kernel of the hub that its configuration names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import ModelConfig
from hpc_train.experiment.data_facts.root_layout import why_not_read
from hpc_train.registry import importing
from hpc_train.training.datasets.types import DataInfo
from hpc_train.training.models.weights import hub_report, keep_report, load_weights, misfit

#: Passed to every call that accepts it: by default transformers prompts on stdin before it runs the code.
_TRUST = False


def build(rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> nn.Module:
    """Build the model for the data's tokens or classes; its forward returns only the logits."""
    with importing("transformers", "hf", needed_by="model.name: hf/"):
        import transformers
    kind = (
        transformers.AutoModelForImageClassification
        if info.sequence_length is None
        else transformers.AutoModelForCausalLM
    )
    settings = _settings(transformers, rest, config, info, download=download)
    try:
        if config.pretrained is True:
            _refuse_pointers(rest)
            model, loaded = kind.from_pretrained(
                rest,
                config=settings,
                dtype="float32",
                local_files_only=not download,
                trust_remote_code=_TRUST,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            _refuse_other_shapes(rest, loaded["mismatched_keys"], settings, info)
            random = {*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])}
            keep_report(model, hub_report(model, f"hf/{rest}", random))
        else:
            model = kind.from_config(settings, trust_remote_code=_TRUST)
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise BadFileError(
            f"model.name: hf/{rest} has damaged weights: {error}; get its files again"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        _refuse_own_code(rest, error)
        raise BadFileError(
            f"model.name: hf/{rest} can't be built: {error}; run `hpc-train prepare FILE` on a machine with "
            "network if it is a name of the hub, or name another model"
        ) from error
    if isinstance(config.pretrained, str):
        load_weights(model, config.pretrained)
    model.register_forward_hook(_logits)
    assert isinstance(model, nn.Module)
    return model


def _settings(transformers: Any, rest: str, config: ModelConfig, info: DataInfo, *, download: bool) -> Any:
    """Return the configuration, changed for the data and by ``model.args``."""
    try:
        settings = transformers.AutoConfig.from_pretrained(
            rest, local_files_only=not download, trust_remote_code=_TRUST
        )
    except (OSError, ValueError) as error:
        _refuse_own_code(rest, error)
        raise BadFileError(
            f"model.name: hf/{rest} is not available: {error}; name a folder with a config.json, or run "
            "`hpc-train prepare FILE` on a machine with network"
        ) from error
    _refuse_kernels(rest, settings)
    if info.sequence_length is not None:
        # Tokens of a previous call are of no use in training.
        of_data = {"vocab_size": max(info.num_classes, settings.vocab_size), "use_cache": False}
        _change(settings, rest, of_data, config.args)
        return settings
    args = dict(config.args)
    num_classes = args.pop("num_classes", info.num_classes)
    of_data = {"num_labels": num_classes}
    if hasattr(settings, "num_channels"):
        of_data["num_channels"] = info.channels
    _change(settings, rest, of_data, args)
    if settings.num_labels != num_classes:  # by ``num_labels`` or ``id2label``; the task would not know
        raise BadFileError(
            f"model.args: sets {settings.num_labels} labels, and the task has {num_classes} classes; write "
            f"num_classes: {settings.num_labels}, or omit it"
        )
    return settings


def _refuse_pointers(rest: str) -> None:
    """Raise BadFileError if the folder was cloned without the content of its weights."""
    for path in sorted((*Path(rest).glob("*.safetensors"), *Path(rest).glob("*.bin"))):
        if (why := why_not_read(path)) is not None:
            raise BadFileError(f"model.name: {path} {why}; put the weights themselves there")


def _refuse_other_shapes(rest: str, mismatched: Iterable[Any], settings: Any, info: DataInfo) -> None:
    """Raise BadFileError if tensors other than a classifier's head have other shapes in the weights.

    transformers leaves them random. ``mismatched``: name, shape in the weights, and in the model.
    """
    others = {
        name: (torch.empty(tuple(loaded), device="meta"), torch.empty(tuple(expected), device="meta"))
        for name, loaded, expected in mismatched
        if info.sequence_length is not None or tuple(expected) != (settings.num_labels, *loaded[1:])
    }
    if others:
        loaded, expected = ({name: pair[place] for name, pair in others.items()} for place in (0, 1))
        raise misfit(
            f"model.pretrained: hf/{rest}", loaded, expected, shapes=others,
            remedy="use data with the channels, image size and tokenizer of those weights, and the sizes in "
            "their config.json, or write pretrained: false",
        )  # fmt: skip


def _refuse_own_code(rest: str, error: Exception) -> None:
    """Raise BadFileError if transformers could build the model only by running code that comes with it."""
    if "trust_remote_code" in str(error):
        raise BadFileError(
            f"model.name: hf/{rest} needs code of its own (auto_map in its config.json), which is never run; "
            "name a model whose code is in transformers, or write a factory of your own: model.name: "
            "module:function"
        ) from error


def _refuse_kernels(rest: str, settings: Any) -> None:
    """Raise BadFileError if the configuration names an attention kernel of the hub: downloaded code."""
    parts = [settings, *(getattr(settings, part, None) for part in getattr(settings, "sub_configs", ()))]
    for part in parts:
        name = getattr(part, "_attn_implementation", None)
        if isinstance(name, str) and "/" in name:
            raise BadFileError(
                f"model.name: hf/{rest} names an attention kernel of the hub, {name}, whose code is never "
                "run; remove attn_implementation from its config.json"
            )


def _change(settings: Any, rest: str, of_data: dict[str, Any], args: dict[str, Any]) -> None:
    """Set the values from the data, then ``args``. Raises BadFileError for an unknown name."""
    settings_names = {*settings.to_dict(), "num_labels"}
    for name in args.keys() - settings_names:
        raise BadFileError(f"model.args: hf/{rest} has no setting {name!r}; omit it, or see its config.json")
    for name, value in (of_data | args).items():
        setattr(settings, name, value)


def _logits(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the logits of a forward. A hook, not a wrapper: parameters keep their names."""
    return outputs.logits if hasattr(outputs, "logits") else outputs
