"""``evaluate``: one checkpoint of a run on validation data, by ranks on this machine."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.cli.changes import key_of, runs_and_overrides
from hpc_train.cli.code import is_new
from hpc_train.cli.command_line import exit_code_of
from hpc_train.cli.command_options import EvaluateOptions, RanksOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put, put_json, say
from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.experiment.config.schema import Experiment, Job, as_training
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.local import LocalLauncher
from hpc_train.paths import RunPaths
from hpc_train.recovery.diagnosis import one_line
from hpc_train.report.metrics_reader import in_words
from hpc_train.run import evaluation_jobs, frozen_experiment
from hpc_train.run.attempts import newest_number
from hpc_train.run.checkpoints import find_step, selection_words
from hpc_train.run.code.snapshot import link, linked
from hpc_train.run.create import noted_changes
from hpc_train.run.files import read_json, write_json
from hpc_train.run.find import run_name
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.metric_rows import evaluation_rows
from hpc_train.run.run_status import read_status
from hpc_train.run.trust import check_run

#: Sections that an evaluation may change: location, devices and data. All others come from the checkpoint.
_CHANGEABLE = ("data", "parallel", "device", "deterministic", "precision", "compile")


class Evaluation(TypedDict):
    """One evaluation of a checkpoint."""

    version: int
    id: str
    path: str
    #: Like a ``val`` row of ``metrics.jsonl``.
    row: dict[str, Any]


def evaluate(options: EvaluateOptions) -> ExitCode:
    """Evaluate a checkpoint of a run; print a row like a ``val`` row.

    Writes nothing into the run's folder, except for the row of an evaluation by a job that has left none.
    """
    code, run_of_ranks = run_ranks("evaluate", options, {})
    if code != ExitCode.DONE:
        return code
    (row,) = evaluation_rows(run_of_ranks.metrics)
    run = RunPaths(Path((read_json(run_of_ranks.evaluated_checkpoint) or {})["run"]))
    shutil.rmtree(run_of_ranks.folder.parent)
    is_changed = bool(runs_and_overrides(options.runs_and_overrides)[1]) or is_new(options.code)
    if evaluation_jobs.is_missing(run, row["step"]) and not is_changed:
        evaluation_jobs.note_row(run, row)
        say(f"{run_name(run)}: recorded as the evaluation of step {row['step']}, whose job has left no row")
    if options.as_json:
        put_json(Evaluation(version=JSON_VERSION, id=run.folder.name, path=str(run.folder), row=row))
    else:
        put(f"{run_name(run)}  step {row['step']}  {in_words(row)}")
    return ExitCode.DONE


def run_ranks(
    command: str,
    options: RanksOptions,
    request: dict[str, Any],
    check: Callable[[Experiment], None] = lambda experiment: None,
) -> tuple[ExitCode, RunPaths]:
    """Start ranks that load the checkpoint and carry out ``request``; return their exit code.

    Also return their run folder, alone in a temporary folder that the caller removes; an error leaves it in
    place. ``check`` raises UsageError for an experiment that can't do it, before any rank starts.
    """
    run_words, overrides = runs_and_overrides(options.runs_and_overrides)
    paths = one_run(command, run_words)
    wants_best = options.wants_best
    if key := next((key for key in map(key_of, overrides) if key.split(".")[0] not in _CHANGEABLE), None):
        raise UsageError(
            f"{key}: can't be changed in an evaluation, since the checkpoint was trained with it; "
            f"keys of {', '.join(_CHANGEABLE)} can"
        )
    check_run(paths)
    experiment = newest_experiment(paths, overrides)
    check(experiment)
    snapshot = None if is_new(options.code) else linked(paths)
    step = find_step(paths, best=wants_best, step=options.step)
    if words := selection_words(paths, step):
        say(f"{run_name(paths)}: {words}")
    folder = Path(tempfile.mkdtemp(prefix=f"hpc-train-{command}-"))
    request = request | {"version": 1, "run": str(paths.folder.absolute()), "step": step}
    run_of_ranks = ranks_folder(folder / paths.folder.name, experiment, snapshot)
    write_json(run_of_ranks.evaluated_checkpoint, request)
    ended = LocalLauncher().launch(LaunchRequest(run_of_ranks, experiment, 1, options.devices), lambda: None)
    if ended != ExitCode.DONE:
        say(f"{command}: failed; the logs of its ranks are in {run_of_ranks.attempt(1).folder}")
    return ended, run_of_ranks


def one_run(command: str, names: Sequence[str]) -> RunPaths:
    """Return the run that the words name. Raises UsageError unless it is exactly one."""
    if not names:
        raise UsageError(f"{command}: names no run; give a run id or a run's folder")
    runs = find_readable(names)
    if len(runs) != 1:
        raise UsageError(f"{command}: takes one run, and {' '.join(names)} matches {len(runs)}; give one id")
    return runs[0]


def newest_experiment(paths: RunPaths, overrides: Sequence[str]) -> Experiment:
    """Return the newest attempt's experiment with the overrides and the size that ``auto`` found."""
    changes = [*noted_changes(paths, newest_number(paths)), *overrides]
    experiment = as_training(frozen_experiment.load_changed(paths, changes).experiment)
    if experiment.optimization.micro_batch_size != "auto":
        return experiment
    size = kept_size(paths)
    if size is None:
        raise UsageError(
            "optimization.micro_batch_size: auto, and the run has not found a size yet; evaluate it once it "
            "has trained"
        )
    return experiment.with_micro_batch_size(size)


def ranks_folder(folder: Path, experiment: Job, snapshot: Path | None) -> RunPaths:
    """Create a run folder for ranks that do not train, with the code of ``snapshot``, if there is one."""
    run = RunPaths(folder)
    run.folder.mkdir(mode=0o700)
    frozen_experiment.write(run, experiment)
    if snapshot is not None:
        link(run, snapshot)
    return run


def write_row(run: str, file: str) -> ExitCode:
    """Evaluate the best checkpoint of a run, else its newest; append the row to ``file``.

    Called by a stage of a file, in its working folder.
    """
    code, run_of_ranks = run_ranks("evaluate", EvaluateOptions(runs_and_overrides=[run]), {})
    if code == ExitCode.DONE:
        (row,) = evaluation_rows(run_of_ranks.metrics)
        shutil.rmtree(run_of_ranks.folder.parent)
        with Path(file).open("a", encoding="utf-8") as rows:
            rows.write(f"{json.dumps(row)}\n")
        put(f"step {row['step']}  {in_words(row)}")
    return code


def evaluate_in_job(run: str, step: str) -> ExitCode:
    """Evaluate a checkpoint for which training has requested a job; record its row in the run's folder.

    The command of that job. Does nothing if the row exists, or the run was cancelled.
    """
    paths, number = RunPaths(Path(run)), int(step)
    options, code = EvaluateOptions(runs_and_overrides=[run], step=number, devices=1), ExitCode.DONE
    for is_last in (False, True):  # a process may be killed
        if paths.cancelled.exists() or number not in evaluation_jobs.unfinished(paths):
            say(f"{run_name(paths)}: the evaluation of step {number} is not due")
            return ExitCode.DONE
        try:
            code, run_of_ranks = run_ranks("evaluate", options, {})
        except UserError as error:
            evaluation_jobs.note_failure(paths, number, one_line(str(error)))
            raise
        if code == ExitCode.DONE:
            (row,) = evaluation_rows(run_of_ranks.metrics)
            evaluation_jobs.note_row(paths, row)
            shutil.rmtree(run_of_ranks.folder.parent)
            put(f"step {row['step']}  {in_words(row)}")
        if code in {ExitCode.DONE, ExitCode.TRY_AGAIN, ExitCode.INTERRUPTED}:  # its job starts again
            return code
        if is_last:
            evaluation_jobs.note_failure(paths, number, read_status(run_of_ranks).reason or "failed")
    return code


def main(arguments: Sequence[str]) -> ExitCode:
    """``--job RUN STEP``: as a job that training has requested. ``RUN FILE``: as a stage."""
    if arguments[:1] == ["--job"]:
        return evaluate_in_job(*arguments[1:])
    return write_row(*arguments)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
