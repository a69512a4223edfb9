"""``sync``: sends rows that runs logged without a network to wandb, MLflow or TensorBoard, each once.

The process that sends an attempt's rows, ``loggers.process_logger``, sends them. ``sync.json`` in the run
folder records the rows that a target has, so that a repeated sync contacts no server.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from pydantic import ValidationError

from hpc_train.cli.command_options import SyncOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, UsageError, counted
from hpc_train.experiment.config.fields import Section
from hpc_train.experiment.config.schema import Job, MlflowConfig, WandbConfig
from hpc_train.loggers import process_logger, sending
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.process_logger import mlflow_environment, mlflow_settings, wandb_environment
from hpc_train.loggers.tracker_environment import Tracker, base_url, has_key, in_a_line
from hpc_train.package_path import answer_in
from hpc_train.paths import RunPaths
from hpc_train.recovery.history import current_status
from hpc_train.redaction import redacted, without_credentials
from hpc_train.run.attempts import newest_number
from hpc_train.run.checkpoints import committed
from hpc_train.run.create import effective_experiment
from hpc_train.run.files import read_json, write_json
from hpc_train.run.find import run_name
from hpc_train.run.metric_rows import Row, lines_of, parse_row
from hpc_train.run.run_status import GOING_ON
from hpc_train.run.trust import check_run

_TRACKERS: tuple[Tracker, ...] = ("wandb", "mlflow")
_DESTINATIONS = (*_TRACKERS, "tensorboard")
_NO_ANSWER = {"error": "its process (python -m hpc_train.loggers.process_logger) ended without an answer"}
_Config = TypeVar("_Config", bound=Section)


@dataclass(frozen=True)
class Synced:
    """The rows of a run at one destination."""

    id: str
    path: str
    #: ``wandb``, ``mlflow`` or ``tensorboard``.
    to: str
    #: The final rows, and the step of the last one.
    rows: int
    step: int | None
    #: Number of rows that this command has sent.
    rows_sent: int = 0
    #: The run's page, its id at the service, or the folder of the event files.
    target: str | None = None
    error: str | None = None
    #: Lines of ``metrics.jsonl`` that can't be sent, and why; and variables that are ignored.
    notes: list[str] = field(default_factory=list)


class Synchronization(TypedDict):
    """The rows that were sent, by run and destination."""

    synced: list[Synced]


def sync(options: SyncOptions) -> ExitCode:
    """Send the final rows of runs, each once; TRY_AGAIN if some could not be sent."""
    _check(options)
    targets = [
        (paths, target) for paths in find_readable(options.runs) for target in _targets(paths, options)
    ]
    for tracker in _TRACKERS:
        used = any(target.to == tracker for _, target in targets)
        if used and (line := in_a_line(tracker, os.environ)):
            say(line)
    done = []
    for paths, target in targets:
        done.append(sync_rows(paths, target))
        if not options.as_json:
            _show(paths, done[-1])
    if options.as_json:
        rows: list[Any] = list(map(asdict, done))
        put_json(Synchronization(synced=rows))
    failed = [synced for synced in done if synced.error is not None]
    if failed:
        say(f"{len(failed)} of {len(done)} failed; the same command sends what is missing, nothing twice")
    return ExitCode.TRY_AGAIN if failed else ExitCode.DONE


def _check(options: SyncOptions) -> None:
    for to in options.to:
        if to not in _DESTINATIONS:
            raise UsageError(f"--to: {to!r} is not one of {', '.join(_DESTINATIONS)}")
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
        named = [to for to in _DESTINATIONS if getattr(experiment.logging, to) not in (None, False)]
        if not (chosen := list(dict.fromkeys(options.to)) or named):
            raise UsageError(
                "logging: names none of wandb, mlflow and tensorboard; say where to send, like --to wandb"
            )
        context = _context(paths, experiment)
        return [_target(context, to, options) for to in chosen]
    except (UsageError, BadFileError) as error:
        raise type(error)(f"{name}: {error}") from error


def _show(paths: RunPaths, synced: Synced) -> None:
    name = f"{run_name(paths)}: {synced.to}"
    say(*(f"{name}: {note}" for note in synced.notes))
    if synced.error is not None:
        say(f"{name}: {synced.error}")
    elif synced.rows == 0:
        put(f"{name}: no rows yet that a checkpoint has made final")
    else:
        what = f"{counted(synced.rows_sent, 'row')} sent, now" if synced.rows_sent else "nothing new,"
        where = f"  {synced.target}" if synced.target else ""
        put(f"{name}: {what} {counted(synced.rows, 'row')} up to step {synced.step:,}{where}")


@dataclass(frozen=True)
class Target:
    """Destination of rows. ``key`` identifies it in ``sync.json``, without credentials."""

    to: str
    key: str
    #: For the process that sends the rows.
    settings: dict[str, Any]
    environment: Mapping[str, str]
    #: Folder of the event files; None for a server.
    folder: Path | None = None


def _target(context: LoggerContext, to: str, options: SyncOptions) -> Target:
    """Return the target of a run's rows. Raises UsageError if an API key or a URI is missing."""
    if to == "wandb":
        return _wandb(context, options.project)
    if to == "mlflow":
        return _mlflow(context, options.project)
    paths, output = context.paths, options.output
    folder = paths.tensorboard.absolute() if output is None else output.absolute() / context.run_id
    settings = {"to": to, "folder": str(paths.folder.absolute()), "event_files": str(folder)}
    return Target(to, _key(to, str(folder)), settings, os.environ, folder)


def _context(paths: RunPaths, experiment: Job) -> LoggerContext:
    facts = read_json(paths.run) or {}
    run_id, wandb_id = facts.get("id"), facts.get("wandb_id")
    if not isinstance(run_id, str) or not isinstance(wandb_id, str) or run_id != Path(run_id).name:
        raise BadFileError(f"{paths.run}: has no valid id and wandb_id; restore the file from a backup")
    return LoggerContext(experiment, paths, run_id, newest_number(paths), wandb_id, {})


def _wandb(context: LoggerContext, project: str | None) -> Target:
    if not has_key():
        raise UsageError("wandb: no API key is set; run `wandb login`, or set WANDB_API_KEY")
    base = context.experiment.logging.wandb or WandbConfig(project=context.experiment.name)
    config = base if project is None else _changed(base, "project", project)
    settings = process_logger.wandb_settings(context, config)
    settings |= {"mode": "online", "scratch": str(context.paths.wandb_sync.absolute())}
    key = _key("wandb", base_url(), config.entity, config.project)
    return Target("wandb", key, settings, wandb_environment())


def _mlflow(context: LoggerContext, project: str | None) -> Target:
    base = context.experiment.logging.mlflow or MlflowConfig()
    config = base if project is None else _changed(base, "experiment", project)
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UsageError(
            "mlflow: the file has no logging.mlflow.tracking_uri; set MLFLOW_TRACKING_URI to the server's URI"
        )
    settings = mlflow_settings(context, config)
    key = _key("mlflow", without_credentials(uri), settings["experiment"])
    return Target("mlflow", key, settings, mlflow_environment())


def _changed(config: _Config, field: str, value: str) -> _Config:
    try:
        return type(config).model_validate(config.model_dump() | {field: value})
    except ValidationError as error:
        raise UsageError(
            f"--project: {value[:80]!r} is not a valid logging.*.{field}; use another name"
        ) from error


def _key(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def sync_rows(paths: RunPaths, target: Target) -> Synced:
    """Send the final rows that the target lacks. Calling it again sends the rows that failed.

    A run that has not ended is sent up to its newest checkpoint.
    """
    state = current_status(paths).state
    final = _FinalRows.of(paths, is_completed=state == "completed")
    end = None if state in GOING_ON else int(state != "completed")
    record = {"to": target.to, "end": end, **asdict(final)}
    before = _records(paths).get(target.key, {})
    step = final.step if final.rows else None
    has_all = record.items() <= before.items() and (target.folder is None or target.folder.is_dir())
    synced = partial(Synced, paths.folder.name, str(paths.folder.absolute()), target.to, final.rows, step)
    if final.rows == 0 or has_all:
        return synced(target=before.get("target"))
    settings = target.settings | {"is_sync": True, "withdraw_to": _withdraw_to(paths, before)}
    answer = _answer([settings, {"committed": final.step}, {"end": end}], target.environment)
    if "error" in answer:
        return synced(error=redacted(str(answer["error"])))
    page = redacted(answer["target"]) if answer["target"] else None
    records = _records(paths) | {target.key: record | {"target": page}}
    write_json(paths.synced, {"version": 1, "targets": records})
    return synced(answer["rows_sent"], page, notes=list(map(redacted, answer["notes"])))


def _records(paths: RunPaths) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = (read_json(paths.synced) or {}).get("targets", {})
    return records


def _answer(messages: list[dict[str, Any]], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer of ``loggers.process_logger``."""
    process = process_logger.start_process(environment, stderr=subprocess.DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            # Left open: the process treats the end of its input as the end of this one.
            process.stdin.write("".join(json.dumps(message) + "\n" for message in messages).encode())
            process.wait(sending.SYNC_LIMIT_S)
            return answer_in(process.stdout.read()) or _NO_ANSWER
        except subprocess.TimeoutExpired:
            return {"error": f"not all rows could be sent within {sending.SYNC_LIMIT_S // 60} minutes"}
        except OSError:
            return _NO_ANSWER
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(frozen=True)
class _FinalRows:
    """The first ``rows`` rows of the file, which are its first ``size`` bytes; nothing withdraws them."""

    rows: int = 0
    size: int = 0
    #: Hash of these bytes, in hexadecimal.
    sha256: str = ""
    #: Step of the last row; -1 without rows.
    step: int = -1

    @classmethod
    def of(cls, paths: RunPaths, *, is_completed: bool) -> _FinalRows:
        """Read the rows up to the newest checkpoint, or all of a run that has completed."""
        newest = max((checkpoint.step for checkpoint in committed(paths)), default=-1)
        rows, size, step, digest = 0, 0, -1, hashlib.sha256()
        for line, row in _whole_lines(paths.metrics):
            if row is not None and row["step"] > newest and not is_completed:
                break
            digest.update(line)
            size += len(line)
            if row is not None:
                rows, step = rows + 1, row["step"]
        return cls(rows, size, digest.hexdigest(), step)


def _withdraw_to(paths: RunPaths, before: Mapping[str, Any]) -> int | None:
    """Return after which step a target that knows steps, not rows, must write rows again; None: none.

    A row may follow a checkpoint of its own step: that of an evaluation that a resume repeats.
    """
    if not before:
        return None
    size, digest = 0, hashlib.sha256()
    lines = _whole_lines(paths.metrics)
    while size < before.get("size", 0) and (line := next(lines, (b"", None))[0]):
        size += len(line)
        digest.update(line)
    if digest.hexdigest() != before.get("sha256"):
        return -1
    first_new = next((row for _, row in lines if row is not None), None)
    return first_new["step"] - 1 if first_new is not None and first_new["step"] <= before["step"] else None


def _whole_lines(metrics: Path) -> Iterator[tuple[bytes, Row | None]]:
    """Yield the file's whole lines and their rows; none if there is no file."""
    for line in lines_of(metrics):
        if not line.endswith(b"\n"):
            return
        yield line, parse_row(line)
