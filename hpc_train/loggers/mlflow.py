"""Mirror of ``metrics.jsonl`` in MLflow; imported only by the process that sends the rows.

There are two records per store in the run folder, ``mlflow/<hash of the store>/``: ``sent.json``, the rows
that MLflow may have (``loggers.sending``), and ``run.json``, MLflow's id of the run and the number of rows
that it certainly has. The rows between the two are compared with MLflow's history before they are sent
again. A run whose id was not recorded is found by its tag.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hpc_train.loggers import sending
from hpc_train.loggers.base import Row
from hpc_train.loggers.process_logger import MLFLOW_DEFAULTS
from hpc_train.loggers.sending import SentRows
from hpc_train.loggers.tracker_environment import is_variable_of
from hpc_train.paths import RunPaths
from hpc_train.run.files import read_json, write_json
from hpc_train.run.metric_rows import numbers, time_of

#: The tag by which a run is found; its value never changes over the attempts.
TAG = "hpc_train.id"
#: MLflow's limits for one request, a name and a parameter's value.
_MAX_METRICS, _MAX_PARAMS = 1000, 100
_MAX_NAME, _MAX_VALUE = 250, 6000
#: All that MLflow accepts in a name.
_NO_NAME = re.compile(r"[^\w. :-]|^\.+$", re.ASCII)
_Item = TypeVar("_Item")
#: Name, value, time in milliseconds, step.
_Metric = tuple[str, float, int, int]


class MlflowMirror(sending.Mirror):
    """``metrics.jsonl`` in MLflow."""

    def __init__(self, settings: dict[str, Any], report: Callable[[str], None]) -> None:
        super().__init__(settings, report)
        self._run: _Run | None = None

    def begin(self) -> None:
        """Check MLflow's settings, and keep others from sending the rows."""
        self._take_lock(self._paths.mlflow_lock)
        _drop_invalid_settings(self._report)

    def send(self, committed_step: int) -> None:
        """Send the rows up to this step that MLflow lacks."""
        self._committed_step = committed_step
        self._try(lambda _: None)

    def finish(self, exit_code: int | None) -> None:
        """Set the run's status, after the rows that could not be sent before."""
        if exit_code is not None or not self._is_sync:
            status = "FINISHED" if exit_code == 0 else "KILLED"
            self._try(lambda run: run.client.set_terminated(run.run_id, status))

    def _num_at_tracker(self) -> tuple[int, bool]:
        folder = _folder(self._settings)
        num_rows = (read_json(folder / "run.json") or {}).get("rows")
        num_may_have = SentRows(self._paths.metrics, folder / "sent.json").num_may_have
        num_there = min(num_rows, num_may_have) if type(num_rows) is int else 0
        return num_there, num_there == num_may_have

    def _try(self, work: Callable[[_Run], None]) -> None:
        try:
            self._take_lock(self._paths.mlflow_lock)
            if self._run is None or self._run.rows.has_withdrawn():
                self._run = _Run.open(self._settings)
                self.target = self._run.run_id
            self.num_sent += self._run.send(self._committed_step)
            work(self._run)
            self._problem = None
        except Exception as error:  # whatever its client, its stores or their servers raise
            self._run = None
            self._fail(error)


def _drop_invalid_settings(report: Callable[[str], None]) -> None:
    """Replace the variables whose values MLflow refuses, at each request, by our defaults, and name them."""
    from mlflow import environment_variables

    for name in sorted(name for name in os.environ if is_variable_of("mlflow", name)):
        read = getattr(getattr(environment_variables, name, None), "get", None)
        try:
            if read is not None:
                read()
        except ValueError:
            report(f"{name}={os.environ[name]} is invalid and is ignored")
            del os.environ[name]
            if name in MLFLOW_DEFAULTS:
                os.environ[name] = MLFLOW_DEFAULTS[name]


@dataclass
class _Run:
    """An MLflow run, and the rows that it lacks."""

    client: Any
    run_id: str
    rows: SentRows
    record: Path
    #: Rows before this number may be there.
    num_uncertain: float
    #: Metric → the steps that MLflow had when this run was opened; read for uncertain rows only.
    steps_by_metric: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def open(cls, settings: dict[str, Any]) -> _Run:
        """Find the run of the file's rows, or create it, and set it running."""
        from mlflow import MlflowClient

        if not (uri := _uri(settings)):
            raise ValueError("there is neither logging.mlflow.tracking_uri nor MLFLOW_TRACKING_URI")
        paths, folder = RunPaths(Path(settings["folder"])), _folder(settings)
        folder.mkdir(parents=True, exist_ok=True)
        rows = SentRows(paths.metrics, folder / "sent.json")
        run = cls(MlflowClient(tracking_uri=uri), "", rows, folder / "run.json", rows.num_may_have)
        if not run._continue():
            run._find_or_create(paths, settings)
        run._begin(settings["params"])
        return run

    def _continue(self) -> bool:
        """Continue the recorded run if its rows are still in the file, otherwise end it."""
        record = read_json(self.record) or {}
        run_id, count = record.get("run_id"), record.get("rows")
        if not isinstance(run_id, str) or not run_id or type(count) is not int:
            return False
        if record.get("segment") != self.rows.segment or count > self.rows.num_may_have:
            self.client.set_terminated(run_id, "KILLED")
            return False
        self.run_id = run_id
        return self.rows.skip(count)

    def _find_or_create(self, paths: RunPaths, settings: dict[str, Any]) -> None:
        tag, name = (settings[key] + self.rows.suffix for key in ("id", "name"))
        # Runs of a sweep start at the same time, and would each create the experiment.
        lock = sending.locked(paths.siblings.mlflow_lock, limit_s=sending.ORPHAN_LIMIT_S)
        try:
            experiment = _experiment_id(self.client, settings["experiment"])
        finally:
            if lock is not None:
                lock.close()
        runs = self.client.search_runs([experiment], f"tags.`{TAG}` = '{tag}'", max_results=1)
        if runs:
            self.run_id, self.num_uncertain = runs[0].info.run_id, float("inf")
        else:
            self.run_id = self.client.create_run(experiment, tags={TAG: tag}, run_name=name).info.run_id
            self.num_uncertain = 0
        if not self.run_id:
            raise ValueError("its answer names no run, as from a captive portal or a proxy")
        self._note(0)

    def _begin(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        run = self.client.get_run(self.run_id)
        if run.info.lifecycle_stage != "active":
            raise ValueError(f"run {self.run_id} was deleted in MLflow; restore it there")
        missing = {name: value for name, value in flattened(params).items() if name not in run.data.params}
        for part in _parts([Param(*item) for item in missing.items()], _MAX_PARAMS):
            self.client.log_batch(self.run_id, params=part)
        self.client.update_run(self.run_id, status="RUNNING")

    def _note(self, num_rows: int) -> None:
        """Record that the run has these rows."""
        record = {"version": 1, "segment": self.rows.segment, "run_id": self.run_id, "rows": num_rows}
        write_json(self.record, record)

    def send(self, committed_step: int) -> int:
        """Send the rows up to this step, each once; return how many there were."""
        from mlflow.entities import Metric

        num_rows = 0
        for batch in self.rows.batches_up_to(committed_step):
            first, last = batch[0][0], batch[-1][0]
            metrics = [metric for _, row in batch for metric in metrics_of(row)]
            if first < self.num_uncertain:
                for name in {name for name, *_ in metrics} - self.steps_by_metric.keys():
                    history = self.client.get_metric_history(self.run_id, name)
                    self.steps_by_metric[name] = {point.step for point in history}
                metrics = [metric for metric in metrics if metric[3] not in self.steps_by_metric[metric[0]]]
            for part in _parts(metrics, _MAX_METRICS):
                self.client.log_batch(self.run_id, metrics=[Metric(*metric) for metric in part])
            self._note(last + 1)
            num_rows += len(batch)
        return num_rows


def metrics_of(row: Row) -> list[_Metric]:
    """Return a row's numbers under MLflow's names: ``val/loss`` and so on; none of a row without a time."""
    if (time_s := time_of(row)) is None:
        return []
    return [
        (named(f"{row['split']}/", name), value, round(time_s * 1000), row["step"])
        for name, value in numbers(row).items()
    ]


def named(prefix: str, name: str) -> str:
    """Return ``prefix`` and ``name`` with the code of each character that MLflow refuses in its place."""
    accepted = prefix + _NO_NAME.sub(lambda match: "".join(f"_{ord(c):x}_" for c in match[0]), name)
    if len(accepted) <= _MAX_NAME:
        return accepted
    return f"{accepted[: _MAX_NAME - 9]}_{hashlib.sha256(accepted.encode()).hexdigest()[:8]}"


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return ``optimization.optimizer.lr`` and so on → the value; values other than strings as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flat[named("", name)] = text[:_MAX_VALUE]
    return flat


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    if (experiment := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run has created it meanwhile, or it can't be created
            if (experiment := client.get_experiment_by_name(name)) is None:
                raise
    return str(experiment.experiment_id)


def _uri(settings: dict[str, Any]) -> str:
    return settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI", "")


def _folder(settings: dict[str, Any]) -> Path:
    """Return the folder of a store's records."""
    parts = urlsplit(_uri(settings))
    store = [parts.scheme, parts.hostname, parts.port, parts.path, settings["experiment"]]
    name = hashlib.sha256(json.dumps(store).encode()).hexdigest()[:16]
    return RunPaths(Path(settings["folder"])).mlflow / name


def _parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
