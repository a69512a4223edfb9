"""The Python API: what ``import hpc_train`` has, in notebooks and scripts. Imports no torch.

Its functions are those of the commands, called with Python values: messages go to stderr, errors are
exceptions of ``hpc_train.errors``. Tables need pandas: ``pip install 'hpc-train[results]'``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hpc_train.cli.cancel import cancel_runs
from hpc_train.cli.code import is_new
from hpc_train.cli.command_options import PlanOptions, ResumeOptions, SubmitOptions
from hpc_train.cli.extending import extending
from hpc_train.cli.logs import find_log, last_lines
from hpc_train.cli.plan import make_full_plan
from hpc_train.cli.resume import resume_runs
from hpc_train.cli.run_row import RunRow
from hpc_train.cli.submit import submit_runs
from hpc_train.console import say
from hpc_train.errors import BadFileError, ExitCode, UsageError, UserError, WaitTimeoutError
from hpc_train.paths import CheckpointPaths, RunPaths
from hpc_train.report.changed_keys import changed_keys
from hpc_train.report.metrics_reader import (
    Metric,
    Row,
    decisive_metric,
    find_metric,
    last_and_best,
    metrics_in,
    rows_in,
)
from hpc_train.report.run_files import RunFiles, attempt_span, elapsed_s, ranks_of
from hpc_train.report.usage import attempt_cause, goodput
from hpc_train.run import evaluation_jobs
from hpc_train.run.checkpoints import committed, find_step, selection_words
from hpc_train.run.find import find_runs, run_name, run_names
from hpc_train.run.run_status import GOING_ON, read_status

if TYPE_CHECKING:
    import pandas as pd

    from hpc_train.training.checkpoint.inference import LoadedModel

#: A run's id, ``name/id``, its folder, or an experiment's name: as in the arguments of commands.
Word = str | Path
#: Interval at which ``wait`` reads a run's state; the scheduler's answers are cached for longer.
_POLL_S = 1.0


def submit(
    file: str | Path | Mapping[str, Any],
    *overrides: str,
    local: bool = False,
    here: bool = False,
    nodes: int | None = None,
    devices: int | None = None,
    launcher: str | None = None,
    new: bool = False,
    profile: bool = False,
    jobs: int = 1,
) -> Runs:
    """Start the runs of an experiment file, or of its content as a dict, like ``hpc-train submit``.

    ``overrides``: ``KEY=VALUE``. In a queue it returns once the jobs are submitted; with ``local`` the runs
    are on this machine and have ended when it returns, ``jobs`` of them at a time; with ``here`` likewise on
    the nodes of the job in which it is called, or on ``nodes`` of them. A run that exists already is
    returned, and not started again unless ``new``. Ctrl-C stops a local run, which saves first, and raises
    KeyboardInterrupt.
    """
    code, started = submit_runs(
        SubmitOptions(
            file=_file(file),
            overrides=list(overrides),
            local=local,
            here=here,
            nodes=nodes,
            devices=devices,
            launcher=launcher,
            new=new,
            profile=profile,
            jobs=jobs,
        )
    )
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return Runs(map(Run, started))


def plan(
    file: str | Path | Mapping[str, Any],
    *overrides: str,
    local: bool = False,
    here: bool = False,
    nodes: int | None = None,
    devices: int | None = None,
    launcher: str | None = None,
    throughput: float | None = None,
    memory: bool = False,
) -> dict[str, Any]:
    """Return the plan of the runs that ``submit`` would start, as ``hpc-train plan --json`` prints it.

    ``throughput``: samples per second of one rank, for the cost. ``memory``: also predict memory and FLOPs,
    which takes seconds; the command does so by default. Raises BadFileError with all reasons if ``submit``
    would refuse the file.
    """
    full = make_full_plan(
        PlanOptions(
            file=_file(file),
            overrides=list(overrides),
            local=local,
            here=here,
            nodes=nodes,
            devices=devices,
            launcher=launcher,
            throughput=throughput,
            memory=memory,
        )
    )
    if refused := [*full.problems, *full.queue.refused]:
        raise BadFileError(refused)
    return full.to_json()


def runs(*words: Word) -> Runs:
    """Return the runs that the words name; without words all below ``$HPC_TRAIN_RUNS`` (or ``runs``).

    Raises UsageError if a word names no run.
    """
    return Runs(map(Run, find_runs([os.fspath(word) for word in words])))


def load_model(
    run: Run | Word,
    *,
    best: bool | None = None,
    step: int | None = None,
    ema: bool | None = None,
    code: str | None = None,
) -> LoadedModel:
    """Return a run's model with the weights of one of its checkpoints, ready for inference.

    By default of the best one if ``checkpoint.best`` has selected one, else of the newest intact one;
    ``best``: True or False to request one of them; ``step``: that of this step. ``ema``: the EMA weights;
    by default if ``checkpoint.best`` follows their metric. ``code``: ``"new"`` to import your modules from
    ``sys.path`` instead of the run's snapshot. Imports torch.
    """
    from hpc_train.training.checkpoint.inference import load_model

    paths = (run if isinstance(run, Run) else _only_run(run))._paths
    model = load_model(paths, best=best, step=step, ema=ema, uses_snapshot=not is_new(code))
    if words := selection_words(paths, model.step, "best=False"):
        say(f"{run_name(paths)}: {words}")
    return model


class Run:
    """One run. It holds only the path: every attribute and method reads the present state."""

    def __init__(self, run: Word | RunPaths) -> None:
        """Find the run by its id, ``name/id`` or folder. Raises UsageError if there is not exactly one."""
        self._paths: RunPaths = run if isinstance(run, RunPaths) else _only_run(run)._paths

    def __repr__(self) -> str:
        return f"Run({run_name(self._paths)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other._paths == self._paths

    def __hash__(self) -> int:
        return hash(self._paths)

    @property
    def id(self) -> str:
        """The run's id, the name of its folder."""
        return self._paths.folder.name

    @property
    def experiment(self) -> str:
        """The experiment's name."""
        return self._paths.siblings.folder.name

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._paths.folder

    @property
    def status(self) -> RunRow:
        """The run's entry in ``hpc-train status --json``: ``run.status.state``, ``.step``, ``.reason``, …"""
        return RunRow.of(self._paths)

    def metrics(self, split: str | None = None) -> pd.DataFrame:
        """Return ``Runs.metrics`` of this run."""
        return Runs([self]).metrics(split)

    def attempts(self) -> pd.DataFrame:
        """Return ``Runs.attempts`` of this run."""
        return Runs([self]).attempts()

    def logs(self, *, rank: int = 0, attempt: int | None = None, lines: int = 0) -> str:
        """Return a rank's log, by default of the newest attempt; ``lines``: only that many at its end."""
        log, _ = find_log(self._paths, rank, attempt)
        return "\n".join(last_lines(log, lines))

    def wait(self, timeout_s: float | None = None) -> RunRow:
        """Wait until the run has ended, requeues included; return its status.

        Raises WaitTimeoutError if it has not ended after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status).state in GOING_ON:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(f"{self!r}: is {status.state} after {timeout_s:g} s; wait longer")
            time.sleep(_POLL_S)
        return status

    def cancel(self) -> RunRow:
        """Cancel the run for good; return its status. Raises NoSchedulerError if no scheduler answers."""
        codes, errors = cancel_runs([self._paths])
        if errors:
            raise errors[0]
        if ExitCode.FAILED in codes:
            raise UserError(f"{self!r}: its launcher could not cancel it")
        return self.status

    def resume(
        self,
        *overrides: str,
        local: bool = False,
        here: bool = False,
        nodes: int | None = None,
        devices: int | None = None,
        launcher: str | None = None,
        code: str | None = None,
        strict_env: bool = False,
        take_over: bool = False,
    ) -> RunRow:
        """Resume the run from its newest valid checkpoint, like ``hpc-train resume``; return its status.

        With a larger ``optimization.steps`` or ``epochs`` a completed run is extended by a new one, whose
        status is returned. Raises UserError if the run may be alive.
        """
        options = ResumeOptions(
            runs_and_overrides=[],
            local=local,
            here=here,
            nodes=nodes,
            devices=devices,
            launcher=launcher,
            code=code,
            strict_env=strict_env,
            take_over=take_over,
        )
        with extending([self._paths], overrides) as (runs, overrides_left):
            codes, refused = resume_runs(runs, overrides_left, options)
        if refused:
            raise UserError("\n".join(refused))
        if ExitCode.INTERRUPTED in codes:
            raise KeyboardInterrupt
        return RunRow.of(runs[0])

    @property
    def checkpoints(self) -> list[CheckpointPaths]:
        """The valid checkpoints, newest first; each has a ``step`` and a ``folder``."""
        return committed(self._paths)

    def checkpoint(self, *, best: bool | None = None, step: int | None = None) -> CheckpointPaths:
        """Return a checkpoint, selected like that of ``load_model``. Raises UsageError without one."""
        return self._paths.checkpoint(find_step(self._paths, best=best, step=step))


class Runs(Sequence[Run]):
    """Several runs, and tables of them."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = list(runs)

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    def __getitem__(self, index: int | slice) -> Run | Runs:
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __repr__(self) -> str:
        return f"Runs({self._runs!r})"

    def table(self, metric: str | None = None) -> pd.DataFrame:
        """Return a row per run.

        Columns: ``run``, ``experiment``, ``state``, ``step``, ``total_steps``, ``attempts``, ``ranks``,
        ``elapsed_s`` (of all attempts), ``goodput``, ``metric``, ``last``, ``last_step``, ``best``,
        ``best_step``, ``commit``, ``path``, and one per key in which the runs differ, with its dotted name.
        ``metric``: ``accuracy`` or ``train/loss``, by default that of ``checkpoint.best``, else accuracy, map
        or loss of evaluations. States are the last recorded ones: no scheduler is queried. Raises UsageError
        if no run has the metric.
        """
        pandas, runs = _pandas(), self._paths
        names, values = run_names(runs), changed_keys(runs)
        rows = {paths: list(rows_in(paths.metrics)) for paths in runs}
        metrics = metrics_in(row for run_rows in rows.values() for row in run_rows)
        statuses = (evaluation_jobs.with_best(paths, read_status(paths)) for paths in runs)
        chosen = find_metric(metrics, metric, decisive_metric(statuses))
        if chosen is None and metric is not None:
            listed = ", ".join(sorted(map(str, metrics))[:50]) or "none yet"
            raise UsageError(f"metric: {metric} is in no run's metrics.jsonl; there are {listed}")
        return pandas.DataFrame(
            [{"run": names[paths]} | _run(paths, rows[paths], chosen) | values[paths] for paths in runs]
        )

    def metrics(self, split: str | None = None) -> pd.DataFrame:
        """Return the rows of ``metrics.jsonl`` of the runs in order, with ``run`` and ``experiment``.

        ``split``: only the rows of ``train`` or of ``val``. ``time`` is a timestamp in UTC.
        """
        pandas = _pandas()
        names = run_names(self._paths)
        table = pandas.DataFrame(
            [
                {"run": names[paths], "experiment": paths.siblings.folder.name} | row
                for paths in self._paths
                for row in rows_in(paths.metrics)
                if split is None or row.get("split") == split
            ]
        )
        return _with_times(pandas, table, "time")

    def attempts(self) -> pd.DataFrame:
        """Return a row per attempt of the runs.

        Columns: ``run``, ``experiment``, ``attempt``, ``start``, ``end`` (timestamps in UTC), ``duration_s``,
        ``cause`` (why it ended), ``reason``, ``nodes``, ``ranks``, ``job``, ``saved_step``.
        """
        pandas = _pandas()
        names = run_names(self._paths)
        rows = [row for paths in self._paths for row in _attempts(paths, names[paths])]
        return _with_times(pandas, pandas.DataFrame(rows), "start", "end")

    @property
    def _paths(self) -> list[RunPaths]:
        return [run._paths for run in self._runs]


def _file(file: str | Path | Mapping[str, Any]) -> Path | Mapping[str, Any]:
    return Path(file) if isinstance(file, str | Path) else file


def _only_run(word: Word) -> Run:
    found = runs(word)
    if len(found) != 1:
        raise UsageError(f"{word}: matches {len(found)} runs; write the id of one, or use hpc_train.runs")
    return found[0]


def _with_times(pandas: Any, table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    for column in columns:
        if column in table:
            seconds = pandas.to_numeric(table[column], errors="coerce")
            table[column] = pandas.to_datetime(seconds, unit="s", utc=True, errors="coerce")
    return table


def _pandas() -> Any:
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise UserError(
            "pandas is not installed, and tables of runs need it; install it with "
            "pip install 'hpc-train[results]'"
        ) from error
    return pandas


def _run(paths: RunPaths, rows: Sequence[Row], metric: Metric | None) -> dict[str, Any]:
    run, status = RunFiles.read(paths), read_status(paths)
    elapsed = elapsed_s(run, status)
    last, best = last_and_best(rows, metric) if metric else (None, None)
    code = run.facts.get("code")
    return {
        "experiment": paths.siblings.folder.name,
        "state": status.state,
        "step": status.step,
        "total_steps": status.total_steps,
        "attempts": len(run.attempts),
        "ranks": ranks_of(run.facts, run.newest_record),
        "elapsed_s": elapsed,
        "goodput": goodput(paths, status, elapsed),
        "metric": None if metric is None else str(metric),
        "last": None if last is None else last.value,
        "last_step": None if last is None else last.step,
        "best": None if best is None else best.value,
        "best_step": None if best is None else best.step,
        "commit": code.get("commit") if isinstance(code, dict) else None,
        "path": str(paths.folder),
    }


def _attempts(paths: RunPaths, name: str) -> list[dict[str, Any]]:
    run, status = RunFiles.read(paths), read_status(paths)
    found = []
    for attempt, record in run.recorded:
        is_running = run.is_running(record, status)
        span = attempt_span(attempt, record, is_running=is_running)
        found.append(
            {
                "run": name,
                "experiment": paths.siblings.folder.name,
                "attempt": attempt.number,
                "start": None if span is None else span[0],
                "end": None if span is None or is_running else span[1],
                "duration_s": None if span is None else span[1] - span[0],
                "cause": attempt_cause(record, is_running=is_running),
                "reason": record.reason,
                "nodes": " ".join(record.hosts),
                "ranks": record.ranks,
                "job": record.job,
                "saved_step": record.saved_step,
            }
        )
    return found
