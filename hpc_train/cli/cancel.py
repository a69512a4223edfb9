"""``cancel``: ends runs for good, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.cli.command_options import CancelOptions
from hpc_train.cli.run_row import rows_json, rows_of
from hpc_train.console import put_json, say, say_text
from hpc_train.errors import ExitCode, NoSchedulerError, counted
from hpc_train.launchers.lookup import by_launcher
from hpc_train.paths import RunPaths
from hpc_train.recovery.history import current_status
from hpc_train.run import evaluation_jobs, find, stage_order, trust
from hpc_train.run.run_status import GOING_ON, read_status


def cancel(options: CancelOptions) -> ExitCode:
    """Cancel the runs; return the worst outcome."""
    runs = find.find_runs(options.runs)
    codes, errors = cancel_runs(runs)
    for error in errors:
        say_text(str(error))
    if options.as_json:
        put_json(rows_json(rows_of(runs)))
    return max([*codes, *(error.exit_code for error in errors)])


def cancel_runs(runs_to_cancel: Sequence[RunPaths]) -> tuple[list[ExitCode], list[NoSchedulerError]]:
    """Cancel the runs and the stages after them; return outcomes, and errors of silent schedulers."""
    codes, errors = [ExitCode.DONE], []
    following = [run for paths in runs_to_cancel for run in stage_order.later(paths)]
    runs_to_cancel = list(dict.fromkeys([*runs_to_cancel, *following]))
    for paths in runs_to_cancel:
        trust.check_run(paths)  # its files name the jobs and processes to end
    names = find.run_names(runs_to_cancel)
    for launcher, runs in by_launcher(runs_to_cancel):
        for paths in runs:
            current_status(paths)  # a run whose launcher has died has ended
        before = {paths: read_status(paths).state for paths in runs}
        evaluations = {paths: len(evaluation_jobs.submitted(paths)) for paths in runs}
        try:
            left = set(launcher.cancel(runs))
        except NoSchedulerError as error:
            errors.append(error)
            continue
        codes += [
            ExitCode.FAILED
            if paths in left
            else _report(paths, names[paths], before[paths], evaluations[paths])
            for paths in runs
        ]
    return codes, errors


def _report(paths: RunPaths, name: str, before: str, evaluations: int) -> ExitCode:
    status = read_status(paths)
    if evaluations:
        say(f"{name}: cancelled the jobs of {counted(evaluations, 'evaluation')}")
    if before not in GOING_ON and status.state == before:
        if not evaluations:
            say(f"{name}: {before} already; nothing to cancel")
    elif status.state in GOING_ON:
        say(f"{name}: marked as cancelled; its job is not gone yet")
        return ExitCode.TRY_AGAIN
    elif status.state != "cancelled":
        say(f"{name}: {status.state} before it could be cancelled")
    else:
        say(f"{name}: cancelled at step {status.step}; `hpc-train resume {name}` continues it")
    return ExitCode.DONE
