"""``export`` and ``verify``: the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hpc_train
from hpc_train.cli.children import run_child
from hpc_train.cli.code import is_new
from hpc_train.cli.evaluate import Checkpoint
from hpc_train.cli.export_formats import WEIGHTS, format_of
from hpc_train.cli.unreadable import find_readable
from hpc_train.console import put, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import checkpoints
from hpc_train.run.code.snapshot import check_owner, check_whole, linked, module_in, search_path
from hpc_train.run.find import run_name
from hpc_train.run.trust import check_run

_PROGRAM_MODULE = "hpc_train.checkpoint.program_export"


def export(
    word: str, output: Path, *, form: str | None = None, checkpoint: Checkpoint, ema: bool = False
) -> int:
    """Write the weights, or the model as a program, of one run's newest valid checkpoint.

    A child process does it, which imports torch. ``form``: the format, by default that of the suffix of
    ``output``. ``checkpoint``: another one; ``ema``: with the EMA weights instead.
    """
    form = format_of(output, form)
    checkpoint.refuse_both()
    found = find_readable([word])
    if len(found) > 1:
        raise UsageError(
            f"{word}: matches {len(found)} runs, export takes one; give an id from `hpc-train status {word}`"
        )
    (paths,) = found
    options = [*(["--ema"] if ema else []), *(["--best"] if checkpoint.best else [])]
    options += [] if checkpoint.step is None else ["--step", str(checkpoint.step)]
    request = ("hpc_train.checkpoint.export", str(paths.folder), str(output), *options)
    if form != WEIGHTS:
        return run_child(*request, "--format", form, code=_code(paths, checkpoint.code))
    if is_new(checkpoint.code):
        raise UsageError(f"--code new: a file of {WEIGHTS} does not depend on code; omit it")
    return run_child(*request)


def _code(paths: RunPaths, choice: str | None) -> list[str]:
    """Return where the child imports the model's code from: the run's snapshot, checked, or here."""
    here = [str(Path(hpc_train.__file__).parents[1]), str(Path.cwd())]
    snapshot = None if is_new(choice) else linked(paths)
    check_run(paths)
    if snapshot is None:
        return here
    if not module_in(snapshot, _PROGRAM_MODULE).is_file():
        raise UsageError(
            f"{run_name(paths)}: the code that this run uses is of a version that exports weights alone; "
            "add --code new to export with the current code"
        )
    check_owner(snapshot)
    check_whole(snapshot)
    return search_path(paths)


def verify(words: Sequence[str]) -> ExitCode:
    """Check every checkpoint; FAILED if a valid one is damaged."""
    runs = find_readable(words)
    are_whole = [_verify_run(paths) for paths in runs]
    return ExitCode.DONE if all(are_whole) else ExitCode.FAILED


def _verify_run(paths: RunPaths) -> bool:
    found = paths.checkpoint_folders()[::-1]
    if not found:
        say(f"{run_name(paths)}: no checkpoint yet")
        return True
    counting = set(checkpoints.committed(paths)) | set(checkpoints.damaged(paths))
    bad = 0
    would_load = None
    for checkpoint in found:
        problems = checkpoints.verify(checkpoint)
        if not checkpoint.folder.is_dir():
            continue  # a running run has removed it meanwhile
        counts = checkpoint in counting
        if counts and not problems:
            would_load = would_load or checkpoint
        bad += counts and bool(problems)
        _put_verdict(paths, checkpoint, problems, counts=counts, loads=checkpoint == would_load)
    if would_load is None:
        say(f"{run_name(paths)}: nothing would load; start again with `hpc-train submit FILE --new`")
    return bad == 0


def _put_verdict(
    paths: RunPaths, checkpoint: CheckpointPaths, problems: list[str], *, counts: bool, loads: bool
) -> None:
    verdict = "damaged" if problems else "whole"
    if not counts:
        verdict += ", does not count: its attempt no longer owned the run"
    elif loads:
        verdict += ", would load"
    put(f"{run_name(paths)}  {checkpoint.folder.name}  {verdict}")
    for problem in problems:
        say(f"  {problem}")
