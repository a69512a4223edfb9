"""``export``: the weights of a run, or its model as a program, in one file."""

from __future__ import annotations

from typing import TypedDict

from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.command_options import ExportOptions
from hpc_train.cli.logs import listed_runs
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.paths import PROGRAMS, from_here
from hpc_train.run.find import run_name
from hpc_train.run.run_status import run_facts
from hpc_train.run.trust import check_run


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
