"""``model.init_from``: loads weights of another run or of a file into a newly built model."""

from __future__ import annotations

from torch import nn

from hpc_train.checkpoint.export import plain_weights
from hpc_train.checkpoint.saved_tensors import SavedState
from hpc_train.config.training_sections import ModelConfig
from hpc_train.errors import BadFileError
from hpc_train.models.building import converter_of
from hpc_train.models.weights import StateDict, load_what_fits, read_weights
from hpc_train.paths import CheckpointPaths
from hpc_train.run.checkpoints import verify
from hpc_train.run.weight_source import KEY, described, find_source


def load_initial_weights(model: nn.Module, config: ModelConfig) -> None:
    """Load the weights by name, in place; ``models.weights.report_of`` returns the report.

    Raises BadFileError if they can't be read or do not fit the model.
    """
    if config.init_from is None:
        return
    source = find_source(config.init_from)
    weights = read_weights(str(source), KEY) if source.is_file() else _of_checkpoint(CheckpointPaths(source))
    load_what_fits(model, weights, described(source), converter_of(config.name), KEY)


def _of_checkpoint(checkpoint: CheckpointPaths) -> StateDict:
    if problems := verify(checkpoint):
        raise BadFileError(f"{KEY}: {checkpoint.folder} is damaged: {'; '.join(problems)}; name another run")
    entries = plain_weights(checkpoint, SavedState.read(checkpoint))
    return {name: entry.read() for name, entry in entries.items()}
