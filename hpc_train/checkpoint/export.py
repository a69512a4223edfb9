"""``hpc-train export``: the newest intact checkpoint's weights and buffers as one file with plain names.

Runs in its own process, ``python -m hpc_train.checkpoint.export RUN_FOLDER TARGET [--ema] [--best]``:
commands import no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.checkpoint.plain_weights import plain_weights
from hpc_train.checkpoint.saved_tensors import SavedState
from hpc_train.checkpoint.shards import Entry, write_safetensors
from hpc_train.checkpoint.state import EMA
from hpc_train.errors import ExitCode, StorageError, UsageError, UserError, printable
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import committed, find_step, verify
from hpc_train.run.files import read_json, sync_folder
from hpc_train.run.find import is_run
from hpc_train.run.storage_errors import storage_error

_USAGE = "python -m hpc_train.checkpoint.export takes RUN_FOLDER TARGET [--ema] [--best]"


def export(run: RunPaths, target: Path, *, ema: bool = False, best: bool = False) -> None:
    """Write the weights to ``target`` atomically, and report it as one JSON line on stdout.

    ``ema``: the EMA weights instead. ``best``: of the best checkpoint, not of the newest. Raises UsageError
    if the run has saved nothing yet, or has no EMA or no best checkpoint, or ``target`` is inside a run
    folder; StorageError if no checkpoint is intact or ``target`` can't be written.
    """
    if not target.parent.is_dir():
        raise StorageError(f"{target}: there is no folder {target.parent}; make the folder first")
    _refuse_target(target)
    checkpoint = _whole_at(run, find_step(run, best=True)) if best else _newest_whole(run)
    saved = SavedState.read(checkpoint)
    if ema and not any(name.startswith(EMA) for name in saved.tensors):
        raise UsageError(
            f"{run.folder}: this run has no average of its weights (optimization.ema); omit --ema"
        )
    entries = plain_weights(checkpoint, saved, ema=ema)
    run_id = str((read_json(run.run) or {}).get("id", run.folder.name))
    metadata = {"step": str(checkpoint.step), "run_id": run_id} | ({"weights": "ema"} if ema else {})
    _write(target, entries, metadata)
    print(json.dumps({"path": str(target), "step": checkpoint.step, "tensors": len(entries)}), flush=True)


def _whole_at(run: RunPaths, step: int) -> CheckpointPaths:
    checkpoint = run.checkpoint(step)
    if problems := verify(checkpoint):
        raise StorageError(f"{checkpoint.folder} is damaged: {'; '.join(problems)}")
    return checkpoint


def _refuse_target(target: Path) -> None:
    """Raise UserError if writing would replace something else than an earlier export."""
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise StorageError(f"{target}: exists and is not a plain file; give the name of a file to write")
    real = target.parent.resolve()
    for folder in (real, *real.parents):
        if is_run(RunPaths(folder)):
            raise UsageError(f"-o: {target} is inside run folder {folder}; write the file outside of it")


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
        options = set(arguments[2:])
        if len(arguments) < 2 or options - {"--ema", "--best"}:
            raise UsageError(_USAGE)
        run_folder, target = (Path(argument).absolute() for argument in arguments[:2])
        export(RunPaths(run_folder), target, ema="--ema" in options, best="--best" in options)
    except UserError as error:
        print(printable(str(error)), file=sys.stderr)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
