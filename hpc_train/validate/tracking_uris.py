"""Valid values of ``logging.mlflow.tracking_uri``. MLflow itself is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

from hpc_train.config.problems import KeyPath, Problem, is_clean
from hpc_train.config.schema import Experiment
from hpc_train.errors import shortened
from hpc_train.redaction import SECRET_PARAMETERS
from hpc_train.validate.base import Rule, rule

_KEY: KeyPath = ("logging", "mlflow", "tracking_uri")
_REMOTE_DATABASES = ("postgresql", "mysql", "mssql")
_SERVERS = ("http", "https", "databricks", "uc")


def is_database(uri: str) -> bool:
    """Return True if MLflow opens the URI by SQLAlchemy."""
    return uri.partition(":")[0].partition("+")[0] in ("sqlite", *_REMOTE_DATABASES)


@rule("logging.mlflow.tracking_uri")
def tracking_uri_is_usable(experiment: Experiment) -> Iterator[Problem]:
    """``logging.mlflow.tracking_uri`` must be of a known kind, absolute, and contain no secret."""
    config = experiment.logging.mlflow
    uri = config.tracking_uri if config is not None else None
    if uri is not None and (problem := _problem(uri)):
        yield Problem(_KEY, *problem)


def _problem(uri: str) -> tuple[str, str] | None:
    """Return the problem with the URI, without repeating a secret, and the remedy."""
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


RULES: tuple[Rule, ...] = (tracking_uri_is_usable,)
