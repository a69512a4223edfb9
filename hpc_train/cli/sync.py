"""``sync``: sends rows that runs logged without a network to wandb, MLflow or TensorBoard."""

from __future__ import annotations

import os
from typing import Any, TypedDict

from hpc_train.cli.command_options import SyncOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, UsageError, counted
from hpc_train.loggers.syncing import DESTINATIONS, Synced, Target, find_target, named_destinations
from hpc_train.loggers.syncing import sync as sync_rows
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.create import effective_experiment
from hpc_train.run.find import run_name
from hpc_train.run.trust import check_run


class SyncedJson(TypedDict):
    """The rows of a run at one destination."""

    id: str
    path: str
    #: ``wandb``, ``mlflow`` or ``tensorboard``.
    to: str
    #: The final rows, and the step of the last one.
    rows: int
    step: int | None
    #: Number of rows that this command has sent.
    rows_sent: int
    #: The run's page, its id at the service, or the folder of the event files.
    target: str | None
    error: str | None
    #: Lines of ``metrics.jsonl`` that can't be sent, and why.
    notes: list[str]


class Synchronization(TypedDict):
    """The rows that were sent, by run and destination."""

    version: int
    synced: list[SyncedJson]


def sync(options: SyncOptions) -> ExitCode:
    """Send the final rows of runs, each once; TRY_AGAIN if some could not be sent."""
    _check(options)
    targets = [
        (paths, target) for paths in find_readable(options.runs) for target in _targets(paths, options)
    ]
    for line in dict.fromkeys(filter(None, (target.used_variables for _, target in targets))):
        say(line)
    done: list[tuple[RunPaths, Synced]] = []
    for paths, target in targets:
        synced = sync_rows(paths, target)
        done.append((paths, synced))
        if not options.as_json:
            _show(paths, synced)
    if options.as_json:
        rows: list[Any] = [
            {"id": paths.folder.name, "path": str(paths.folder.absolute()), **vars(synced)}
            for paths, synced in done
        ]
        put_json(Synchronization(version=JSON_VERSION, synced=rows))
    failed = [synced for _, synced in done if synced.error is not None]
    if failed:
        say(f"{len(failed)} of {len(done)} failed; the same command sends what is missing, nothing twice")
    return ExitCode.TRY_AGAIN if failed else ExitCode.DONE


def _check(options: SyncOptions) -> None:
    for to in options.to:
        if to not in DESTINATIONS:
            raise UsageError(f"--to: {to!r} is not one of {', '.join(DESTINATIONS)}")
    if options.output is not None and set(options.to) != {"tensorboard"}:
        raise UsageError("-o: is the folder of TensorBoard's event files; add --to tensorboard")
    if options.project is not None and not (set(options.to) <= {"wandb", "mlflow"}):
        raise UsageError("--project: names a project of wandb or an experiment of MLflow; omit it")


def _targets(paths: RunPaths, options: SyncOptions) -> list[Target]:
    """Return the destinations of the run's rows. Raises UserError, before anything is sent.

    UntrustedError: the run's file names servers, which get this user's credentials, and folders.
    """
    name = run_name(paths)
    if not os.access(paths.folder, os.W_OK):
        raise UsageError(f"{name}: you may not write its folder, which records what was sent; ask its owner")
    check_run(paths)
    try:
        experiment = effective_experiment(paths, newest_number(paths))
        chosen = list(dict.fromkeys(options.to)) or named_destinations(experiment)
        if not chosen:
            raise UsageError(
                "logging: names none of wandb, mlflow and tensorboard; say where to send, like --to wandb"
            )
        return [
            find_target(paths, experiment, to, project=options.project, output=options.output)
            for to in chosen
        ]
    except (UsageError, BadFileError) as error:
        raise type(error)(f"{name}: {error}") from error


def _show(paths: RunPaths, synced: Synced) -> None:
    name = f"{run_name(paths)}: {synced.to}"
    for note in synced.notes:
        say(f"{name}: {note}")
    if synced.error is not None:
        say(f"{name}: {synced.error}")
    elif synced.rows == 0:
        put(f"{name}: no rows yet that a checkpoint has made final")
    else:
        what = f"{counted(synced.rows_sent, 'row')} sent, now" if synced.rows_sent else "nothing new,"
        where = f"  {synced.target}" if synced.target else ""
        put(f"{name}: {what} {counted(synced.rows, 'row')} up to step {synced.step:,}{where}")
