"""``export`` and ``verify``: the checkpoints of runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.command_options import ExportOptions, VerifyOptions
from hpc_train.cli.logs import listed_runs
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import PROGRAMS, RunPaths, from_here
from hpc_train.run import checkpoints
from hpc_train.run.find import run_name
from hpc_train.run.run_status import run_facts
from hpc_train.run.trust import check_run


class CheckpointJson(TypedDict):
    """One checkpoint, checked by its hashes."""

    step: int
    path: str
    #: Empty if it is intact.
    problems: list[str]
    #: False if the attempt that wrote it no longer owned the run.
    counts: bool
    #: Whether it is the one that would be loaded.
    loads: bool


class VerifiedRun(TypedDict):
    """A run's checkpoints, the newest one first."""

    id: str
    name: str
    path: str
    checkpoints: list[CheckpointJson]


class Verification(TypedDict):
    """Which checkpoints would load."""

    version: int
    runs: list[VerifiedRun]


class Export(TypedDict):
    """The file that was written."""

    version: int
    #: The run's.
    id: str
    file: str
    bytes: int
    #: Of the checkpoint.
    step: int
    ema: bool
    #: Weights and buffers.
    tensors: int


def export(options: ExportOptions) -> int:
    """Write the weights, or the model as a program, of a checkpoint of one run.

    A child process, which imports torch, does the work.
    """
    output, best = options.output, options.wants_best
    if output.suffix not in ("", ".safetensors", *PROGRAMS):
        say(f"-o {output}: written as safetensors")
    matches = find_readable([options.run])
    if len(matches) > 1:
        raise UsageError(
            f"{options.run}: matches {len(matches)} runs, export takes one; write its id:\n"
            f"{listed_runs(matches)}"
        )
    paths = matches[0]
    if run_facts(paths).get("workload") == "program":
        raise UsageError(
            f"{run_name(paths)}: a program of yours writes its weights itself, below "
            f"{from_here(paths.work)} or {from_here(paths.checkpoints)}"
        )
    if output.suffix in PROGRAMS:  # builds the model by the run's code
        check_run(paths)
    flags = [] if options.ema is None else ["--ema" if options.ema else "--no-ema"]
    flags += [] if best is None else ["--best" if best else "--last"]
    flags += [] if options.step is None else ["--step", str(options.step)]
    request = ("hpc_train.training.checkpoint.export", str(paths.folder), str(output), *flags)
    if not options.as_json:
        return run_child(*request)
    exit_code, report = child_report(*request)
    if exit_code == ExitCode.DONE:
        written = Export(
            version=JSON_VERSION,
            id=paths.folder.name,
            file=str(output),
            bytes=output.stat().st_size,
            step=report["step"],
            ema=report["ema"],
            tensors=report["tensors"],
        )
        put_json(written)
    return exit_code


def verify(options: VerifyOptions) -> ExitCode:
    """Check every checkpoint; FAILED if a valid one is damaged."""
    runs = [
        VerifiedRun(
            id=paths.folder.name,
            name=paths.siblings.folder.name,
            path=str(paths.folder.absolute()),
            checkpoints=list(_verified(paths, shows=not options.as_json)),
        )
        for paths in find_readable(options.runs)
    ]
    if options.as_json:
        put_json(Verification(version=JSON_VERSION, runs=runs))
    is_damaged = any(saved["counts"] and saved["problems"] for run in runs for saved in run["checkpoints"])
    return ExitCode.FAILED if is_damaged else ExitCode.DONE


def _verified(paths: RunPaths, *, shows: bool) -> Iterator[CheckpointJson]:
    """Yield a run's checkpoints, newest first; ``shows``: print each once it is verified."""
    folders = paths.checkpoint_folders()[::-1]
    if not folders:
        say(f"{run_name(paths)}: no checkpoint yet")
        return
    counting = set(checkpoints.committed(paths)) | set(checkpoints.damaged(paths))
    would_load = None
    for checkpoint in folders:
        problems = checkpoints.verify(checkpoint)
        if not checkpoint.folder.is_dir():
            continue  # a running run has removed it meanwhile
        counts = checkpoint in counting
        if counts and not problems:
            would_load = would_load or checkpoint
        loads = checkpoint == would_load
        if shows:
            text = "damaged" if problems else "whole"
            if not counts:
                text += ", does not count: its attempt no longer owned the run"
            elif loads:
                text += ", would load"
            put(f"{run_name(paths)}  {checkpoint.folder.name}  {text}")
            for problem in problems:
                say(f"  {problem}")
        yield CheckpointJson(
            step=checkpoint.step,
            path=str(checkpoint.folder),
            problems=problems,
            counts=counts,
            loads=loads,
        )
    if would_load is None:
        say(f"{run_name(paths)}: nothing would load; start again with `hpc-train submit FILE --new`")
