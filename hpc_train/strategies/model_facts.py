"""``python -m hpc_train.strategies.model_facts NAME [--args JSON]``: what commands, which don't import torch,
ask of a model that the file names.

Prints one JSON object (``facts``). The model is built on the meta device, without memory.
"""

from __future__ import annotations

import argparse
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


def main(arguments: list[str] | None = None) -> int:
    """Print the answer; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpc_train.strategies.model_facts", allow_abbrev=False)
    parser.add_argument("name")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON")
    given = parser.parse_args(arguments)
    try:
        answer = facts(given.name, given.args)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
