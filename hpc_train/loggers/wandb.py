"""Mirror of ``metrics.jsonl`` in wandb; imported only by the process that sends the rows."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hpc_train.loggers import sending
from hpc_train.loggers.base import Row
from hpc_train.loggers.tracker_environment import api_key, base_url, is_variable_of
from hpc_train.redaction import open_unredirected, without_credentials
from hpc_train.run.metric_rows import time_of

_PNG = b"\x89PNG\r\n\x1a\n"

#: How long to wait for the server at the start; wandb's own 90 s would outlive short runs.
_INIT_TIMEOUT_S = 30.0
#: The same at the end of an attempt, whose process is about to be killed.
_LAST_TIMEOUT_S = 5.0
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
    "sagemaker_disable": True,
}
#: Settings that identify a run in addition to ``wandb.init``'s arguments. A settings file, such as the one
#: written by ``wandb init``, may set them, and wandb prefers a sweep's run to the arguments.
_IDENTITY = {
    "sweep_id": None,
    "sweep_param_path": None,
    "launch": False,
    "launch_config_path": None,
    "fork_from": None,
    "resume_from": None,
    "resumed": False,
    "run_name": None,
    "run_job_type": None,
    "run_notes": None,
    "run_tags": None,
    "job_name": None,
    "x_label": None,
    "x_runqueue_item_id": None,
}
#: wandb's copy of an image is a hard link if the file system supports them, to save space.
_LINKED = {"allow_media_symlink": True, "symlink": False}
#: How long to wait for the number of rows that the server has, and the largest answer.
_COUNT_TIMEOUT_S, _MAX_ANSWER_BYTES = 3.0, 1 << 16
#: The query by which wandb determines where a resumed run continues.
_QUERY = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) { historyLineCount } }
}"""
#: wandb reports a row as sent once it is queued; only its log names a server that refuses rows.
_FAILED = re.compile(r"filestream: (?:fatal error|json decode error)[^\n]*")
_STATUS = re.compile(r"\b([45]\d\d [A-Z][A-Za-z -]*?)(?= url=|:|$)")


class WandbMirror(sending.Mirror):
    """``metrics.jsonl`` in wandb: a row's number in the file is its step there.

    Offline it is in wandb's offline files, which have a separate lock and record: ``sync`` may send the rows
    while an attempt writes them there.
    """

    def __init__(self, settings: dict[str, Any], report: Callable[[str], None]) -> None:
        super().__init__(settings, report)
        paths = self._paths
        self._is_offline = settings["mode"] == "offline"
        if self._is_offline:
            self._place = "its offline folder"
        records = (paths.wandb_offline, paths.wandb_sent)
        self._records = records if self._is_offline else records[::-1]
        self._history = sending.SentRows(paths.metrics, *self._records)
        self._run: Any = None
        self._has_finished = False

    def begin(self) -> None:
        """Check wandb's settings, and open the run if the server is there."""
        _drop_invalid_settings(self._report)
        self._is_open(_init_timeout_s())

    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that wandb lacks. Failed rows are sent at the next commit."""
        sent_step, self._committed_step = self._committed_step, committed_step
        if not self._is_open(_init_timeout_s()):
            return
        if self._refusal() is not None and (problem := self.missing(sent_step)) is not None:
            self.report_once(problem)
        if self._history.has_withdrawn():
            self._run.finish(exit_code=1)
            self._history.begin_segment()
            self._run = self._open(_init_timeout_s())
        for batch in self._history.batches_up_to(committed_step):
            for number, row in batch:
                time_s = time_of(row)
                timestamp = {} if time_s is None else {"_timestamp": time_s}
                self._run.log(_named(row) | self._images(row) | timestamp, step=number)
                self.num_sent += 1

    def _num_at_tracker(self) -> tuple[int, bool]:
        if self._run is None:
            return 0, self._history.num_may_have == 0
        if self._is_offline:
            return (self._history.num_read if self._has_finished else 0), self._has_finished
        if (accepted := num_accepted(self._run)) is not None:
            return accepted, True
        if self._has_finished and self._refusal() is None:
            return self._history.num_read, True
        return self._run.starting_step, False

    def _refusal(self) -> str | None:
        return None if self._run is None else refusal(Path(self._run.dir).parent / "logs")

    def _is_open(self, timeout_s: float) -> bool:
        """Return True if the run is open, or could be opened now; ``sync`` may otherwise send."""
        if self._run is None:
            try:
                self._take_lock(
                    self._paths.wandb_offline_lock if self._is_offline else self._paths.wandb_lock
                )
                if "scratch" in self._settings:  # left by a killed sync
                    shutil.rmtree(self._settings["scratch"], ignore_errors=True)
                    Path(self._settings["scratch"]).mkdir(parents=True)
                self._history = sending.SentRows(
                    self._paths.metrics, *self._records
                )  # sync may have sent some
                self._run = self._open(timeout_s)
                self._problem = None
            except sending.BusyError:
                raise
            except Exception as error:  # any error of the client
                if self._is_offline:
                    raise
                self._fail(error)
        return self._run is not None

    def show(self, row: Row) -> None:
        """Show a row that may still be withdrawn as the run's newest values, which can be replaced."""
        if self._run is not None:
            self._run.summary.update(_named(row))

    def finish(self, exit_code: int | None) -> None:
        """End the run, and wait until all is sent."""
        was_open = self._run is not None
        if not self._is_open(_LAST_TIMEOUT_S):
            return
        if not was_open:
            self.send(self._committed_step)
        self._run.finish(exit_code=exit_code or 0)
        self._has_finished = True

    def _images(self, row: Row) -> dict[str, Any]:
        """Return the images of a row's evaluation, without images that wandb can't read."""
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

    def _open(self, timeout_s: float) -> Any:
        """Return the wandb run that continues the file; a new one if its rows are not the file's."""
        while True:
            run = _start(self._settings, self._history.suffix, timeout_s)
            if self._history.skip(run.starting_step):
                break
            run.finish(exit_code=1)
            self._history.begin_segment()
        self.target = run.url or None
        run.define_metric("step")
        for split in ("train", "val"):
            run.define_metric(f"{split}/*", step_metric="step")
        return run


def _drop_invalid_settings(report: Callable[[str], None]) -> None:
    """Drop the variables whose values wandb refuses, which would end its start, and name them.

    Raises ValueError for an invalid address: without it the rows would go to another server.
    """
    import wandb

    for name in sorted(name for name in os.environ if is_variable_of("wandb", name)):
        try:
            wandb.Settings().update_from_env_vars({name: os.environ[name]})
        except (ValueError, TypeError) as error:
            errors = error.errors() if hasattr(error, "errors") else []
            reason = str(errors[0]["msg"]) if errors else str(error).partition("\n")[0]
            problem = f"{name}={os.environ[name]} is invalid ({reason})"
            if name == "WANDB_BASE_URL":
                raise ValueError(f"{problem}; nothing is sent") from error
            report(f"{problem} and is ignored")
            del os.environ[name]


def _init_timeout_s() -> float:
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or _INIT_TIMEOUT_S)


def _named(row: Row) -> Row:
    """Return a row under wandb's names: ``val/loss`` and so on."""
    split = row["split"]
    common = {key: row[key] for key in ("step", "epoch", "attempt") if key in row}
    metrics = {f"{split}/{k}": v for k, v in row.items() if k not in (*common, "split", "time")}
    return common | metrics


def _start(message: dict[str, Any], suffix: str, timeout_s: float) -> Any:
    import wandb

    fields = wandb.Settings.model_fields
    init = message["init"]
    identity = _IDENTITY | {
        "project": init["project"],
        "run_id": init["id"] + suffix,
        "run_group": init["group"],
    }
    wandb.setup(wandb.Settings(**{name: value for name, value in identity.items() if name in fields}))
    quiet = {name: value for name, value in (_QUIET | _LINKED).items() if name in fields}
    settings = wandb.Settings(init_timeout=timeout_s, **quiet)
    try:
        # wandb creates the folder ``wandb`` in ``dir`` itself.
        return wandb.init(
            dir=message.get("scratch", message["folder"]),
            mode=message["mode"],
            resume="allow",
            save_code=False,
            settings=settings,
            **init | {name: init[name] + suffix for name in ("id", "name")},
        )
    except Exception:
        # Its service keeps a run that could not begin, and refuses the same id the next time.
        with suppress(Exception):
            wandb.teardown(exit_code=1)
        raise


def num_accepted(run: Any) -> int | None:
    """Return the number of rows of a run that the server has; None if unknown."""
    import wandb

    url = without_credentials(base_url() or str(wandb.Settings().base_url)).rstrip("/")
    if (key := api_key()) is None:
        return None
    variables = {"project": run.project, "entity": run.entity, "name": run.id}
    request = urllib.request.Request(
        f"{url}/graphql",
        json.dumps({"operationName": "RunResumeStatus", "query": _QUERY, "variables": variables}).encode(),
        {
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
            "Content-Type": "application/json",
        },
    )
    try:
        with open_unredirected(request, _COUNT_TIMEOUT_S) as answer:
            reply = json.loads(answer.read(_MAX_ANSWER_BYTES))
        count = reply["data"]["model"]["bucket"]["historyLineCount"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return None
    return count if type(count) is int else None


def refusal(logs: Path) -> str | None:
    """Return why rows were refused, according to the client's logs in this folder; None if none were."""
    failures: list[str] = []
    with suppress(OSError):
        for log in sorted(logs.glob("*.log")):
            failures += _FAILED.findall(log.read_text(errors="replace"))
    if not failures:
        return None
    status = _STATUS.search(failures[-1])
    return status[1] if status else "its answer is not JSON, as from a captive portal or a proxy"
