"""Selects the trained parameters of a built model, as the ``model:`` section requests.

Called by ranks and by ``prepare``, after weights were loaded and before the model is placed.
"""

from __future__ import annotations

from torch import nn

from hpc_train.config.training_sections import ModelConfig
from hpc_train.errors import BadFileError
from hpc_train.models.freezing import freeze, keep_frozen_statistics
from hpc_train.models.lora import add_lora
from hpc_train.models.patterns import parameters_by_name
from hpc_train.models.weights import report_of


def prepare_for_training(model: nn.Module, config: ModelConfig) -> None:
    """Add adapters and freeze parameters as the file requests, in place.

    Raises BadFileError if a pattern matches nothing, or a random head would be frozen.
    """
    if config.lora is not None:
        add_lora(model, config.lora)
        keep_frozen_statistics(model)
        _refuse_frozen_random(model, "model.lora", "add '{layer}*' to also_train")
    if config.freeze:
        freeze(model, config.freeze)
        _refuse_frozen_random(model, "model.freeze", "exclude it by '!{layer}*'")


def _refuse_frozen_random(model: nn.Module, key: str, remedy: str) -> None:
    """Raise BadFileError if a frozen parameter, such as a new head, is missing in the loaded weights."""
    report, parameters = report_of(model), parameters_by_name(model)
    for name in report.missing if report else ():
        if name in parameters and not parameters[name].requires_grad:
            layer = name.rpartition(".")[0] or name
            raise BadFileError(
                f"{key}: {name} would be frozen at random values, since the loaded weights lack it; "
                f"{remedy.format(layer=layer)}"
            )
