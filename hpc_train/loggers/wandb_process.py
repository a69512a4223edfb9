"""``python -m hpc_train.loggers.wandb_process``: the process that talks to wandb for ``loggers.wandb``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.loggers import sending
from hpc_train.loggers.base import Row
from hpc_train.loggers.sending import lock_for
from hpc_train.loggers.sent_rows import SentRows
from hpc_train.loggers.wandb_key import effective_mode
from hpc_train.paths import RunPaths

_PNG = b"\x89PNG\r\n\x1a\n"

#: How long to wait for the server at the start; wandb's own 90 s would outlive short runs.
_INIT_TIMEOUT_S = 30.0
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


class WandbMirror:
    """``metrics.jsonl`` in wandb: a row's number in the file is its step there.

    Offline it is in wandb's offline files, of which a lock and a record of their own keep track: ``sync`` may
    send the rows while an attempt writes them there.
    """

    def __init__(self, start: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._start = start | {"mode": effective_mode(start["mode"])}
        self._paths = paths = RunPaths(Path(start["folder"]))
        is_offline = self._start["mode"] == "offline"
        self._lock = lock_for(start, paths.wandb_offline_lock if is_offline else paths.wandb_lock)
        if "files" in start:  # of a sync that was killed
            shutil.rmtree(start["files"], ignore_errors=True)
            Path(start["files"]).mkdir(parents=True)
        records = (paths.wandb_offline, paths.wandb_sent)
        self._history = SentRows(paths.metrics, *(records if is_offline else reversed(records)))
        self._run = self._open()
        #: Rows that this process has sent.
        self.num_sent = 0

    @property
    def url(self) -> str | None:
        """The run's page; None offline."""
        return self._run.url or None

    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that wandb lacks."""
        if self._history.has_withdrawn():
            self._run.finish(exit_code=1)
            self._history.begin_segment()
            self._run = self._open()
        for number, row in self._history.rows_up_to(committed_step):
            self._run.log(_named(row) | self._images(row) | _time(row), step=number)
            self.num_sent += 1

    def show(self, row: Row) -> None:
        """Show a row that may still be withdrawn as the run's newest values, which can be replaced."""
        self._run.summary.update(_named(row))

    def finish(self, exit_code: int | None) -> None:
        """End the run and wait until all is sent."""
        self._run.finish(exit_code=exit_code or 0)

    def _images(self, row: Row) -> dict[str, Any]:
        """Return the images of the evaluation that a row is of; without those that wandb can't read."""
        if row["split"] != "val":
            return {}
        import wandb

        images: dict[str, Any] = {}
        for name, path in self._paths.evaluation_images(row["step"]).items():
            with suppress(Exception):  # a damaged image must not keep the row
                # wandb opens a file of any format; for EPS Pillow starts Ghostscript.
                if path.read_bytes().startswith(_PNG):
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

    known = wandb.Settings.model_fields
    quiet = {name: value for name, value in (_QUIET | _LINKED).items() if name in known}
    settings = wandb.Settings(init_timeout=_INIT_TIMEOUT_S, **quiet)
    # wandb creates the folder ``wandb`` in ``dir`` itself.
    return wandb.init(
        dir=message.get("files", message["folder"]),
        mode=message["mode"],
        resume="allow",
        save_code=False,
        settings=settings,
        **message["init"] | {name: message["init"][name] + suffix for name in ("id", "name")},
    )


if __name__ == "__main__":
    sending.main("wandb", WandbMirror)
