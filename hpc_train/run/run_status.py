"""``status.json``: the status of the run (a contract)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import now
from hpc_train.run.files import read_json, write_json
from hpc_train.run.liveness import lives, living, minutes, newest_record, silent_s
from hpc_train.run.processes import Process
from hpc_train.run.storage_errors import retried

#: ``interrupted``: stopped by a signal from its owner (Ctrl-C), with its progress saved.
STATES = ("pending", "running", "requeued", "completed", "interrupted", "failed", "cancelled", "unknown")
#: States that a run leaves automatically.
GOING_ON = {"pending", "running", "requeued"}
LAUNCHER_DIED = "launcher died"
INTERRUPTED = "interrupted"
STOPPED_BY_CTRL_C = "stopped by Ctrl-C"
CANCELLED = "cancelled"
CANCELLED_BY = "hpc-train cancel"


@dataclass(frozen=True)
class RunStatus:
    """The content of ``status.json`` without its version."""

    state: str = "pending"
    #: Optimizer steps done.
    step: int = 0
    #: None until the size of the data is known.
    total_steps: int | None = None
    epoch: float = 0.0
    #: From 1; 0 before the first.
    attempt: int = 0
    reason: str | None = None

    def __post_init__(self) -> None:
        assert self.state in STATES, self.state

    def to_json(self) -> dict[str, Any]:
        return {"version": 1} | asdict(self)


def read_status(paths: RunPaths) -> RunStatus:
    """Return the content of ``status.json``; state ``unknown`` if it is missing or invalid."""
    data = read_json(paths.status) or {}
    status: dict[str, Any] = {key: data.get(key) for key in asdict(RunStatus())}
    if not _is_valid(status):
        return RunStatus(state="unknown", reason=f"{paths.status.name} can't be read")
    if (status["state"], status["reason"]) == ("failed", INTERRUPTED):  # as written by hpc-train 0.1
        status |= {"state": INTERRUPTED, "reason": None}
    return RunStatus(**status)


def _is_valid(status: dict[str, Any]) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "step": (int,),
        "total_steps": (int, type(None)),
        "epoch": (int, float),
        "attempt": (int,),
        "reason": (str, type(None)),
    }
    return status["state"] in STATES and all(type(status[key]) in kind for key, kind in kinds.items())


def write_status(paths: RunPaths, status: RunStatus) -> None:
    """Replace ``status.json``; retries on temporary errors of a file server."""
    retried(lambda: try_status(paths, status), paths.status)


def try_status(paths: RunPaths, status: RunStatus) -> None:
    """Replace ``status.json``, or raise OSError at once."""
    write_json(paths.status, status.to_json())


def mark_cancelled(paths: RunPaths) -> None:
    """Write the marker that makes ``cancel`` final, whatever launcher and ranks write later."""
    if not paths.cancelled.exists():
        write_json(paths.cancelled, {"version": 1, "time": now()}, sync=True)


def current_status(paths: RunPaths) -> RunStatus:
    """Return the status of the run; one whose local launcher is dead is recorded as ``failed``."""
    status = read_status(paths)
    if status.state not in {"pending", "running"}:
        return status
    if (silence := _silence(paths)) is not None:
        return replace(status, state="failed", reason=silence)
    if not _is_orphaned(paths):
        return status
    latest = read_status(paths)  # its launcher may have written the end just before it ended
    if latest.state not in {"pending", "running"}:
        return latest
    corrected = replace(latest, state="failed", reason=LAUNCHER_DIED)
    with suppress(OSError):  # another user's run, or a full disk: report it nevertheless
        write_status(paths, corrected)
    return corrected


def _silence(paths: RunPaths) -> str | None:
    """Return the reason of a run that can't be seen from here and has been silent for long; else None.

    Not written: the machine may only be disconnected, and its heartbeats return.
    """
    record = newest_record(paths)
    if record is None or living(record) is not None or lives(paths, record) is not False:
        return None
    assert record.launcher_process is not None
    return f"no sign of life from {record.launcher_process.host} for {minutes(silent_s(paths, record))}"


def _is_orphaned(paths: RunPaths) -> bool:
    """Tell whether a process of this machine was responsible for the run and is certainly gone."""
    record = newest_record(paths)
    if record is not None and record.launcher not in {None, "local"}:
        return False  # what it queued outlives the command that claimed the attempt
    if record is not None:
        return living(record) is False
    run = read_json(paths.run) or {}
    creator = Process.from_json(run.get("creator"))
    return run.get("launcher") == "local" and creator is not None and creator.is_alive() is False
