"""``python -m hpc_train.strategies.model_facts``: what commands, which don't import torch, ask of models that
the file names.

Each line of its input is ``[NAME, ARGS]`` in JSON, each of its output ``facts`` of that model, or ``error``.
A model is built on the meta device, without memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from hpc_train.config.training_sections import ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.blocks import find_blocks
from hpc_train.models.building import build_model
from hpc_train.models.inspection import has_batchnorm
from hpc_train.models.splitting import most_stages
from hpc_train.runtime.data_info import DataInfo
from hpc_train.strategies.tensor_layers import numbers_shared, shareable_in


def facts(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Build the model and return what decides whether it can be trained as the file says.

    ``has_batchnorm``; and for ranks that share layers what ``config.layer_rules.LayerFacts`` has: ``shared``,
    of equal numbers the first alone, ``dropout_key`` and ``most_stages``. Raises BadFileError where there is
    no such model.
    """
    info = DataInfo(num_classes=10, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with torch.device("meta"):
        model = build_model(ModelConfig(name=name, args=args), info)
    return {"has_batchnorm": has_batchnorm(model)} | _facts_of_layers(model)


def _facts_of_layers(model: nn.Module) -> dict[str, Any]:
    found = shareable_in(model)
    first: dict[int, str] = {}
    for what, number in numbers_shared(found).items():
        first.setdefault(number, what)
    dropping = (each.attention_key for each in found.values() if each.attention_dropout > 0)
    return {
        "shared": {what: number for number, what in first.items()},
        "dropout_key": next(dropping, None),
        "most_stages": most_stages(model, find_blocks(model)),
    }


def main() -> None:
    """Answer until there are no more questions."""
    answers, sys.stdout = sys.stdout, sys.stderr  # a model may print
    for line in sys.stdin:
        try:
            answer = facts(*json.loads(line))
        except UserError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
