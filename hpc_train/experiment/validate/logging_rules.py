"""Rules on ``logging``: names of loggers, their packages, and MLflow's store. MLflow is not imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import parse_qsl, urlsplit

from hpc_train.errors import shortened
from hpc_train.experiment.config.problems import KeyPath, Problem, is_clean
from hpc_train.experiment.config.schema import EnvironmentConfig, Experiment, LoggingConfig
from hpc_train.experiment.validate.base import rule
from hpc_train.redaction import SECRET_PARAMETERS
from hpc_train.registry import parts, suggestion

_KEY: KeyPath = ("logging", "mlflow", "tracking_uri")
_REMOTE_DATABASES = ("postgresql", "mysql", "mssql")
_SERVERS = ("http", "https", "databricks", "uc")


def is_database(uri: str) -> bool:
    """Return True if MLflow opens the URI by SQLAlchemy."""
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", *_REMOTE_DATABASES)


@rule("logging.tracking-uri", "logging.mlflow.tracking_uri")
def tracking_uri_is_usable(experiment: Experiment) -> Iterator[Problem]:
    """``logging.mlflow.tracking_uri`` must be of a known kind, absolute, and contain no secret."""
    config = experiment.logging.mlflow
    uri = config.tracking_uri if config is not None else None
    if uri is not None and (problem := _problem(uri)):
        yield Problem(_KEY, *problem)


def _problem(uri: str) -> tuple[str, str] | None:
    if not is_clean(uri) or " " in uri:
        return "has a blank, a control character or a line break", "take it out"
    try:
        parts = urlsplit(uri)
        has_user, has_password = parts.username is not None, parts.password is not None
    except ValueError:
        return "is not a URI", "write one like https://mlflow.example.org"
    kind = parts.scheme.partition("+")[0]
    if has_password or (has_user and kind in _SERVERS) or _has_secret(parts.query):
        return "contains a user or a secret, and each run folder has a copy of this file", _remedy(kind)
    if kind in _SERVERS or uri in _SERVERS or kind in _REMOTE_DATABASES:
        return None
    if kind == "sqlite":
        is_absolute, example = parts.path.startswith("//"), "sqlite:////folder/mlflow.db"
    elif kind in ("", "file"):
        is_absolute, example = parts.path.startswith("/") and not parts.netloc, "file:///folder/mlruns"
    else:
        schemes = ", ".join((*_SERVERS, "file", "sqlite", *_REMOTE_DATABASES))
        return f"MLflow has no store for '{shortened(kind)}:'", f"write a URI of {schemes}"
    return None if is_absolute else ("is a relative path", f"write an absolute one, {example}")


def _remedy(kind: str) -> str:
    if kind in _SERVERS:
        return (
            "take it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN, where the ranks start"
        )
    return "take out the key, and set MLFLOW_TRACKING_URI where the ranks start"


def _has_secret(query: str) -> bool:
    return any(word in name.lower() for name, _ in parse_qsl(query) for word in SECRET_PARAMETERS)


@rule("logging.unknown", "logging.loggers")
def loggers_are_known(experiment: Experiment) -> Iterator[Problem]:
    """The keys of ``logging.loggers`` must name loggers without a section of their own."""
    with_section = parts("loggers").keys() & LoggingConfig.model_fields.keys()
    for name in experiment.logging.loggers:
        path = ("logging", "loggers", name)
        if name in with_section:
            is_switch = LoggingConfig.model_fields[name].annotation is bool
            remedy = f"write logging.{name}: {'true' if is_switch else '{…}'}"
            yield Problem(path, f"{name} has a key of its own", remedy, on_key=True)
        elif name not in parts("loggers"):
            known = parts("loggers").keys() - with_section
            remedy = suggestion(name, known, "install its package, or take it out")
            yield Problem(path, f"there is no logger '{shortened(name)}'", remedy, on_key=True)


@rule(
    "logging.tensorboard-missing",
    "logging.tensorboard environment.python environment.container",
    looks_up_names=True,
)
def tensorboard_is_installed(experiment: Experiment) -> Iterator[Problem]:
    """``logging.tensorboard`` needs the package, if the ranks use this command's Python."""
    is_on = experiment.logging.tensorboard
    if is_on and (message := not_installed(experiment.environment, "tensorboard")):
        remedy = "run pip install 'hpc-train[tensorboard]', or take the key out"
        yield Problem(("logging", "tensorboard"), message, remedy)


@rule(
    "logging.mlflow-missing", "logging.mlflow environment.python environment.container", looks_up_names=True
)
def mlflow_is_installed(experiment: Experiment) -> Iterator[Problem]:
    """``logging.mlflow`` needs the package, and databases two more, if the ranks use this Python."""
    config = experiment.logging.mlflow
    if config is None:
        return
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    needed = ["mlflow", *(["sqlalchemy", "alembic"] if is_database(uri) else [])]
    if message := not_installed(experiment.environment, *needed):
        remedy = "run pip install 'hpc-train[mlflow]', or take the section out"
        yield Problem(("logging", "mlflow"), message, remedy)


def not_installed(environment: EnvironmentConfig, *modules: str) -> str | None:
    """Return the first module that this command's Python lacks; None also if the ranks use another Python."""
    if environment.python is not None or environment.container is not None:
        return None
    missing = next((name for name in modules if find_spec(name) is None), None)
    return missing and f"the package {missing.replace('_', '-')} is not installed for {sys.executable}"


@rule("logging.mlflow-store", "logging.mlflow.tracking_uri", looks_up_names=True)
def mlflow_has_a_store(experiment: Experiment) -> Iterator[Problem]:
    """``logging.mlflow`` needs a tracking URI, in the file or in the environment."""
    config = experiment.logging.mlflow
    if config is not None and not config.tracking_uri and not os.environ.get("MLFLOW_TRACKING_URI"):
        message = "is not given, and MLFLOW_TRACKING_URI is not set"
        remedy = "write file:///scratch/mlruns, or the URI of a server"
        yield Problem(("logging", "mlflow", "tracking_uri"), message, remedy)
