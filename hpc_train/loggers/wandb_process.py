"""``python -m hpc_train.loggers.wandb_process``: the process that talks to wandb for ``loggers.wandb``.

Reads one JSON object a line from stdin: first what to start with, then ``{"row": …}``, last
``{"end": code}``. Ends with its input. Where anything fails it says one line on stderr and ends with 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from typing import IO, Any

from hpc_train.errors import printable
from hpc_train.loggers.wandb import warning
from hpc_train.loggers.wandb_key import has_key

#: How long to wait for the server at the start; wandb's own 90 s would outlive short runs.
_INIT_TIMEOUT_S = 30.0
#: After the input has ended without a word (the rank was killed), no longer than this.
_ORPHAN_LIMIT_S = 10
#: Nothing of the machine, the code or the terminal goes to wandb. Names that this wandb lacks are left out.
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


def main() -> int:
    """Send what stdin says; stdout and stderr are wandb's from here on, and go nowhere."""
    ours = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.dup2(null, sys.stderr.fileno())
    # A job's signals reach every process of it; this one ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        _send(sys.stdin)
    except Exception as error:
        first_line = printable(str(error)).strip().partition("\n")[0]
        print(warning(f"{type(error).__name__}: {first_line}"), file=ours, flush=True)
    # wandb's exit handlers would wait for what could not be sent.
    ours.close()
    os._exit(0)


def _send(lines: IO[str]) -> None:
    start = json.loads(next(lines))
    run = _start(start)
    run.define_metric("step")
    for split in ("train", "val"):
        run.define_metric(f"{split}/*", step_metric="step")
    exit_code = _send_rows(run, lines)
    if exit_code is None:
        signal.alarm(_ORPHAN_LIMIT_S)
    run.finish(exit_code=exit_code or 0)


def _send_rows(run: Any, lines: Iterable[str]) -> int | None:
    """Send rows until the end; returns its code, or None where the input stopped without one."""
    for line in lines:
        message = json.loads(line)
        if "end" in message:
            return int(message["end"])
        run.log(_named(message["row"]))
    return None


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row under wandb's names: ``val/loss`` and so on. wandb's own step is not used: two rows may
    have the same step, and it takes each of its steps once.
    """
    split = row["split"]
    common = {key: row[key] for key in ("step", "epoch", "attempt") if key in row}
    metrics = {f"{split}/{k}": v for k, v in row.items() if k not in (*common, "split", "time")}
    return common | metrics


def _start(message: dict[str, Any]) -> Any:
    import wandb

    mode = message["mode"]
    if mode == "auto":
        mode = "online" if has_key() else "offline"
    known = wandb.Settings.model_fields
    quiet = {name: value for name, value in _QUIET.items() if name in known}
    settings = wandb.Settings(init_timeout=_INIT_TIMEOUT_S, **quiet)
    # wandb makes the folder ``wandb`` in ``dir`` by itself.
    return wandb.init(
        dir=message["folder"],
        mode=mode,
        resume="allow",
        save_code=False,
        settings=settings,
        **message["init"],
    )


if __name__ == "__main__":
    sys.exit(main())
