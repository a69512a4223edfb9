"""``hpc-train export``: the newest intact checkpoint's weights and buffers as one file with plain names.

Runs in its own process, ``python -m hpc_train.checkpoint.export RUN_FOLDER TARGET [--ema]``: commands import
no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpc_train.checkpoint.saved_tensors import SavedState, SavedTensor, read_into
from hpc_train.checkpoint.shards import Entry, write_safetensors
from hpc_train.checkpoint.state import EMA, MODEL
from hpc_train.errors import ExitCode, StorageError, UsageError, UserError, printable
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import committed, verify
from hpc_train.run.files import read_json, sync_folder
from hpc_train.run.find import is_run
from hpc_train.run.storage_errors import storage_error
from hpc_train.strategies.base import Piece

_USAGE = "python -m hpc_train.checkpoint.export takes RUN_FOLDER TARGET [--ema]"


def export(run: RunPaths, target: Path, *, ema: bool = False) -> None:
    """Write the weights to ``target`` atomically, and report it as one JSON line on stdout.

    ``ema``: the EMA weights instead. Raises UsageError if the run has saved nothing yet or has no EMA, or
    ``target`` is inside a run folder; StorageError if no checkpoint is intact or ``target`` can't be written.
    """
    if not target.parent.is_dir():
        raise StorageError(f"{target}: there is no folder {target.parent}; make the folder first")
    _refuse_target(target)
    checkpoint = _newest_whole(run)
    saved = SavedState.read(checkpoint)
    if ema and not any(name.startswith(EMA) for name in saved.tensors):
        raise UsageError(
            f"{run.folder}: this run has no average of its weights (optimization.ema); omit --ema"
        )
    entries = {
        name.removeprefix(MODEL): _entry(checkpoint, _source(saved.first_name(name), ema=ema), saved)
        for name in (*saved.tensors, *saved.tied)
        if name.startswith(MODEL)
    }
    run_id = str((read_json(run.run) or {}).get("id", run.folder.name))
    metadata = {"step": str(checkpoint.step), "run_id": run_id} | ({"weights": "ema"} if ema else {})
    _write(target, entries, metadata)
    print(json.dumps({"path": str(target), "step": checkpoint.step, "tensors": len(entries)}), flush=True)


def _refuse_target(target: Path) -> None:
    """Raise UserError if writing would replace something else than an earlier export."""
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise StorageError(f"{target}: exists and is not a plain file; give the name of a file to write")
    real = target.parent.resolve()
    for folder in (real, *real.parents):
        if is_run(RunPaths(folder)):
            raise UsageError(f"-o: {target} is inside run folder {folder}; write the file outside of it")


def _source(name: str, *, ema: bool) -> str:
    """Return the name in the checkpoint of the values to write for the model's tensor ``name``."""
    return EMA + name.removeprefix(MODEL) if ema else name


def _newest_whole(run: RunPaths) -> CheckpointPaths:
    found = committed(run)
    if not found:
        raise UsageError(f"{run.folder}: this run has no checkpoint yet; export it once it has saved one")
    for checkpoint in found:
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        print(printable(f"{checkpoint.folder.name} is damaged: {'; '.join(problems)}"), file=sys.stderr)
    raise StorageError(f"{run.checkpoints}: every checkpoint is damaged; resume the run to make a new one")


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


def _write(target: Path, entries: Mapping[str, Entry], metadata: dict[str, str]) -> None:
    # Not derived from the target's name, which may have the maximum length.
    temporary = target.with_name(f".hpc-train-{secrets.token_hex(8)}")
    try:
        write_safetensors(temporary, entries, metadata)
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        if len(arguments) not in (2, 3) or list(arguments[2:]) not in ([], ["--ema"]):
            raise UsageError(_USAGE)
        run_folder, target = (Path(argument).absolute() for argument in arguments[:2])
        export(RunPaths(run_folder), target, ema=len(arguments) == 3)
    except UserError as error:
        print(printable(str(error)), file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
