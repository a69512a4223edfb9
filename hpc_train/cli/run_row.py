"""The row of a run in ``status``, and its entry in ``status --json``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict

from hpc_train.console import JSON_VERSION
from hpc_train.errors import BadFileError, HpcTrainError
from hpc_train.experiment.topology.degrees import Ranks
from hpc_train.launchers.base import AccountingLauncher, Launcher
from hpc_train.launchers.lookup import launcher_in, statuses
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.recovery import bad_nodes, budgets, diagnosis, history
from hpc_train.recovery.budgets import Left, Limits
from hpc_train.recovery.save_interval import SaveInterval
from hpc_train.report import changed_keys, run_files
from hpc_train.report.metrics_reader import Row, last_metric, newest_judged, newest_rows, spread_rows
from hpc_train.report.run_files import Restart, RunFiles, ranks_of, short_duration
from hpc_train.report.usage import MAX_BYTES, Usage, goodput, usage_of
from hpc_train.run import attempts, bad_samples, checkpoints, evaluation_jobs, files, spikes
from hpc_train.run.best import Best
from hpc_train.run.file_shapes import decoded, encoded
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.run_status import GOING_ON, RunStatus, extension_words

#: Six heartbeats: clocks of nodes and file servers may differ by a few heartbeats.
_SILENT_S = 180.0


@dataclass(frozen=True)
class RunRow:
    """One entry of ``status --json`` (a contract)."""

    id: str
    name: str
    state: str
    step: int
    total_steps: int | None
    attempt: int
    reason: str | None
    path: str
    #: Of the newest job: ``12_3``, or ``12``.
    job: str | None = None
    #: The parts of the newest interruption, in seconds.
    restart: Restart | None = None
    #: The remaining budget of the newest job; None if the run is not requeued.
    budget: Left | None = None
    #: The size that ``micro_batch_size: auto`` found; None if the file has a number, or it is not known yet.
    micro_batch_size: int | None = None
    #: By node, why the run's next attempt excludes it.
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    #: The swept keys and their values.
    values: dict[str, Any] = field(default_factory=dict)
    #: ``run`` and ``step``: the completed run that this one extends, and that one's last step; else None.
    extends: dict[str, Any] | None = None
    #: Ids of the runs that extend this one.
    extended_by: list[str] = field(default_factory=list)
    #: Of the code that the run uses: ``commit``, ``dirty``, ``snapshot``; None if unknown.
    code: dict[str, Any] | None = None
    #: Of the newest attempt; before the first, as planned.
    ranks: int | None = None
    #: The arithmetic of a step with those ranks, as ``plan`` shows it.
    micro_batches: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    #: Of all attempts, without the time in queues; None before the first.
    elapsed_s: float | None = None
    #: Until the last step, at the rate of the newest rows; None if the run does not train.
    eta_s: float | None = None
    #: ``split``, ``name``, ``value`` and ``step`` of the newest evaluation, in the metric of ``best_metric``,
    #: else of the newest row.
    last_metric: dict[str, Any] | None = None
    #: ``metric``, ``value`` and ``step`` of the best evaluation so far, by the metric of ``checkpoint.best``,
    #: else of ``early_stopping``, else accuracy, map, loss or the own task's first; None before the first.
    best_metric: dict[str, Any] | None = None
    #: The share of ``elapsed_s`` in steps that count, without waits for data: a step that was trained twice
    #: counts once, and of a run that stopped early those in a checkpoint. None if no row has times.
    goodput: float | None = None
    #: With ``checkpoint.best``: ``metric``, ``value`` and ``step`` of the best checkpoint; None before the
    #: first.
    best: dict[str, Any] | None = None
    #: ``gpu_hours``, ``core_hours``, ``time`` (seconds by cause: ``training``, ``data``, ``saving``,
    #: ``starting``, ``stopping``, ``lost``, ``evaluation``, ``other``, ``queue``), ``peak_gpu_memory_gib``,
    #: and of a single run, by accounting: ``peak_memory_gib`` and ``requested_memory_gib`` per node,
    #: ``memory_efficiency``, ``cpu_efficiency``. None before the first attempt.
    usage: dict[str, Any] | None = None
    #: With ``checkpoint.every: auto``, of the newest attempt: ``every_s``, the current interval; ``saves`` of
    #: the attempt; of the run, if measured, ``stall_s``, the mean time that a save stops training,
    #: ``interruptions`` that lost work, and ``mtbf_s``, the mean training time between them.
    save_interval: dict[str, float] | None = None
    #: Of the newest attempt's first step: ``data_s``, ``compile_s`` and ``run_s``, and ``graphs``, of which
    #: ``cached_graphs`` were compiled before. None before its end.
    first_step: dict[str, float] | None = None

    @classmethod
    def of(cls, paths: RunPaths) -> RunRow:
        """Read the run's status; it is corrected if the run's launcher has died."""
        return rows_of([paths])[0]

    @classmethod
    def at(
        cls, paths: RunPaths, now: RunStatus, *, is_full: bool = True, with_accounting: bool = False
    ) -> RunRow:
        """Return the row of a run with the status ``now``.

        ``with_accounting``: the scheduler is queried for the usage of the run's jobs. Unless ``is_full``,
        fields that a table of many runs does not show and that take long to read are omitted.
        """
        run = RunFiles.read(paths, with_events=is_full)
        facts = run.facts
        jobs = attempts.job_ids(facts)
        # The status of another run has no words.
        has_recovery = is_full or (run.attempts and now.state in GOING_ON)
        recovery = _recovery_of(run, now) if has_recovery else _Recovery()
        values = facts.get("values")
        # Only a run in training needs more than one row: for its rate.
        rows = newest_rows(paths.metrics) if now.state == "running" else newest_judged(paths.metrics)
        slow = [now.slow_words] if now.state == "running" else []
        elapsed, remaining = run_files.elapsed_s(run, now), run_files.remaining_s(now, rows)
        best = decoded(Best, now.best)
        details = _details(run, now, elapsed, with_accounting=with_accounting) if is_full else {}
        return cls(
            id=str(facts.get("id", paths.folder.name)),
            name=str(facts.get("name", paths.folder.parent.name)),
            state=now.state,
            step=now.step,
            total_steps=now.total_steps,
            attempt=now.attempt,
            reason="; ".join(filter(None, (now.reason, now.activity, *slow, *recovery.words))) or None,
            path=str(paths.folder.absolute()),
            job=jobs[-1] if jobs else None,
            budget=recovery.budget,
            excluded_nodes=recovery.excluded_nodes,
            values=values if isinstance(values, dict) else {},
            extends=facts.get("extends"),
            extended_by=facts.get("extended_by") or [],
            elapsed_s=None if elapsed is None else round(elapsed, 1),
            eta_s=None if remaining is None else round(remaining, 1),
            last_metric=last_metric(rows, best.metric if best else None),
            best_metric=encoded(best) if best else None,
            **details,
        )

    def to_json(self) -> dict[str, Any]:
        """Return its entry in ``status --json``."""
        return vars(self) | {
            "restart": self.restart and asdict(self.restart),
            "budget": self.budget and asdict(self.budget),
        }

    @property
    def paths(self) -> RunPaths:
        """The files of the run."""
        return RunPaths(Path(self.path))

    @property
    def progress(self) -> str:
        """Steps done and in all, such as ``120/500``; ``120/?`` if their number is unknown."""
        return f"{self.step}/{'?' if self.total_steps is None else self.total_steps}"

    @property
    def metric(self) -> str:
        """``accuracy 0.8 (best 0.9 at 40)``; empty before there is any."""
        last, best = self.last_metric, decoded(Best, self.best_metric)
        if last is None or best is None or best.metric != last["name"]:
            return self._last_value
        is_last = best.step == last["step"]
        return f"{self._last_value} ({'best' if is_last else f'best {best.value:.4g} at {best.step}'})"

    @property
    def _last_value(self) -> str:
        if self.last_metric is None:
            return ""
        value = self.last_metric["value"]
        return f"{self.last_metric['name']} {'nan' if value is None else format(value, '.4g')}"

    def cells(self, name: str) -> list[str]:
        """Return a line of the table; ``name``: the printed name of the run."""
        extends = [" ".join(words) for words in extension_words({"extends": self.extends})]
        times = (short_duration(self.elapsed_s), short_duration(self.eta_s))
        return [
            name,
            self.name,
            self.state,
            self.progress,
            self.job or "",
            *times,
            ", ".join(filter(None, (changed_keys.in_words(self.values), *extends))),
            self.reason or self.metric,
        ]

    def details(self) -> list[tuple[str, str]]:
        """Return details that don't fit the table, as label and text."""
        metric = self.last_metric
        code = self.code or {}
        changed = " with changes" if code.get("dirty") else ""
        commit = f"commit {str(code['commit'])[:12]}{changed}" if code.get("commit") else ""
        snapshot = f"snapshot {str(code['snapshot'])[:12]}" if code.get("snapshot") else ""
        details = [
            ("attempt", str(self.attempt) if self.attempt else ""),
            ("reason", self.reason or ""),
            ("metric", f"{self._last_value} at step {metric['step']} ({metric['split']})" if metric else ""),
            ("best", str(decoded(Best, self.best) or decoded(Best, self.best_metric) or "")),
            (
                "goodput",
                "" if self.goodput is None else f"{self.goodput:.1%} of {short_duration(self.elapsed_s)}",
            ),
            ("first step", run_files.first_step_words(self.first_step or {})),
            ("saves", str(SaveInterval.of(self.save_interval) or "")),
            *(Usage(**self.usage).details() if self.usage else ()),
            ("values", changed_keys.in_words(self.values)),
            *extension_words(vars(self)),
            ("code", ", ".join(filter(None, (commit, snapshot)))),
            ("folder", self.path),
        ]
        return [(label, text) for label, text in details if text]


def rows_of(runs: Sequence[RunPaths]) -> list[RunRow]:
    """Read the status of the runs; a scheduler is queried once for all of its runs."""
    return rows_at(zip(runs, statuses(runs), strict=True))


def rows_at(
    runs: Iterable[tuple[RunPaths, RunStatus]], *, is_full: bool = True, with_accounting: bool = False
) -> list[RunRow]:
    """Return the rows of runs with their status, see ``RunRow.at``."""
    return [RunRow.at(paths, now, is_full=is_full, with_accounting=with_accounting) for paths, now in runs]


class Runs(TypedDict):
    """The selected runs, each with its state at the end of the command."""

    version: int
    runs: list[RunRow]


def rows_json(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Return ``Runs``, the content of ``status --json``."""
    return {"version": JSON_VERSION, "runs": [row.to_json() for row in rows]}


def _details(
    run: RunFiles, now: RunStatus, elapsed: float | None, *, with_accounting: bool
) -> dict[str, Any]:
    """Return fields that the table of runs does not show; a long run's times are estimates."""
    paths, layout, best = run.paths, run_files.layout_of(run), best_checkpoint(run.paths)
    rows: Sequence[Row] = ()
    used = None
    if run.recorded:
        rows, share = spread_rows(paths.metrics, MAX_BYTES)
        launcher, job = launcher_in(paths, run.facts), None
        if with_accounting and isinstance(launcher, AccountingLauncher):  # a query per run
            job = launcher.job_usage(paths)
        used = usage_of(run, now, rows, share, _size(run, launcher), job)
    code = run.facts.get("code")
    useful = goodput(paths, now, elapsed, rows)
    return {
        "restart": run_files.newest_restart(run.records),
        "micro_batch_size": kept_size(paths) if run.attempts or now.state != "pending" else None,
        "code": None if code is None else {key: code.get(key) for key in ("commit", "dirty", "snapshot")},
        "ranks": ranks_of(run.facts, run.newest_record),
        "micro_batches": layout.micro_batches if layout else None,
        "accumulation": layout.accumulation if layout else None,
        "precision": layout.precision if layout else None,
        "goodput": None if useful is None else round(useful, 4),
        "best": None if best is None else encoded(best),
        "usage": None if used is None else asdict(used),
        "first_step": (run.newest_record.first_step or None) if run.newest_record else None,
        "save_interval": (run.newest_record.save_interval or None) if run.newest_record else None,
    }


def best_checkpoint(paths: RunPaths) -> Best | None:
    """Return the evaluation of the best checkpoint; None if unknown."""
    try:
        return checkpoints.kept_best(paths)
    except BadFileError:  # a checkpoint of a later version
        return None


def notes_in_words(paths: RunPaths) -> list[tuple[str, str]]:
    """Return label and text of the run's bad samples, evaluations by other jobs and spikes, if it has any."""
    notes = {"bad samples": bad_samples, "evaluations": evaluation_jobs, "spikes": spikes}
    return [(label, text) for label, module in notes.items() if (text := module.in_words(paths))]


def _size(run: RunFiles, launcher: Launcher) -> Ranks | None:
    """Return the ranks, GPUs and cores of an attempt if the launcher started it now; None if unknown."""
    record, experiment = run.newest_record, run.experiment
    devices = None if record is None else record.devices or record.ranks
    try:
        return None if experiment is None else launcher.ranks(experiment, devices)
    except (HpcTrainError, OSError):
        return None


@dataclass(frozen=True)
class _Recovery:
    """``budget`` is None if nothing requeues the run, or its file can't be read."""

    budget: Left | None = None
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    #: Lines to show in addition to the run's own reason.
    words: tuple[str, ...] = ()


def _recovery_of(run: RunFiles, now: RunStatus) -> _Recovery:
    """Return how the run would recover. ``now``: its status."""
    newest = run.paths.attempt(run.newest_number)
    silent = _silent_nodes(newest) if now.state == "running" else ()
    if not launcher_in(run.paths, run.facts).is_queue:
        return _Recovery(words=silent)
    records = run.records
    try:
        limits = _limits(run)
    except (HpcTrainError, OSError, ValueError):  # the frozen file was changed: other commands report it
        return _Recovery(words=silent)
    excluded = bad_nodes.excluded(records, limits.exclude_nodes_for_h)
    lines = []
    if excluded and now.state in GOING_ON:
        refusal = "can't exclude these nodes, since too few would be left: "
        lines = [f"{refusal if newest.kept_nodes.exists() else ''}{bad_nodes.exclusion_words(excluded)}"]
    newest_job = next(reversed(attempts.job_ids(run.facts)), None)  # a resume starts with a full budget
    left = budgets.left([record for record in records if record.job == newest_job], limits)
    return _Recovery(left, excluded, (*lines, *silent))


def _silent_nodes(attempt: AttemptPaths) -> tuple[str, ...]:
    lines = []
    for path in sorted(attempt.folder.glob("heartbeat-*.json")):
        with suppress(OSError):
            age_s = time.time() - path.stat().st_mtime
            if age_s > _SILENT_S:
                node = path.stem.removeprefix("heartbeat-")
                lines.append(diagnosis.silent_for(node, age_s))
    return tuple(lines)


#: Cached by the text of ``recovery`` sections: most are equal, and a resolved file takes longer to read.
_limits_by_text: dict[tuple[str, ...], Limits] = {}


def _limits(run: RunFiles) -> Limits:
    next_number = run.newest_number + 1
    text = (*_recovery_section(run.paths), *_recovery_changes(run, next_number))
    if text not in _limits_by_text:
        _limits_by_text[text] = history.effective_recovery(run.paths, next_number)
    return _limits_by_text[text]


def _recovery_changes(run: RunFiles, attempt: int) -> list[str]:
    if not run.facts.get("changes"):
        return []
    from hpc_train.run.create import noted_changes  # the schema: 0.2 s, which few runs need

    return [word for word in noted_changes(run.paths, attempt) if word.startswith("recovery")]


def _recovery_section(paths: RunPaths) -> list[str]:
    """Return the lines of the frozen file's ``recovery:``, which is written with one key per line."""
    lines = files.read_text(paths.experiment).splitlines()
    if "recovery:" not in lines:
        return []
    return list(takewhile(lambda line: line.startswith(" "), lines[lines.index("recovery:") + 1 :]))
