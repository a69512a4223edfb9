"""Posts the end of an attempt to the user's webhook, ``notify.yaml`` in the user's configuration folder.

Called after the diagnosis; a failure is one line in the log and changes neither an exit code nor a requeue.
Anyone with the address can post, so it is a secret: no run folder, log or command line contains it.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.redaction import open_unredirected
from hpc_train.run.run_status import RunStatus, read_status, run_facts

#: States of a run at the end of an attempt that can be reported.
EVENTS = ("completed", "failed", "requeued", "cancelled", "interrupted")
_DEFAULT_EVENTS = ("completed", "failed")
_DEFAULT_LIMIT_S, _MAX_LIMIT_S = 5.0, 30.0
#: Slurm ends a preempted job within seconds, and it is requeued only after this.
_REQUEUED_LIMIT_S = 2.0
#: Limits of all: the settings are in a home folder that may hang, the modules on a disk that may.
_WHOLE_LIMIT_S = 60.0
_WHOLE_REQUEUED_LIMIT_S = 4.0
_MAX_REASON = 500


class NotSentError(Exception):
    """A message could not be sent; the text is the reason, without the address."""


@dataclass(frozen=True)
class Webhook:
    """The address, the events to post, and how long to try."""

    url: str = field(repr=False)
    events: frozenset[str]
    timeout_s: float

    @property
    def host(self) -> str:
        """The part of ``url`` that is not secret, for messages."""
        return urlsplit(self.url).hostname or ""


def settings_file() -> Path:
    """Return the path of the settings: ``~/.config/hpc-train/notify.yaml``, or below ``$XDG_CONFIG_HOME``."""
    import platformdirs

    return platformdirs.user_config_path("hpc-train") / "notify.yaml"


def read_webhook(path: Path) -> Webhook | None:
    """Return the settings; None without the file. Raises BadFileError, which never names a value."""
    from hpc_train.experiment.config.marked_yaml import MAX_BYTES, read_document

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadFileError(f"{path}: can't be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise BadFileError(
                f"{path}: must be a plain file that you own, since it names an address of yours"
            )
        if (mode := stat.S_IMODE(facts.st_mode)) & 0o077:
            raise BadFileError(f"{path}: others can read it (mode {mode:04o}); type chmod 600 {path}")
        data = read_document(file.read(MAX_BYTES + 1)).data
    if data is None:
        raise BadFileError(f"{path}: is not a YAML mapping; write a line like webhook: https://…")
    return _checked(path, data)


def _checked(path: Path, data: Mapping[str, Any]) -> Webhook:
    if data.keys() - {"webhook", "events", "timeout_s"}:
        raise BadFileError(f"{path}: has an unknown key; its keys are webhook, events and timeout_s")
    url, events = data.get("webhook"), data.get("events", list(_DEFAULT_EVENTS))
    timeout_s = data.get("timeout_s", _DEFAULT_LIMIT_S)
    if not isinstance(url, str) or not _is_address(url):
        raise BadFileError(f"{path}: webhook must be an address like https://hooks.example.org/…")
    if not isinstance(events, list) or not all(event in EVENTS for event in events):
        raise BadFileError(f"{path}: events must be a list of some of {', '.join(EVENTS)}")
    if type(timeout_s) not in {int, float} or not 0 < timeout_s <= _MAX_LIMIT_S:
        raise BadFileError(f"{path}: timeout_s must be a number of seconds up to {_MAX_LIMIT_S:g}")
    return Webhook(url, frozenset(events), float(timeout_s))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"https", "http"} and bool(parts.hostname) and url.isascii() and " " not in url
    except ValueError:
        return False


def post(webhook: Webhook, message: Mapping[str, Any], timeout_s: float | None = None) -> None:
    """Post the message as JSON, within ``timeout_s`` whatever the network does. Raises NotSentError."""
    limit_s = webhook.timeout_s if timeout_s is None else min(timeout_s, webhook.timeout_s)
    late = f"did not answer within {limit_s:g} s"

    def send() -> str | None:
        from urllib.error import HTTPError, URLError
        from urllib.request import Request

        headers = {"Content-Type": "application/json", "User-Agent": "hpc-train"}
        try:
            request = Request(webhook.url, json.dumps(message).encode(), headers, method="POST")
            open_unredirected(request, limit_s).close()
        except HTTPError as error:
            return f"HTTP status {error.code}"
        except TimeoutError:
            return late
        except URLError as error:
            return late if isinstance(error.reason, TimeoutError) else str(error.reason)[:200]
        return None

    # A name server or a server that answers byte by byte takes longer than a socket's time-out.
    if problem := _problem_within(limit_s, send, late):
        raise NotSentError(f"{webhook.host}{'' if problem == late else ':'} {problem}")


def _problem_within(limit_s: float, work: Callable[[], str | None], late: str) -> str | None:
    """Return the result of ``work``, or why it failed; ``late`` if it has not returned in time."""
    problems: list[str | None] = []

    def run() -> None:
        try:
            problems.append(work())
        except (BadFileError, NotSentError) as error:
            problems.append(str(error))
        except Exception as error:  # the text may contain the address
            problems.append(type(error).__name__)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return problems[0] if problems else late


def notify_end(paths: RunPaths, say: Callable[[str], None], status: RunStatus | None = None) -> None:
    """Post the state of the run if the user subscribed to it; ``say`` prints a line to the log.

    ``status``: how the run ended, since a full disk may lack it; None: read it.
    """

    def notify() -> None:
        webhook = read_webhook(settings_file())
        if webhook is not None and status is not None and status.state in webhook.events:
            post(webhook, message_of(paths, status), _REQUEUED_LIMIT_S if is_requeued else None)

    try:
        status = status or read_status(paths)
        is_requeued = status.state == "requeued"
        limit_s = _WHOLE_REQUEUED_LIMIT_S if is_requeued else _WHOLE_LIMIT_S
        problem = _problem_within(limit_s, notify, f"not done within {limit_s:g} s")
    except Exception as error:  # nothing here may affect the run
        problem = type(error).__name__
    if problem:
        say(f"notification not sent: {problem}")


def message_of(paths: RunPaths, status: RunStatus) -> dict[str, Any]:
    """Return the message: ``text`` for Slack and Mattermost, ``content`` for Discord, and the facts."""
    run, experiment = paths.folder.name, str(run_facts(paths).get("name") or paths.folder.parent.name)
    reason = None if status.reason is None else status.reason[:_MAX_REASON]
    steps = f"step {status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else "")
    text = f"{experiment}/{run} {status.state} at {steps}" + (f": {reason}" if reason else "")
    return text_of(text) | {
        "event": status.state,
        "run": run,
        "experiment": experiment,
        "state": status.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "attempt": status.attempt,
        "reason": reason,
    }


def text_of(text: str) -> dict[str, Any]:
    """Return the visible part of a message; text of a log in it can't mention users or create links."""
    plain = text.replace("@", "@\u200b")  # @channel, @everyone
    escaped = plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "content": plain, "allowed_mentions": {"parse": []}}
