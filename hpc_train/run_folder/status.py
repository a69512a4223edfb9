"""``status.json``: where the run stands (DESIGN §6, a contract)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import now
from hpc_train.run_folder.files import read_json, write_json
from hpc_train.run_folder.liveness import lives, living, minutes, newest_record, silent_s
from hpc_train.run_folder.processes import Process
from hpc_train.run_folder.storage import retried

#: ``interrupted``: stopped by a signal that its owner sent (Ctrl-C), with its progress saved.
STATES = ("pending", "running", "requeued", "completed", "interrupted", "failed", "cancelled", "unknown")
#: States that a run leaves by itself.
GOING_ON = {"pending", "running", "requeued"}
LAUNCHER_DIED = "launcher died"
INTERRUPTED = "interrupted"
STOPPED_BY_CTRL_C = "stopped by Ctrl-C"
CANCELLED = "cancelled"
CANCELLED_BY = "hpc-train cancel"


@dataclass(frozen=True)
class RunStatus:
    """All of ``status.json`` but its version."""

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
    """Return what ``status.json`` says; state ``unknown`` where it is missing or not ours."""
    data = read_json(paths.status) or {}
    status: dict[str, Any] = {key: data.get(key) for key in asdict(RunStatus())}
    if not _is_valid(status):
        return RunStatus(state="unknown", reason=f"{paths.status.name} can't be read")
    if (status["state"], status["reason"]) == ("failed", INTERRUPTED):  # as hpc-train 0.1 wrote it
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
    """Replace ``status.json``; a transient error of a file server is waited out."""
    retried(lambda: try_status(paths, status), paths.status)


def try_status(paths: RunPaths, status: RunStatus) -> None:
    """Replace ``status.json``, or raise OSError at once."""
    write_json(paths.status, status.to_json())


def mark_cancelled(paths: RunPaths) -> None:
    """Write the marker that makes ``cancel`` final, whatever launcher and ranks then write."""
    if not paths.cancelled.exists():
        write_json(paths.cancelled, {"version": 1, "time": now()}, sync=True)


def current_status(paths: RunPaths) -> RunStatus:
    """Return where the run stands; one whose local launcher is dead is ``failed`` and noted as such."""
    status = read_status(paths)
    if status.state not in {"pending", "running"}:
        return status
    if (silence := _silence(paths)) is not None:
        return replace(status, state="failed", reason=silence)
    if not _is_orphaned(paths):
        return status
    latest = read_status(paths)  # its launcher may have written the end just before it went
    if latest.state not in {"pending", "running"}:
        return latest
    corrected = replace(latest, state="failed", reason=LAUNCHER_DIED)
    with suppress(OSError):  # somebody else's run, or a full disk: say it all the same
        write_status(paths, corrected)
    return corrected


def _silence(paths: RunPaths) -> str | None:
    """Return the reason of a run that can't be seen from here and has been silent for long; else None.

    Not written: the machine may only be cut off, and its heartbeats come again.
    """
    record = newest_record(paths)
    if record is None or living(record) is not None or lives(paths, record) is not False:
        return None
    assert record.launcher_process is not None
    return f"no sign of life from {record.launcher_process.host} for {minutes(silent_s(paths, record))}"


def _is_orphaned(paths: RunPaths) -> bool:
    """Tell whether a process of this machine answered for the run and is surely gone."""
    record = newest_record(paths)
    if record is not None and record.launcher not in {None, "local"}:
        return False  # what it queued outlives the command that claimed the attempt
    if record is not None:
        return living(record) is False
    run = read_json(paths.run) or {}
    creator = Process.from_json(run.get("creator"))
    return run.get("launcher") == "local" and creator is not None and creator.is_alive() is False
