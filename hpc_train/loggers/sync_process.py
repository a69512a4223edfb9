"""``python -m hpc_train.loggers.sync_process``: the process that sends a run's final rows for ``syncing``.

It reads one JSON object from stdin: ``to``, the ``settings`` of the process that sends them while the run
trains, the ``step`` up to which rows are final, and ``end`` (0 if the run has completed, another number if it
has ended otherwise, null if it continues). It answers by one JSON object on stdout: ``rows_sent`` and
``target``, or ``error``, and ``notes``, about lines that can't be sent. It ends with the process that started
it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from hpc_train.loggers.sending import BusyError, Mirror, check_version, in_a_line, locked
from hpc_train.paths import RunPaths
from hpc_train.run.metric_rows import unusable_lines

#: Lines of the file that are named.
_MAX_NOTES = 10
_BUSY = "another process sends the run's rows: another sync, or an attempt that trains and sends them itself"


def main() -> NoReturn:
    """Answer the request; exits without exit handlers, which would wait for unsent data."""
    answer_file = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        check_version(request["to"])
        answer = _SENDERS[request["to"]](request)
        answer["notes"] = [*answer.get("notes", ()), *_unsent(request)]
    except BusyError:
        answer = {"error": _BUSY}
    except ModuleNotFoundError as error:
        extra = request["to"]
        answer = {"error": f"{error.name} is not installed; type pip install 'hpc-train[{extra}]'"}
    except Exception as error:  # any error of clients, servers or disks
        answer = {"error": in_a_line(error)}
    print(json.dumps(answer), file=answer_file, flush=True)
    os._exit(0)


def _unsent(request: dict[str, Any]) -> list[str]:
    """Return a line per line of ``metrics.jsonl`` that could not be sent, and how many more there are."""
    metrics = RunPaths(Path(request["settings"]["folder"])).metrics
    lines = [
        f"{metrics.name}: line {number} {problem} and is not sent"
        for number, problem in unusable_lines(metrics, request["step"], needs_time=request["to"] != "wandb")
    ]
    more = [f"{metrics.name}: {len(lines) - _MAX_NOTES} more lines are not sent"]
    return lines if len(lines) <= _MAX_NOTES else lines[:_MAX_NOTES] + more


def _end_with_parent() -> None:
    """Kill this process and its children once stdin ends, which the parent keeps open as long as it lives."""
    sys.stdin.read()
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _to_wandb(request: dict[str, Any]) -> dict[str, Any]:
    from hpc_train.loggers.wandb_process import WandbMirror

    is_busy = False
    try:
        return _send(request, WandbMirror)
    except BusyError:
        is_busy = True
        raise
    finally:
        if not is_busy:  # otherwise the files belong to the process that has the lock
            shutil.rmtree(request["settings"]["files"], ignore_errors=True)


def _to_mlflow(request: dict[str, Any]) -> dict[str, Any]:
    from hpc_train.loggers.mlflow_process import MlflowMirror

    return _send(request, MlflowMirror)


def _send(request: dict[str, Any], mirror_class: type[Mirror]) -> dict[str, Any]:
    notes: list[str] = []
    mirror = mirror_class(request["settings"], notes.append)
    mirror.begin()
    mirror.send(request["step"])
    mirror.finish(request["end"])
    if (problem := mirror.missing(request["step"])) is not None:
        return {"error": problem}
    return {"rows_sent": mirror.num_sent, "target": mirror.target, "notes": notes}


def _to_tensorboard(request: dict[str, Any]) -> dict[str, Any]:
    from hpc_train.loggers.tensorboard import EventFiles

    settings = request["settings"]
    paths, folder = RunPaths(Path(settings["folder"])), Path(settings["files"])
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder / paths.tensorboard_lock.name, limit_s=0, must=True)
    files, num_rows = EventFiles(paths, folder), 0
    if settings["withdraw_to"] is not None:
        files.withdraw(settings["withdraw_to"])
    if files.complete_step < request["step"]:
        num_rows = files.begin(request["step"])
        files.complete(request["step"])
        files.close()
    if lock is not None:
        lock.close()
    return {"rows_sent": num_rows, "target": str(folder)}


_SENDERS = {"wandb": _to_wandb, "mlflow": _to_mlflow, "tensorboard": _to_tensorboard}


if __name__ == "__main__":
    main()
