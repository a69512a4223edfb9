"""``precision: fp8``: runs the linear layers of the repeated blocks in float8, with torchao.

``training.train_state`` calls it before activation checkpointing, compiling and placing. Input, weight and
incoming gradient are each scaled by their largest value and cast right before a product (e4m3 forward, e5m2
for gradients; arXiv:2209.05433); everything else is as under ``bf16``. The parameters and their names do not
change, so checkpoints do not depend on the precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hpc_train.errors import BadFileError
from hpc_train.registry import importing

#: Sizes of float8 products on the GPU are multiples of this.
_MULTIPLE = 16


def use_float8(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Make the linear layers inside ``blocks`` multiply in float8, in place; emulated on a CPU.

    Not converted: the model's first and last layers, which are in no block; sizes that 16 does not divide;
    subclasses of ``nn.Linear``, which have their own forward. Raises BadFileError if no layer can be
    converted or torchao is missing.
    """
    with importing("torchao", "fp8", needed_by="precision: fp8", otherwise=", or write bf16"):
        from torchao import float8
    # The number of rows of a micro-batch, the inner size of the weight gradient's product, is arbitrary.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=device.type == "cpu")
    if not any(_fits(module) for block in blocks for module in _below(block)):
        raise BadFileError(
            f"precision: fp8 finds no linear layer in the model's blocks whose sizes {_MULTIPLE} divides; "
            "write bf16"
        )
    for block in blocks:
        if not isinstance(block, nn.Linear):
            float8.convert_to_float8_training(
                block, module_filter_fn=lambda module, name: _fits(module), config=config
            )


def _below(block: nn.Module) -> list[nn.Module]:
    """Return the modules that can be replaced in place: all inside the block, without the block itself."""
    return list(block.modules())[1:]


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not any(size % _MULTIPLE for size in module.weight.shape)
