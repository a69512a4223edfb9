"""The webhook that a user's runs report to: its settings, ``notify.yaml`` in the user's configuration folder.

Anyone with the address can post, so it is a secret: no run folder, log or command line contains it.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from hpc_train.errors import BadFileError, printable
from hpc_train.redaction import open_unredirected

#: States of a run at the end of an attempt that can be reported.
EVENTS = ("completed", "failed", "requeued", "cancelled", "interrupted")
_DEFAULT_EVENTS = ("completed", "failed")
_DEFAULT_LIMIT_S, _MAX_LIMIT_S = 5.0, 30.0
_TIMED_OUT = "timed out"


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
    from hpc_train.config.marked_yaml import MAX_BYTES, read_document

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadFileError(f"{path}: can't be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        _refuse_readable_by_others(path, os.fstat(file.fileno()))
        content = file.read(MAX_BYTES + 1)
    data = read_document(content).data
    if data is None:
        raise BadFileError(f"{path}: is not a YAML mapping; write a line like webhook: https://…")
    return _checked(path, data)


def _refuse_readable_by_others(path: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        raise BadFileError(f"{path}: must be a plain file that you own, since it names an address of yours")
    if mode & 0o077:
        raise BadFileError(f"{path}: others can read it (mode {mode:04o}); type chmod 600 {path}")


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
    failures: list[str] = []
    # A name server or a server that answers byte by byte takes longer than a socket's time-out.
    thread = threading.Thread(target=_try_post, args=(webhook, message, limit_s, failures), daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive() or failures == [_TIMED_OUT]:
        raise NotSentError(f"{webhook.host} did not answer within {limit_s:g} s")
    if failures:
        raise NotSentError(f"{webhook.host}: {failures[0]}")


def _try_post(webhook: Webhook, message: Mapping[str, Any], timeout_s: float, failures: list[str]) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": "hpc-train"}
    try:
        request = urllib.request.Request(webhook.url, json.dumps(message).encode(), headers, method="POST")
        with open_unredirected(request, timeout_s):
            pass
    except HTTPError as error:
        failures.append(f"HTTP status {error.code}")
    except TimeoutError:
        failures.append(_TIMED_OUT)
    except URLError as error:
        is_late = isinstance(error.reason, TimeoutError)
        failures.append(_TIMED_OUT if is_late else printable(str(error.reason))[:200])
    except Exception as error:  # its text may contain the address
        failures.append(type(error).__name__)
