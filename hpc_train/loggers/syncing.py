"""Sends a run's final rows to wandb, MLflow or TensorBoard after the fact, each once (``hpc-train sync``).

A child process, ``loggers.sync_process``, sends them with the code used during training. ``sync.json`` in the
run folder records the rows that a target has, so that a repeated sync contacts no service.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.loggers.final_rows import FinalRows, begins_with, step_of_row
from hpc_train.loggers.sending import SYNC_LIMIT_S
from hpc_train.loggers.sync_targets import Target
from hpc_train.package_path import answer_in, with_package
from hpc_train.paths import RunPaths
from hpc_train.recovery.history import current_status
from hpc_train.redaction import redacted
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import start_in_own_session
from hpc_train.run.run_status import GOING_ON

_MODULE = "hpc_train.loggers.sync_process"


@dataclass(frozen=True)
class Synced:
    """Result of a sync to one destination."""

    to: str
    #: The final rows, and the step of the last one.
    rows: int
    step: int | None
    #: Number of rows that this command has sent.
    rows_sent: int = 0
    #: The run's page, its id at the service, or the folder of the event files.
    target: str | None = None
    error: str | None = None
    #: About lines of the file that can't be sent, and variables that are ignored.
    notes: tuple[str, ...] = ()


def sync(paths: RunPaths, target: Target) -> Synced:
    """Send the final rows that the target lacks. Calling it again sends the rows that failed.

    A run that has not ended is sent up to its newest checkpoint.
    """
    state = current_status(paths).state
    final = FinalRows.of(paths, is_completed=state == "completed")
    end = None if state in GOING_ON else int(state != "completed")
    record = {"to": target.to, "end": end, **asdict(final)}
    before = _records(paths).get(target.key, {})
    step = final.step if final.rows else None
    has_all = record.items() <= before.items() and (target.folder is None or target.folder.is_dir())
    if final.rows == 0 or has_all:
        return Synced(target.to, final.rows, step, target=before.get("target"))
    settings = target.settings | {"withdraw_to": _withdraw_to(paths, before)}
    answer = _ask({"to": target.to, "settings": settings, "step": final.step, "end": end}, target.environment)
    if "error" in answer:
        return Synced(target.to, final.rows, step, error=redacted(str(answer["error"])))
    answer["target"] = redacted(answer["target"]) if answer["target"] else None
    record["target"] = answer["target"]
    write_json(paths.synced, {"version": 1, "targets": _records(paths) | {target.key: record}})
    notes = tuple(redacted(note) for note in answer.get("notes", ()))
    return Synced(target.to, final.rows, step, answer["rows_sent"], answer["target"], notes=notes)


def _records(paths: RunPaths) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = (read_json(paths.synced) or {}).get("targets", {})
    return records


def _withdraw_to(paths: RunPaths, before: Mapping[str, Any]) -> int | None:
    """Return after which step a target that knows steps, not rows, must write rows again; None: none.

    A row may follow a checkpoint of its own step: that of an evaluation that a resume repeats.
    """
    if not before:
        return None
    if not _are_in_file(paths, before):
        return -1
    first_new, step = step_of_row(paths.metrics, before["rows"]), before["step"]
    return first_new - 1 if first_new is not None and first_new <= step else None


def _are_in_file(paths: RunPaths, record: Mapping[str, Any]) -> bool:
    """Return True if the rows that a target has are still in the file."""
    size, sha256 = record.get("size"), record.get("sha256")
    return type(size) is int and isinstance(sha256, str) and begins_with(paths.metrics, size, sha256)


def _ask(request: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the answer of ``loggers.sync_process``."""
    process = start_in_own_session(  # so that the service's client ends with it
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=with_package(environment),
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()  # not closed: the process treats the end of its input as the end of this one
        process.wait(SYNC_LIMIT_S)
        answer = answer_in(process.stdout.read())
    except subprocess.TimeoutExpired:
        answer = {"error": f"not all rows could be sent within {SYNC_LIMIT_S // 60} minutes"}
    except (OSError, ValueError):
        answer = {"error": f"its process (python -m {_MODULE}) ended without an answer"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        process.stdin.close()
    return answer or {"error": f"its process (python -m {_MODULE}) ended without an answer"}
