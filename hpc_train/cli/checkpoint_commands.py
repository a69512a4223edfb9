"""``export`` and ``verify``: the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_train.cli.children import run_child
from hpc_train.cli.unreadable import find_readable
from hpc_train.console import put, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.run import checkpoints
from hpc_train.run.find import run_name


def export(word: str, output: Path, *, ema: bool = False, best: bool = False) -> int:
    """Write the weights of one run's newest valid checkpoint, in a child process, which imports torch.

    ``ema``: the EMA weights instead. ``best``: of the best checkpoint instead.
    """
    found = find_readable([word])
    if len(found) > 1:
        raise UsageError(
            f"{word}: matches {len(found)} runs, export takes one; give an id from `hpc-train status {word}`"
        )
    options = [*(["--ema"] if ema else []), *(["--best"] if best else [])]
    return run_child("hpc_train.checkpoint.export", str(found[0].folder), str(output), *options)


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
