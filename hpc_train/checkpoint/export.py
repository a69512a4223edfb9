"""``hpc-train export``: a checkpoint's weights and buffers as one file with plain names, or its model as a
program (``checkpoint.program_export``).

Runs in its own process, ``python -m hpc_train.checkpoint.export RUN_FOLDER TARGET [--format FORMAT] [--ema]
[--best] [--step STEP]``: commands import no torch.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hpc_train.checkpoint.plain_weights import plain_weights
from hpc_train.checkpoint.saved_tensors import SavedState
from hpc_train.checkpoint.shards import Entry, write_safetensors
from hpc_train.checkpoint.state import EMA
from hpc_train.console import say, say_text
from hpc_train.errors import ExitCode, HpcTrainError, StorageError, UsageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run.checkpoints import committed, find_step, verify
from hpc_train.run.files import read_json, sync_folder
from hpc_train.run.find import refuse_target
from hpc_train.run.storage_errors import storage_error

_WEIGHTS, *_PROGRAMS = "safetensors", "onnx", "torch-export"


def export(
    run: RunPaths,
    target: Path,
    *,
    form: str = _WEIGHTS,
    ema: bool = False,
    best: bool = False,
    step: int | None = None,
) -> None:
    """Write the weights, or the program, to ``target`` atomically; report it as one JSON line on stdout.

    ``ema``: with the EMA weights instead. ``best``, ``step``: of that checkpoint instead of the newest intact
    checkpoint. Raises UsageError if the run has no checkpoint yet, no EMA or no such checkpoint, or
    ``target`` is inside a run folder; StorageError if no checkpoint is intact or ``target`` can't be written;
    BadFileError if the model can't be exported in the format ``form``.
    """
    refuse_target(target)
    is_chosen = best or step is not None
    checkpoint = _whole_at(run, find_step(run, best=best, step=step)) if is_chosen else _newest_whole(run)
    saved = SavedState.read(checkpoint)
    if ema and not any(name.startswith(EMA) for name in saved.tensors):
        raise UsageError(
            f"{run.folder}: this run has no average of its weights (optimization.ema); omit --ema"
        )
    entries = plain_weights(checkpoint, saved, ema=ema)
    run_id = str((read_json(run.run) or {}).get("id", run.folder.name))
    metadata = {"step": str(checkpoint.step), "run_id": run_id} | ({"weights": "ema"} if ema else {})
    report: dict[str, Any] = {"path": str(target), "step": checkpoint.step, "tensors": len(entries)}
    if form == _WEIGHTS:
        _write(target, entries, metadata)
    else:
        report |= {"format": form} | _write_program(run, target, form, entries, metadata)
    print(json.dumps(report), flush=True)


def _write_program(
    run: RunPaths, target: Path, form: str, entries: Mapping[str, Entry], metadata: dict[str, str]
) -> dict[str, Any]:
    from hpc_train.checkpoint.program_export import export_program, load_model

    model = load_model(run, entries, form)
    with _replacing(target) as temporary:
        return export_program(model, temporary, form, metadata)


def _whole_at(run: RunPaths, step: int) -> CheckpointPaths:
    checkpoint = run.checkpoint(step)
    if problems := verify(checkpoint):
        raise StorageError(f"{checkpoint.folder} is damaged: {'; '.join(problems)}")
    return checkpoint


def _newest_whole(run: RunPaths) -> CheckpointPaths:
    checkpoints = committed(run)
    if not checkpoints:
        raise UsageError(f"{run.folder}: this run has no checkpoint yet; export it once it has saved one")
    for checkpoint in checkpoints:
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        say(f"{checkpoint.folder.name} is damaged: {'; '.join(problems)}")
    raise StorageError(f"{run.checkpoints}: every checkpoint is damaged; resume the run to make a new one")


def _write(target: Path, entries: Mapping[str, Entry], metadata: dict[str, str]) -> None:
    with _replacing(target) as temporary:
        write_safetensors(temporary, entries, metadata)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary file, which replaces ``target`` unless the block raises."""
    # Not derived from the target's name, which may have the maximum length.
    temporary = target.with_name(f".hpc-train-{secrets.token_hex(8)}")
    try:
        yield temporary
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"python -m hpc_train.checkpoint.export RUN_FOLDER TARGET […]: {message}")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument("--format", choices=(_WEIGHTS, *_PROGRAMS), default=_WEIGHTS)
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--step", type=int)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = _parsed(arguments)
        export(
            RunPaths(options.run.absolute()),
            options.target.absolute(),
            form=options.format,
            ema=options.ema,
            best=options.best,
            step=options.step,
        )
    except HpcTrainError as error:
        say_text(str(error))
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
