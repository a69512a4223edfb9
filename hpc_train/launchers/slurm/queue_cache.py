"""Caches Slurm's last answer in a small file: all commands of a user on this host query it once per 10 s."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_train.paths import cache_folder
from hpc_train.run.files import write_text

MAX_AGE_S = 10.0
#: How long to wait for another command's query, since Slurm may be slow; after that each command queries
#: itself.
_LOCK_LIMIT_S = 90.0

#: If the cache folder can't be written, only this process shares its answers.
_own: dict[Path, dict[str, Any]] = {}

Answer = dict[str, Any]


def shared(
    max_age_s: float, is_enough: Callable[[Answer], bool], ask: Callable[[Answer | None], Answer]
) -> Answer:
    """Return the last answer if it is no older than ``max_age_s`` and ``is_enough``, else a new one.

    ``ask`` receives the last answer of any age. A command that waits while another one queries uses the
    other's answer. ``asked`` is the time of the query, in seconds since 1970.
    """
    called = time.time()
    with _locked():
        last = _read()
        now = time.time()
        # An answer from the future has an unknown age: the clock was set back.
        if last is not None and called - max_age_s <= last["asked"] <= now and is_enough(last):
            return last
        answer = ask(last) | {"version": 1, "asked": now}
        _write(answer)
        return answer


def forget() -> None:
    """Drop the cached answer after a change. Waits for a query in progress."""
    with _locked():
        _write((_read() or {"version": 1}) | {"asked": 0.0})


def _file() -> Path:
    """Return the file of this user, host and cluster: login hosts of two clusters may share a home."""
    cluster = [os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER")]
    digest = hashlib.sha256(json.dumps([socket.gethostname(), os.getuid(), *cluster]).encode()).hexdigest()
    return cache_folder() / f"slurm-{digest[:16]}.json"


@contextmanager
def _locked() -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(_file().with_suffix(".lock"), timeout=_LOCK_LIMIT_S, mode=0o600)
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, Timeout, NotImplementedError):
        yield  # no locks here, or a process hangs: at worst Slurm is queried twice
        return
    try:
        yield
    finally:
        lock.release()


def _read() -> Answer | None:
    file = _file()
    try:
        if file.stat().st_uid != os.geteuid():  # in a shared folder another user could have created it
            return None
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _own.get(file)
    is_ours = isinstance(answer, dict) and answer.get("version") == 1
    return answer if is_ours and isinstance(answer.get("asked"), float) else None


def _write(answer: Answer) -> None:
    file = _file()
    try:
        write_text(file, json.dumps(answer))
    except OSError:
        _own[file] = answer
    else:
        _own.pop(file, None)
