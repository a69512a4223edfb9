"""A checkpoint's weights and buffers, whole and under the model's plain names.

Used by ``export``, and by runs that start from another run's weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hpc_train.checkpoint.saved_tensors import SavedState, SavedTensor, read_into
from hpc_train.checkpoint.shards import Entry
from hpc_train.checkpoint.state import EMA, MODEL
from hpc_train.models import lora
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import frozen_experiment
from hpc_train.strategies.base import Piece


def plain_weights(checkpoint: CheckpointPaths, saved: SavedState, *, ema: bool = False) -> dict[str, Entry]:
    """Return name → tensor, each read lazily; a shared tensor under each of its names.

    Adapters of ``model.lora`` are merged into their layers. ``ema``: the EMA weights instead. Raises
    BadFileError if the run's experiment, which has the adapters' scale, can't be read.
    """
    entries = {
        name.removeprefix(MODEL): _entry(checkpoint, _source(saved.first_name(name), ema=ema), saved)
        for name in (*saved.tensors, *saved.tied)
        if name.startswith(MODEL)
    }
    if not any(name.endswith(f".{lora.A}") for name in entries):
        return entries
    config = frozen_experiment.read(RunPaths(checkpoint.folder.parent.parent)).model.lora
    if config is None:  # the names belong to the model
        return entries
    readers = lora.merged({name: entry.read for name, entry in entries.items()}, lora.scale_of(config))
    return {name: replace(entries[name], read=read) for name, read in readers.items()}


def _source(name: str, *, ema: bool) -> str:
    """Return the checkpoint's name of the values for the model's tensor ``name``."""
    return EMA + name.removeprefix(MODEL) if ema else name


def _entry(checkpoint: CheckpointPaths, name: str, saved: SavedState) -> Entry:
    tensor = saved.tensors[name]
    return Entry(tensor.torch_dtype, tensor.shape, lambda: _read(checkpoint, name, tensor))


def _read(checkpoint: CheckpointPaths, name: str, saved: SavedTensor) -> Tensor:
    """Return one tensor, assembled from its pieces; only one at a time is in memory."""
    whole = torch.empty(saved.shape, dtype=saved.torch_dtype)
    read_into(
        checkpoint, {name: saved}, {name: [Piece(saved.shape, (0,) * whole.dim(), whole, is_writer=True)]}
    )
    return whole
