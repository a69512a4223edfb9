"""Targets of ``sync``: projects, experiments and folders from the file or the command line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hpc_train.config.fields import Section
from hpc_train.config.schema import Experiment, MlflowConfig, WandbConfig
from hpc_train.console import one_line
from hpc_train.errors import BadFileError, UsageError
from hpc_train.loggers import mlflow, wandb
from hpc_train.loggers.base import LoggerContext
from hpc_train.loggers.tracker_environment import in_a_line
from hpc_train.loggers.wandb_key import base_url, has_key
from hpc_train.paths import RunPaths
from hpc_train.redaction import without_credentials
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import read_json

DESTINATIONS = ("wandb", "mlflow", "tensorboard")
_Config = TypeVar("_Config", bound=Section)


@dataclass(frozen=True)
class Target:
    """Destination of rows. ``key`` identifies it in ``sync.json``, without credentials."""

    to: str
    key: str
    #: For the process that sends the rows.
    settings: dict[str, Any]
    environment: Mapping[str, str]
    #: Folder of the event files; None for a service.
    folder: Path | None = None

    @property
    def used_variables(self) -> str | None:
        """The line that lists the shell variables in use; None if there are none."""
        return in_a_line("wandb" if self.to == "wandb" else "mlflow", os.environ) if not self.folder else None


def named_destinations(experiment: Experiment) -> list[str]:
    """Return the destinations that the file's ``logging`` names."""
    return [to for to in DESTINATIONS if getattr(experiment.logging, to) not in (None, False)]


def find_target(
    paths: RunPaths, experiment: Experiment, to: str, *, project: str | None, output: Path | None
) -> Target:
    """Return the target of a run's rows; ``project`` and ``output`` are options of the command line.

    Raises UsageError if an API key or a URI is missing, BadFileError for a damaged ``run.json``.
    """
    context = _context(paths, experiment)
    if to == "wandb":
        return _wandb(context, project)
    if to == "mlflow":
        return _mlflow(context, project)
    folder = paths.tensorboard.absolute() if output is None else output.absolute() / context.run_id
    settings = {"folder": str(paths.folder.absolute()), "files": str(folder), "is_sync": True}
    return Target(to, _key(to, str(folder)), settings, os.environ, folder)


def _context(paths: RunPaths, experiment: Experiment) -> LoggerContext:
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
    overrides = {"mode": "online", "files": str(context.paths.wandb_sync.absolute()), "is_sync": True}
    key = _key("wandb", base_url(), config.entity, config.project)
    return Target("wandb", key, wandb.start_message(context, config) | overrides, wandb.environment())


def _mlflow(context: LoggerContext, project: str | None) -> Target:
    base = context.experiment.logging.mlflow or MlflowConfig()
    config = base if project is None else _changed(base, "experiment", project)
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UsageError(
            "mlflow: the file has no logging.mlflow.tracking_uri; set MLFLOW_TRACKING_URI to the server's URI"
        )
    settings = mlflow.start_message(context, config) | {"is_sync": True}
    key = _key("mlflow", without_credentials(uri), settings["experiment"])
    return Target("mlflow", key, settings, mlflow.environment())


def _changed(config: _Config, field: str, value: str) -> _Config:
    try:
        return type(config).model_validate(config.model_dump() | {field: value})
    except ValidationError as error:
        shown = repr(one_line(value[:80]))
        raise UsageError(f"--project: {shown} is not a valid logging.*.{field}; use another name") from error


def _key(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
