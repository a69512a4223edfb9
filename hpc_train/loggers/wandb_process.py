"""``python -m hpc_train.loggers.wandb_process``: the process that talks to wandb for ``loggers.wandb``.

Reads one JSON object per line from stdin: first the settings, then any of ``committed`` (the step up to which
rows are final), ``newest`` (a row that is not final yet) and, last, ``end`` (wandb's exit code). Ends with
its input. If anything fails it prints one line on stderr and exits with 0.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpc_train.errors import printable
from hpc_train.loggers.base import Row
from hpc_train.loggers.wandb import warning
from hpc_train.loggers.wandb_history import History
from hpc_train.loggers.wandb_key import has_key
from hpc_train.paths import RunPaths
from hpc_train.run.files import UnreadableFileError, open_regular

#: How long to wait for the server at the start; wandb's own 90 s would outlive short runs.
_INIT_TIMEOUT_S = 30.0
#: After the input has ended without ``end`` (the rank was killed), at most this long.
_ORPHAN_LIMIT_S = 10
_LOCK_POLL_S = 0.1
#: Nothing about the machine, the code or the terminal goes to wandb. Names that this wandb lacks are omitted.
_QUIET = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "host": "",
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
#: wandb's own copy of an image is a hard link where the file system has them, so that attempts take no space.
_LINKED = {"allow_media_symlink": True, "symlink": False}


def main() -> int:
    """Send what stdin says; stdout and stderr are redirected to /dev/null for wandb."""
    ours = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    # A job's signals reach all of its processes; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        _send(sys.stdin)
    except Exception as error:
        first_line = printable(str(error)).strip().partition("\n")[0]
        print(warning(f"{type(error).__name__}: {first_line}"), file=ours, flush=True)
    # wandb's exit handlers would wait for unsent data.
    ours.close()
    os._exit(0)


def _send(lines: IO[str]) -> None:
    mirror = _Mirror(json.loads(next(lines)))
    exit_code = None
    for line in lines:
        news = json.loads(line)
        if "committed" in news:
            mirror.send(news["committed"])
        if "newest" in news:
            mirror.show(news["newest"])
        exit_code = news.get("end")
    if exit_code is None:  # the rank was killed
        signal.alarm(_ORPHAN_LIMIT_S)
    mirror.finish(exit_code or 0)


class _Mirror:
    """``metrics.jsonl`` in wandb: a row's number in the file is its step there."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._start = start
        self._paths = RunPaths(Path(start["folder"]))
        self._lock = _locked(self._paths)
        self._history = History(self._paths)
        self._run = self._open()

    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that wandb lacks."""
        if self._history.has_withdrawn():
            self._run.finish(exit_code=1)
            self._history.begin_segment()
            self._run = self._open()
        for number, row in self._history.rows_up_to(committed_step):
            self._run.log(_named(row) | self._images(row) | _time(row), step=number)

    def show(self, row: Row) -> None:
        """Show a row that may still be withdrawn as the run's newest values, which can be replaced."""
        self._run.summary.update(_named(row))

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def _images(self, row: Row) -> dict[str, Any]:
        """Return the images of the evaluation that a row is of; without those that wandb can't read."""
        if row["split"] != "val":
            return {}
        import wandb

        images: dict[str, Any] = {}
        for name, path in self._paths.evaluation_images(row["step"]).items():
            with suppress(Exception):  # a damaged image must not keep the row
                images[f"val/{name}"] = wandb.Image(str(path))
        return images

    def _open(self) -> Any:
        """Return the wandb run that continues the file; a new one if its rows are not the file's."""
        while True:
            run = _start(self._start, self._history.suffix)
            if self._history.skip(run.starting_step):
                break
            run.finish(exit_code=1)
            self._history.begin_segment()
        run.define_metric("step")
        for split in ("train", "val"):
            run.define_metric(f"{split}/*", step_metric="step")
        return run


def _locked(paths: RunPaths) -> IO[bytes] | None:
    """Wait until the process of a killed attempt has sent its rows, if locks work."""
    with suppress(OSError, UnreadableFileError):
        paths.wandb.mkdir(exist_ok=True)
        file = open_regular(paths.wandb_lock, "wb")
        deadline = time.monotonic() + _ORPHAN_LIMIT_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
            else:
                break
        return file
    return None


def _named(row: Row) -> Row:
    """Return a row under wandb's names: ``val/loss`` and so on."""
    split = row["split"]
    common = {key: row[key] for key in ("step", "epoch", "attempt") if key in row}
    metrics = {f"{split}/{k}": v for k, v in row.items() if k not in (*common, "split", "time")}
    return common | metrics


def _time(row: Row) -> Row:
    """Return the time of the row, under wandb's name."""
    return {"_timestamp": row["time"]} if "time" in row else {}


def _start(message: dict[str, Any], suffix: str) -> Any:
    import wandb

    mode = message["mode"]
    if mode == "auto":
        mode = "online" if has_key() else "offline"
    known = wandb.Settings.model_fields
    quiet = {name: value for name, value in (_QUIET | _LINKED).items() if name in known}
    settings = wandb.Settings(init_timeout=_INIT_TIMEOUT_S, **quiet)
    # wandb creates the folder ``wandb`` in ``dir`` itself.
    return wandb.init(
        dir=message["folder"],
        mode=mode,
        resume="allow",
        save_code=False,
        settings=settings,
        **message["init"] | {name: message["init"][name] + suffix for name in ("id", "name")},
    )


if __name__ == "__main__":
    sys.exit(main())
