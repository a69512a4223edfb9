"""``evaluate``, ``predict`` and ``export``: the commands on one checkpoint of a run.

The first two start ranks on this machine; for the last a child process writes the weights, or the model as a
program, to one file.
"""

from __future__ import annotations

import heapq
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from hpc_train.cli.changes import key_of, runs_and_overrides
from hpc_train.cli.children import child_report, run_child
from hpc_train.cli.code import is_new
from hpc_train.cli.command_line import exit_code_of
from hpc_train.cli.command_options import EvaluateOptions, ExportOptions, PredictOptions, RanksOptions
from hpc_train.cli.logs import listed_runs
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import csv_line, put, put_json, say
from hpc_train.errors import ExitCode, UsageError, UserError
from hpc_train.experiment.config.schema import Experiment, Job, as_training
from hpc_train.experiment.data_facts.built_in import TASKS
from hpc_train.experiment.data_facts.by_name import task_facts
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.local import LocalLauncher
from hpc_train.paths import PROGRAMS, RunPaths, expanded, from_here
from hpc_train.recovery.diagnosis import one_line
from hpc_train.report.metrics_reader import in_words
from hpc_train.run import attempts, checkpoints, create, evaluation_jobs, found_micro_batch, frozen_experiment
from hpc_train.run.bad_samples import BadSample, all_known
from hpc_train.run.code.snapshot import link, linked
from hpc_train.run.files import read_json, replacing, write_json
from hpc_train.run.find import refuse_target, run_name
from hpc_train.run.metric_rows import evaluation_rows, finite
from hpc_train.run.run_status import read_status, run_facts
from hpc_train.run.trust import check_run

#: Sections that an evaluation may change: location, devices and data. All others come from the checkpoint.
_CHANGEABLE = ("data", "parallel", "device", "deterministic", "precision", "compile")
_FORMATS = (".jsonl", ".csv")
#: Number of skipped samples that are named.
_SHOWN = 5


class Evaluation(TypedDict):
    """One evaluation of a checkpoint."""

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
        put_json(Evaluation(id=run.folder.name, path=str(run.folder), row=row))
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
    step = checkpoints.find_step(paths, best=wants_best, step=options.step)
    if words := checkpoints.selection_words(paths, step):
        say(f"{run_name(paths)}: {words}")
    request = request | {"version": 1, "run": str(paths.folder.absolute()), "step": step}
    run_of_ranks = ranks_folder(command, paths, experiment, snapshot)
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
        count = f"{' '.join(names)}: matches {len(runs)} runs"
        raise UsageError(f"{count}, {command} takes one; write its id:\n{listed_runs(runs)}")
    return runs[0]


def newest_experiment(paths: RunPaths, overrides: Sequence[str]) -> Experiment:
    """Return the newest attempt's experiment with the overrides and the size that ``auto`` found."""
    return experiment_of(paths, attempts.newest_number(paths), overrides)


def experiment_of(paths: RunPaths, attempt: int, overrides: Sequence[str]) -> Experiment:
    """Return an attempt's experiment with the overrides and the size that ``auto`` found."""
    changes = [*create.noted_changes(paths, attempt), *overrides]
    experiment = as_training(frozen_experiment.load_changed(paths, changes).experiment)
    if experiment.optimization.micro_batch_size != "auto":
        return experiment
    size = found_micro_batch.kept_size(paths)
    if size is None:
        raise UsageError(
            "optimization.micro_batch_size: auto, and the run has not found a size yet; evaluate it once it "
            "has trained"
        )
    return experiment.with_micro_batch_size(size)


def ranks_folder(command: str, paths: RunPaths, experiment: Job, snapshot: Path | None) -> RunPaths:
    """Create a temporary run folder for ranks that do not train, with the code of ``snapshot``, if any."""
    run = RunPaths(Path(tempfile.mkdtemp(prefix=f"hpc-train-{command}-"), paths.folder.name))
    run.folder.mkdir(mode=0o700)
    frozen_experiment.write(run, experiment)
    if snapshot is not None:
        link(run, snapshot)
    return run


def write_row(run: str, file: str) -> ExitCode:
    """Append the row of the best checkpoint, else the newest, to ``file``. Called by a stage."""
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


class Predictions(TypedDict):
    """The file that was written."""

    #: The run's.
    id: str
    file: str
    #: ``jsonl`` or ``csv``.
    format: str
    bytes: int
    step: int
    #: One per sample.
    predictions: int
    #: Samples without a prediction, since they can't be read (``data.on_bad_sample: skip``).
    skipped: int


def predict(options: PredictOptions) -> ExitCode:
    """Write a line per sample to ``--output``, in the order of the samples.

    Raises UsageError if the file exists without ``--force``, or has a suffix other than .jsonl or .csv, or if
    the run's task can't predict, or not in this format.
    """
    output = options.output
    _refuse_output(output, force=options.force)
    images = None if options.data is None else str(expanded(options.data).absolute())
    if images is not None and not Path(images).exists():
        raise UsageError(f"--data: there is no file or folder {options.data}")
    request = {"predict": {"images": images, "ema": options.ema}}
    code, run_of_ranks = run_ranks("predict", options, request, partial(_refuse_task, suffix=output.suffix))
    if code != ExitCode.DONE:
        return code
    with replacing(output.absolute()) as file:
        count = write_rows(file, partial(_merged_rows, run_of_ranks.prediction_files()), output.suffix)
    evaluated = read_json(run_of_ranks.evaluated_checkpoint) or {}
    skipped = sorted(all_known(run_of_ranks).values(), key=lambda sample: sample.index)
    notices = read_json(run_of_ranks.attempt(attempts.newest_number(run_of_ranks)).notices) or {}
    shutil.rmtree(run_of_ranks.folder.parent)
    say(*(f"predict: {line}" for line in notices.get("lines", [])))
    say_skipped(skipped)
    if options.as_json:
        put_json(
            Predictions(
                id=Path(evaluated["run"]).name,
                file=str(output),
                format=output.suffix[1:],
                bytes=output.stat().st_size,
                step=evaluated["step"],
                predictions=count,
                skipped=len(skipped),
            )
        )
    else:
        skipped_words = f", {len(skipped)} sample{'s' * (len(skipped) > 1)} skipped" if skipped else ""
        put(f"{output}  {count} predictions{skipped_words}")
    return ExitCode.DONE


def _refuse_output(output: Path, *, force: bool) -> None:
    if output.suffix not in _FORMATS:
        raise UsageError(f"-o: {output} must end in .jsonl or .csv, which chooses the format")
    refuse_target(output)
    if output.exists() and not force:
        raise UsageError(f"-o: {output} exists; add --force to replace it, or give another name")


def _refuse_task(experiment: Experiment, suffix: str) -> None:
    formats = task_facts(experiment.task).prediction_formats
    if formats == ():
        able = ", ".join(name for name, facts in TASKS.items() if facts.prediction_formats)
        raise UsageError(
            f"task: {experiment.task} can't predict; {able} and your own tasks with a method predictions can "
            "(docs/plugins.md)"
        )
    if formats is not None and suffix not in formats:
        raise UsageError(
            f"-o: predictions of {experiment.task} can't be written as {suffix}; name a {formats[0]} file"
        )


def say_skipped(samples: Sequence[BadSample]) -> None:
    """Report the samples that ``data.on_bad_sample: skip`` has skipped, the first ones by name."""
    for sample in samples[:_SHOWN]:
        say(f"predict: skipped, since it can't be read: {sample.name}: {sample.why}")
    if len(samples) > _SHOWN:
        say(f"predict: … and {len(samples) - _SHOWN} more; the file has no line for them")


def _merged_rows(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the ranks' files in the order of the samples."""
    with ExitStack() as stack:
        rows = (map(json.loads, stack.enter_context(file.open())) for file in files)
        yield from heapq.merge(*rows, key=lambda row: row["index"])


def write_rows(file: BinaryIO, read: Callable[[], Iterable[dict[str, Any]]], suffix: str) -> int:
    """Write the rows that each call of ``read`` returns as UTF-8, and return their number.

    A byte of a name that is not UTF-8 is written as ``\\udcff`` in both formats, as JSON escapes it.
    """
    if suffix == ".csv":
        lines = _csv_lines(read)
    else:
        lines = (json.dumps(finite(row), allow_nan=False) + "\n" for row in read())
    return sum(1 for line in lines if file.write(line.encode(errors="backslashreplace")))


def _csv_lines(read: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[str]:
    """Yield a line per row, the first with a header of the columns that any row has."""
    columns = dict.fromkeys(name for row in read() for name in _cells(row))
    for number, cells in enumerate(map(_cells, read())):
        header = csv_line(columns) if number == 0 else ""
        yield header + csv_line(cells.get(name) for name in columns)


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return column → value: one column per value of a list, one for all labels; nested lists are omitted."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if not isinstance(value, list | dict):
            cells[key] = value
        elif key == "labels":
            cells[key] = ";".join(map(str, value))
        else:
            cells |= _parts("probability" if key == "probabilities" else key, value)
    return cells


def _parts(name: str, values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """Return a cell per value, named by its position or key; empty if any value is nested itself."""
    parts = values if isinstance(values, dict) else dict(enumerate(values))
    if any(isinstance(part, list | dict) for part in parts.values()):
        return {}
    return {f"{name}_{key}": part for key, part in parts.items()}


class Export(TypedDict):
    """The file that was written."""

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
    """Write a checkpoint's weights or program; a child process, which imports torch, does the work."""
    output, best = options.output, options.wants_best
    if output.suffix not in ("", ".safetensors", *PROGRAMS):
        say(f"-o {output}: written as safetensors")
    paths = one_run("export", [options.run])
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
            id=paths.folder.name,
            file=str(output),
            bytes=output.stat().st_size,
            step=report["step"],
            ema=report["ema"],
            tensors=report["tensors"],
        )
        put_json(written)
    return exit_code


def main(arguments: Sequence[str]) -> ExitCode:
    """``--job RUN STEP``: as a job that training has requested. ``RUN FILE``: as a stage."""
    if arguments[:1] == ["--job"]:
        return evaluate_in_job(*arguments[1:])
    return write_row(*arguments)


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
