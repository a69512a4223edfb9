"""What the ranks of ``tests.ranks`` and ``tests.parallelism`` import, done once by their fork server.

It is frozen: else each rank's garbage collections would look through it, and copy its pages by writing to
them.
"""

# ruff: noqa: E402, F401
import gc

gc.disable()

import timm
import torch.distributed.fsdp

import hpc_train.training.main
import tests.parallelism.plain
import tests.parallelism.training

gc.freeze()
gc.enable()
