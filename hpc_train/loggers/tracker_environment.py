"""The shell variables, settings and keys of the user for wandb and MLflow.

The file and the run's folder identify the run; the shell may set the destination of rows and disable sending.
Both clients read far more from their environment, such as the run of a sweep's agent, so a variable reaches
them only if a row of ``RULES`` obeys it. docs/logging.md shows the same table.

Also called by ``submit``, so wandb, which takes a second to import, is not imported; a test compares with
the files that the installed ``wandb login`` writes.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal
from urllib.parse import urlsplit

from hpc_train.console import one_line
from hpc_train.paths import expanded
from hpc_train.redaction import netrc_file, redacted

Tracker = Literal["wandb", "mlflow"]


@dataclass(frozen=True)
class Rule:
    """Whether variables whose names match one of the patterns are obeyed, and why."""

    patterns: tuple[str, ...]
    is_obeyed: bool
    why: str
    #: Named in the line that an attempt prints, with the value if it is not a secret.
    is_printed: bool = True
    is_secret: bool = False

    def matches(self, name: str) -> bool:
        """Return True if the rule is about the variable of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def _obeyed(names: str, why: str, *, is_printed: bool = False, is_secret: bool = False) -> Rule:
    return Rule(tuple(names.split()), True, why, is_printed, is_secret)


def _ignored(names: str, why: str, *, is_printed: bool = True) -> Rule:
    return Rule(tuple(names.split()), False, why, is_printed)


#: The first rule that matches a name decides. A name without a rule is ignored.
RULES: dict[Tracker, tuple[Rule, ...]] = {
    "wandb": (
        _obeyed("WANDB_BASE_URL WANDB_ENTITY", "where rows go", is_printed=True),
        _obeyed("WANDB_MODE WANDB_DISABLED", "whether rows go, with `mode: auto`", is_printed=True),
        _obeyed("WANDB_API_KEY", "the key", is_printed=True, is_secret=True),
        _obeyed("WANDB_IDENTITY_TOKEN_FILE WANDB_CREDENTIALS_FILE", "other credentials", is_printed=True),
        _obeyed("WANDB_APP_URL", "the web page of the server"),
        _obeyed(
            "WANDB_CONFIG_DIR WANDB_CACHE_DIR WANDB_DATA_DIR WANDB_ARTIFACT_DIR",
            "folders of wandb's settings and caches",
        ),
        _obeyed(
            "WANDB_INIT_TIMEOUT WANDB_HTTP_TIMEOUT WANDB_FILE_PUSHER_TIMEOUT WANDB_LOGIN_TIMEOUT "
            "WANDB_*_RETRY_MAX WANDB_*_RETRY_WAIT_*_SECONDS WANDB_*_TIMEOUT_SECONDS "
            "WANDB__SERVICE_WAIT WANDB_X_SERVICE_WAIT",
            "how long to wait for the server",
        ),
        _obeyed(
            "WANDB_HTTP_PROXY WANDB_HTTPS_PROXY WANDB__PROXIES WANDB_X_PROXIES WANDB_INSECURE_DISABLE_SSL "
            "WANDB__EXTRA_HTTP_HEADERS WANDB_X_EXTRA_HTTP_HEADERS",
            "the way to the server",
        ),
        _obeyed("WANDB_ERROR_REPORTING", "whether wandb reports its own errors to its maker"),
        _ignored(
            "WANDB_RUN_ID WANDB_PROJECT WANDB_NAME WANDB_RUN_NAME WANDB_RUN_GROUP WANDB_GROUP_ID WANDB_TAGS "
            "WANDB_RUN_TAGS WANDB_NOTES WANDB_RUN_NOTES WANDB_DESCRIPTION WANDB_JOB_TYPE WANDB_RUN_JOB_TYPE "
            "WANDB_JOB_NAME WANDB_JOB_SOURCE WANDB_RESUME WANDB_RESUMED WANDB_RESUME_FROM WANDB_FORK_FROM "
            "WANDB_REINIT WANDB_RUN_STORAGE_ID WANDB_RUN_DIR WANDB_DIR WANDB_ROOT_DIR WANDB_LABEL "
            "WANDB__LABEL WANDB_X_LABEL WANDB__PRIMARY WANDB_X_PRIMARY WANDB_CONFIG_PATHS WANDB_ORGANIZATION",
            "the file and the run's folder say which run it is",
        ),
        _ignored(
            "WANDB_SWEEP_* WANDB_LAUNCH* WANDB_AGENT_* WANDB_SERVICE* WANDB_*RUNQUEUE_ITEM_ID "
            "WANDB_SAGEMAKER_* WANDB_K8S_* WANDB__SERVICE_TRANSPORT WANDB_X_SERVICE_TRANSPORT WANDB_INITED",
            "left by an agent, a sweep or an outer run",
        ),
        _ignored(
            "WANDB_DEBUG WANDB_CORE_DEBUG WANDB__LOG_LEVEL WANDB_X_LOG_LEVEL",
            "wandb writes the key into its debug log, in the run's folder",
        ),
        _ignored(
            "WANDB_SILENT WANDB_QUIET WANDB_CONSOLE* WANDB_SHOW_* WANDB_DISABLE_* WANDB_SAVE_CODE "
            "WANDB_CODE_DIR WANDB_GIT_* WANDB_HOST WANDB_USERNAME WANDB_EMAIL WANDB_USER_EMAIL "
            "WANDB_PROGRAM* WANDB_ARGS WANDB_DOCKER* WANDB_NOTEBOOK_NAME WANDB_JUPYTER WANDB_ANONYMOUS "
            "WANDB_IGNORE_GLOBS WANDB_MAGIC "
            "WANDB_SYMLINK WANDB_ALLOW_* WANDB_SYNC_TENSORBOARD WANDB_SETTINGS_SYSTEM WANDB_START_METHOD "
            "WANDB_USE_* WANDB_LABEL_DISABLE WANDB_STRICT WANDB_FORCE WANDB_RELOGIN WANDB_TEST "
            "WANDB_HEARTBEAT_SECONDS WANDB_*SUMMARY* WANDB_MAX_* WANDB_TABLE_* WANDB_FINISH_TIMEOUT* "
            "WANDB_STOP_* WANDB_CAPTURE_* WANDB_CRASH_NOSYNC_TIME WANDB_ARTIFACT_FETCH_* "
            "WANDB_ENABLE_DCGM_PROFILING WANDB_APP_URL_OVERRIDE WANDB_AZURE_* WANDB_CLI_* WANDB_LOCAL_* "
            "WANDB__* WANDB_X_* _WANDB_*",
            "hpc-train decides what wandb records and prints",
            is_printed=False,
        ),
    ),
    "mlflow": (
        _obeyed("MLFLOW_TRACKING_URI MLFLOW_WORKSPACE", "where rows go", is_printed=True),
        _obeyed("MLFLOW_TRACKING_USERNAME", "credentials", is_printed=True),
        _obeyed(
            "MLFLOW_TRACKING_PASSWORD MLFLOW_TRACKING_TOKEN MLFLOW_UC_OSS_TOKEN",
            "credentials",
            is_printed=True,
            is_secret=True,
        ),
        _obeyed(
            "MLFLOW_TRACKING_AUTH MLFLOW_TRACKING_AWS_SIGV4 MLFLOW_TRACKING_CLIENT_CERT_PATH "
            "MLFLOW_TRACKING_SERVER_CERT_PATH MLFLOW_TRACKING_INSECURE_TLS MLFLOW_KERBEROS_* "
            "MLFLOW_MYSQL_SSL_* MLFLOW_ALLOW_HTTP_REDIRECTS",
            "the way to the server",
        ),
        _obeyed("MLFLOW_HTTP_*", "how long to wait for the server"),
        _obeyed(
            "MLFLOW_SQLALCHEMYSTORE_POOL* MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW MLFLOW_ALLOW_FILE_STORE",
            "how stores in files and databases are opened",
        ),
        _obeyed("MLFLOW_DISABLE_TELEMETRY", "whether MLflow reports its use to its maker"),
        _ignored(
            "MLFLOW_RUN_ID MLFLOW_RUN_NAME MLFLOW_EXPERIMENT_ID MLFLOW_EXPERIMENT_NAME MLFLOW_RUN_CONTEXT "
            "MLFLOW_NESTED_RUN MLFLOW_TAGS MLFLOW_ACTIVE_MODEL_ID",
            "the file and the run's folder say which run it is",
        ),
        _ignored("MLFLOW_* _MLFLOW_*", "not part of sending rows", is_printed=False),
    ),
}


def rule_for(tracker: Tracker, name: str) -> Rule | None:
    """Return the rule that decides about a variable; None if no rule matches: it is ignored."""
    return next((rule for rule in RULES[tracker] if rule.matches(name)), None)


def is_variable_of(tracker: Tracker, name: str) -> bool:
    """Return True if the client reads the variable. Part of a name may be in lower case."""
    return name.upper().startswith((f"{tracker.upper()}_", f"_{tracker.upper()}_"))


def passed_on(tracker: Tracker, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the tracker's variables that are ignored."""

    def is_kept(name: str) -> bool:
        rule = rule_for(tracker, name)
        return rule is not None and rule.is_obeyed

    return {
        name: value
        for name, value in environment.items()
        if not is_variable_of(tracker, name) or is_kept(name)
    }


def in_a_line(tracker: Tracker, environment: Mapping[str, str]) -> str | None:
    """Return a line that lists used and ignored variables, without secrets; None if there are none."""
    obeyed, ignored = [], []
    for name in sorted(name for name in environment if is_variable_of(tracker, name)):
        rule = rule_for(tracker, name)
        if rule is None or (rule.is_printed and not rule.is_obeyed):
            ignored.append(name)
        elif rule.is_printed:
            obeyed.append(name if rule.is_secret else f"{name}={environment[name]}")
    parts = [
        f"{verb} {', '.join(names)}" for verb, names in (("uses", obeyed), ("ignores", ignored)) if names
    ]
    return one_line(redacted(f"{tracker}: {'; '.join(parts)}", environment)) if parts else None


#: Two addresses of wandb's own server: the default, and that of older versions. A key in netrc for the old
#: one is also used for the new one, but not the other way round.
_DEFAULT, _BEFORE = "api.forge.coreweave.com", "api.wandb.ai"
#: Its web site, which serves the same API below a path.
_SITE = "forge.coreweave.com"
#: Values of ``WANDB_MODE``, including the values of older versions → the mode.
_MODES = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
_TRUE = {"1", "true", "yes", "on", "y", "t"}


def has_key() -> bool:
    """Return True if an API key is set for the server, in any of wandb's places."""
    return api_key() is not None


def api_key() -> str | None:
    """Return the API key for the server; None if there is none."""
    if key := os.environ.get("WANDB_API_KEY") or _settings().get("api_key"):
        return key
    try:
        keys = netrc.netrc(str(netrc_file(os.environ)))  # unlike netrc's default, it may be readable to all
    except (OSError, ValueError, netrc.NetrcParseError):
        return None
    entries = (keys.authenticators(machine) for machine in _machines(base_url() or ""))
    return next((entry[2] for entry in entries if entry is not None and entry[2]), None)


def base_url() -> str | None:
    """Return the address of the server that the user has chosen; None: wandb's default."""
    return os.environ.get("WANDB_BASE_URL") or _settings().get("base_url") or None


def _machines(url: str) -> Iterator[str]:
    """Yield the names that the server's key may have in netrc."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    if not parts.netloc or parts.hostname in {_DEFAULT, _SITE}:
        yield from (_DEFAULT, _BEFORE)
        return
    yield parts.netloc
    if parts.hostname:  # older versions write no port
        yield parts.hostname


def _settings() -> dict[str, str]:
    """Return wandb's settings of this user, which ``wandb login --host`` writes; empty if unreadable."""
    folder = expanded(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb")
    parser = configparser.ConfigParser()
    try:
        parser.read(folder / "settings")
        return dict(parser.items("default"))
    except (OSError, ValueError, configparser.Error):
        return {}


def effective_mode(mode: str) -> str:
    """Return ``logging.wandb.mode``; for ``auto`` that of the environment, else ``online`` with a key."""
    if mode != "auto":
        return mode
    return _mode_of_environment() or ("online" if has_key() else "offline")


def needs_key(mode: str) -> bool:
    """Return True if rows of this ``logging.wandb.mode`` go to the server once there is a key."""
    return (mode if mode != "auto" else _mode_of_environment()) not in ("offline", "disabled")


def invalid_mode() -> str | None:
    """Return the value of ``WANDB_MODE`` if it is not a mode; it is then ignored."""
    mode = os.environ.get("WANDB_MODE", "")
    return mode if mode and mode.lower() not in _MODES else None


def _mode_of_environment() -> str | None:
    if os.environ.get("WANDB_DISABLED", "").lower() in _TRUE:
        return "disabled"
    return _MODES.get(os.environ.get("WANDB_MODE", "").lower())
