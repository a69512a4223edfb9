"""A checkpoint's weights and buffers, whole and under the model's plain names.

Used by ``hpc-train export``, by ``load_model``, and by runs that start from another run's weights. The
command runs in its own process, ``python -m hpc_train.training.checkpoint.export RUN_FOLDER TARGET
[--ema|--no-ema] [--best|--last|--step STEP]``: commands import no torch. ``checkpoint.inference`` writes
programs.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from hpc_train.console import say, say_text
from hpc_train.errors import ExitCode, HpcTrainError, StorageError, UsageError
from hpc_train.experiment.config.schema import as_training
from hpc_train.paths import PROGRAMS, CheckpointPaths, RunPaths
from hpc_train.run import files, frozen_experiment, storage_errors
from hpc_train.run.checkpoints import committed, find_step, kept_best, selection_words, verify
from hpc_train.run.find import refuse_target, run_name
from hpc_train.training.checkpoint.saved_tensors import SavedState, SavedTensor, read_into
from hpc_train.training.checkpoint.shards import Entry, write_safetensors
from hpc_train.training.checkpoint.state import EMA, MODEL
from hpc_train.training.models import fine_tuning
from hpc_train.training.strategies.base import Piece


def export(
    run: RunPaths,
    target: Path,
    *,
    ema: bool | None = None,
    best: bool | None = None,
    step: int | None = None,
) -> None:
    """Write the weights, or by the suffix a program, to ``target`` atomically; report it as one JSON line.

    ``best``, ``step``: see ``find_intact``; ``ema``: see ``uses_ema``. Raises UsageError if the run has no
    checkpoint yet, no EMA or no such checkpoint, or ``target`` is inside a run folder; StorageError if no
    checkpoint is intact or ``target`` can't be written; BadFileError if the model can't be exported.
    """
    refuse_target(target)
    checkpoint = find_intact(run, best=best, step=step)
    if words := selection_words(run, checkpoint.step):
        say(f"{run_name(run)}: {words}")
    saved = SavedState.read(checkpoint)
    ema = uses_ema(run, saved, ema)
    entries = plain_weights(checkpoint, saved, ema=ema)
    run_id = str((files.read_json(run.run) or {}).get("id", run.folder.name))
    metadata = {"step": str(checkpoint.step), "run_id": run_id} | ({"weights": "ema"} if ema else {})
    if target.suffix in PROGRAMS:
        from hpc_train.training.checkpoint.inference import load_model, write_program

        model = load_model(run, best=None, step=checkpoint.step, ema=ema)
        _write(target, lambda path: write_program(model, path, target.suffix, metadata))
    else:
        _write(target, lambda path: write_safetensors(path, entries, metadata))
    report = {"path": str(target), "step": checkpoint.step, "tensors": len(entries), "ema": ema}
    print(json.dumps(report), flush=True)


def uses_ema(run: RunPaths, saved: SavedState, requested: bool | None) -> bool:
    """Return True for the EMA weights: as requested, by default if ``checkpoint.best`` follows their metric.

    Raises UsageError if they are requested and the checkpoint has none.
    """
    best = kept_best(run)
    ema = best is not None and best.is_of_ema if requested is None else requested
    if ema and not any(name.startswith(EMA) for name in saved.tensors):
        raise UsageError(
            f"{run.folder}: this run has no average of its weights (optimization.ema); omit --ema, or "
            "load_model's ema"
        )
    return ema


def find_intact(run: RunPaths, *, best: bool | None = None, step: int | None = None) -> CheckpointPaths:
    """Return the checkpoint that ``find_step`` selects; in place of a damaged newest one, the newest intact.

    Damaged ones are reported. Raises UsageError if there is no such checkpoint, StorageError if it is
    damaged.
    """
    selected = run.checkpoint(find_step(run, best=best, step=step))
    if step is not None or (best is not False and kept_best(run) is not None):
        if problems := verify(selected):
            remedy = "; --last uses the newest intact one (load_model: best=False)" if step is None else ""
            raise StorageError(f"{selected.folder} is damaged: {'; '.join(problems)}{remedy}")
        return selected
    for checkpoint in committed(run):
        problems = verify(checkpoint)
        if not problems:
            return checkpoint
        say(f"{checkpoint.folder.name} is damaged: {'; '.join(problems)}")
    raise StorageError(f"{run.checkpoints}: every checkpoint is damaged; resume the run to make a new one")


def _write(target: Path, write: Callable[[Path], object]) -> None:
    # Not derived from the target's name, which may have the maximum length.
    temporary = target.with_name(f".hpc-train-{secrets.token_hex(8)}")
    try:
        write(temporary)
        temporary.replace(target)
        files.sync_folder(target.parent)
    except OSError as error:
        raise storage_errors.storage_error(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"python -m hpc_train.training.checkpoint.export RUN_FOLDER TARGET […]: {message}")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction)
    parser.add_argument("--best", action="store_true", default=None)
    parser.add_argument("--last", dest="best", action="store_false")
    parser.add_argument("--step", type=int)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    try:
        options = _parsed(arguments)
        export(
            RunPaths(options.run.absolute()),
            options.target.absolute(),
            ema=options.ema,
            best=options.best,
            step=options.step,
        )
    except HpcTrainError as error:
        say_text(str(error))
        return int(error.exit_code)
    return int(ExitCode.DONE)


def plain_weights(checkpoint: CheckpointPaths, saved: SavedState, *, ema: bool = False) -> dict[str, Entry]:
    """Return name → tensor, each read lazily; a shared tensor under each of its names.

    Adapters of ``model.lora`` are merged into their layers. ``ema``: the EMA weights instead. Raises
    BadFileError if the run's experiment, which has the adapters' scale, can't be read.
    """
    kind = EMA if ema else MODEL
    entries = {
        name.removeprefix(MODEL): _entry(checkpoint, kind + saved.first_name(name).removeprefix(MODEL), saved)
        for name in (*saved.tensors, *saved.tied)
        if name.startswith(MODEL)
    }
    if not any(name.endswith(f".{fine_tuning.A}") for name in entries):
        return entries
    run = RunPaths(checkpoint.folder.parent.parent)
    config = as_training(frozen_experiment.read(run)).model.lora
    if config is None:  # the names belong to the model
        return entries
    readers = fine_tuning.merged(
        {name: entry.read for name, entry in entries.items()}, fine_tuning.scale_of(config)
    )
    return {name: replace(entries[name], read=read) for name, read in readers.items()}


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
