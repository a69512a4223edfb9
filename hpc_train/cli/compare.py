"""``compare``: the keys in which runs differ, and their metrics."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from hpc_train.cli.command_options import CompareOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, csv_line, print_table, put_json, say
from hpc_train.errors import ExitCode, UsageError
from hpc_train.launchers.lookup import statuses
from hpc_train.paths import RunPaths
from hpc_train.report import metrics_reader
from hpc_train.report.changed_keys import changed_keys, short_names, value_text
from hpc_train.report.metrics_reader import SPLITS, Metric, Point, candidate_metrics, rows_in
from hpc_train.report.run_files import RunFiles, elapsed_s, ranks_of, short_duration
from hpc_train.run.best import PREFERRED
from hpc_train.run.find import run_names
from hpc_train.run.metric_rows import finite
from hpc_train.run.run_status import RunStatus


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison."""

    id: str
    name: str
    path: str
    state: str
    #: By the keys of ``keys``.
    values: dict[str, Any]
    last: Point | None
    best: Point | None
    duration_s: float | None


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1 in the denominator) of the finite values of several runs."""

    mean: float
    #: None for a single value.
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread; None if there is no finite value."""
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if not finite:
            return None
        std = statistics.stdev(finite) if len(finite) > 1 else None
        return cls(statistics.fmean(finite), std, len(finite))

    def __str__(self) -> str:
        return f"{self.mean:.6g}" if self.std is None else f"{self.mean:.6g} ± {self.std:.2g}"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the keys over which their metrics are averaged."""

    values: dict[str, Any]
    runs: list[ComparedRun]
    last: Spread | None
    best: Spread | None
    duration: Spread | None


def grouped(runs: Iterable[ComparedRun], over: Collection[str], metric: Metric) -> list[Group]:
    """Return the groups, the one with the best mean first."""
    members: dict[str, tuple[dict[str, Any], list[ComparedRun]]] = {}
    for run in runs:
        values = {key: value for key, value in run.values.items() if key not in over}
        members.setdefault(json.dumps(values, sort_keys=True, default=str), (values, []))[1].append(run)
    groups = [
        Group(
            values,
            group,
            Spread.of(run.last.value if run.last else None for run in group),
            Spread.of(run.best.value if run.best else None for run in group),
            Spread.of(run.duration_s for run in group),
        )
        for values, group in members.values()
    ]
    sign = 1 if metric.goal == "min" else -1
    return sorted(groups, key=lambda group: math.inf if group.best is None else sign * group.best.mean)


#: The last and the best value of a metric.
_Points = tuple[Point | None, Point | None]
_EXCLUSIVE = (
    ("--csv", "--json", "--diff"),
    ("--over", "--group-by"),
    ("--diff", "--over", "--group-by", "--metric"),
)


class Comparison(TypedDict):
    """Runs by a metric, the best one first."""

    version: int
    #: ``val/accuracy``.
    metric: str
    #: ``min`` or ``max``.
    goal: str
    #: In which the runs differ.
    keys: list[str]
    runs: list[ComparedRun]


class GroupJson(TypedDict):
    """Runs that differ in the averaged keys only."""

    ids: list[str]
    values: dict[str, Any]
    last: Spread | None
    best: Spread | None
    duration_s: float | None


class GroupComparison(TypedDict):
    """Groups of runs, the best one first."""

    version: int
    metric: str
    goal: str
    keys: list[str]
    #: The keys of ``--over``.
    over: list[str]
    groups: list[GroupJson]


def compare(options: CompareOptions) -> ExitCode:
    """Print the runs, or their means, the best first. UsageError for a metric or key that they lack."""
    for one, *others in _EXCLUSIVE:
        if _has(options, one) and (other := next((name for name in others if _has(options, name)), None)):
            raise UsageError(f"{one} and {other} exclude each other; use one of them")
    if options.diff:
        from hpc_train.cli.compare_diff import compare_two  # the schema: 0.2 s

        return compare_two(options.runs, as_json=options.as_json)
    runs = find_readable(options.runs)
    now = statuses(runs)
    metric, points = _measured(runs, options.metric, metrics_reader.decisive_metric(now))
    compared = sorted(_compared(runs, now, points), key=lambda run: metrics_reader.sort_key(run.best, metric))
    names = {str(paths.folder): name for paths, name in run_names(runs).items()}
    keys = list(compared[0].values) if compared else []
    facts = {"version": JSON_VERSION, "metric": str(metric), "goal": metric.goal, "keys": keys}
    if options.over or options.group_by:
        averaged = _full_keys(options.over, keys, "--over")
        if common := _full_keys(options.group_by, keys, "--group-by"):
            averaged = [key for key in keys if key not in common]
        common = [key for key in keys if key not in averaged]
        groups = grouped(compared, averaged, metric)
        if options.as_json:
            json_groups = [_group_json(group, common) for group in groups]
            put_json(facts | {"keys": common, "over": averaged, "groups": json_groups})
        elif options.as_csv:
            _write_groups(groups, names, common, metric)
        else:
            _print_groups(groups, common, metric)
    elif options.as_json:
        put_json(facts | {"runs": finite(list(map(asdict, compared)))})
    elif options.as_csv:
        _write_csv(compared, names, keys, metric)
    else:
        _print(compared, names, keys, metric)
    return ExitCode.DONE


def _has(options: CompareOptions, name: str) -> bool:
    key = {"--csv": "as_csv", "--json": "as_json"}.get(name, name[2:].replace("-", "_"))
    return bool(getattr(options, key))


def _measured(
    runs: Sequence[RunPaths], wanted: str | None, decisive: Metric | None
) -> tuple[Metric, Mapping[RunPaths, _Points]]:
    """Return the requested metric, or the decisive one without a request, and its values.

    It is that of validation rows, or of training rows if those lack it. Training rows are most of the
    files, so they are parsed only if no run has the metric in the others.
    """
    for split in SPLITS:
        rows_of = metrics_reader.validation_rows if split == "val" else rows_in
        candidates = [metric for metric in candidate_metrics(wanted, decisive) if metric.split == split]
        values = {
            paths: metrics_reader.last_and_best_of(rows_of(paths.metrics), candidates) for paths in runs
        }
        for metric in candidates:
            points = {paths: of_run[metric] for paths, of_run in values.items()}
            if any(last is not None for last, _ in points.values()):
                return metric, points
    if wanted is None:  # nothing was measured yet
        return Metric(SPLITS[0], PREFERRED[0]), dict.fromkeys(runs, (None, None))
    metrics = metrics_reader.metrics_in(row for paths in runs for row in rows_in(paths.metrics))
    if (named := metrics_reader.find_metric(metrics, wanted)) is not None:  # its values are not numbers
        return named, dict.fromkeys(runs, (None, None))
    listed = ", ".join(sorted(map(str, metrics))) or "none yet"
    raise UsageError(f"--metric: {wanted} is in no run's metrics.jsonl; there are {listed}")


def _compared(
    runs: Sequence[RunPaths], now: Sequence[RunStatus], points: Mapping[RunPaths, _Points]
) -> Iterator[ComparedRun]:
    files = [RunFiles.read(paths, with_events=False) for paths in runs]
    settings, facts = changed_keys(runs), _facts(files)
    values = {paths: settings[paths] | facts[paths] for paths in runs}
    keys = dict.fromkeys(key for paths in runs for key in values[paths])
    for run, status in zip(files, now, strict=True):
        paths, duration_s = run.paths, elapsed_s(run, status)
        yield ComparedRun(
            paths.folder.name,
            paths.siblings.folder.name,
            str(paths.folder),
            status.state,
            {key: values[paths].get(key) for key in keys},
            *points[paths],
            None if duration_s is None else round(duration_s, 1),
        )


def _facts(runs: Sequence[RunFiles]) -> dict[RunPaths, dict[str, Any]]:
    """Return ``ranks`` and ``code`` of each run if they differ: not keys of the file, but also causes."""
    ranks = {run.paths: ranks_of(run.facts, run.newest_record) for run in runs}
    code = {run.paths: _code(run.facts) for run in runs}
    columns: dict[str, dict[RunPaths, Any]] = {"ranks": ranks, "code": code}
    differing = {name: column for name, column in columns.items() if len({*map(str, column.values())}) > 1}
    return {run.paths: {name: column[run.paths] for name, column in differing.items()} for run in runs}


def _code(facts: Mapping[str, Any]) -> str | None:
    code = facts.get("code") or {}
    version = code.get("snapshot") or code.get("commit")
    return None if version is None else str(version)[:12]


def _print(
    runs: Sequence[ComparedRun], names: Mapping[str, str], keys: Sequence[str], metric: Metric
) -> None:
    short = short_names(keys)
    heads = ["run", *(short[key] for key in keys), "state", f"last {metric}", "step", f"best ({metric.goal})"]
    rows = [
        [
            names[run.path],
            *(value_text(run.values[key]) for key in keys),
            run.state,
            *_cells(run.last),
            *_cells(run.best),
            short_duration(run.duration_s),
        ]
        for run in runs
    ]
    print_table([*heads, "step", "duration"], rows)
    if not keys and len(runs) > 1:
        say("no key of the experiment differs between these runs")


def _full_keys(names: Sequence[str], keys: Sequence[str], option: str) -> list[str]:
    """Return the keys with these full or short names."""
    full = {name: key for key, name in short_names(keys).items()}
    full_keys = [full.get(key, key) for key in names]
    if unknown := next((key for key in full_keys if key not in keys), None):
        differ = f"they differ in {', '.join(keys)}" if keys else "they differ in no key"
        raise UsageError(f"{option}: these runs do not differ in {unknown}; {differ}")
    return full_keys


def _print_groups(groups: Sequence[Group], keys: Sequence[str], metric: Metric) -> None:
    names = short_names(keys)
    heads = ["runs", *(names[key] for key in keys), f"last {metric}", f"best ({metric.goal})", "duration"]
    rows = [
        [
            str(len(group.runs)),
            *(value_text(group.values.get(key)) for key in keys),
            *("-" if spread is None else str(spread) for spread in (group.last, group.best)),
            short_duration(group.duration.mean if group.duration else None),
        ]
        for group in groups
    ]
    print_table(heads, rows)


def _write_groups(
    groups: Sequence[Group], names: Mapping[str, str], keys: Sequence[str], metric: Metric
) -> None:
    points = [f"{what} {metric} {of}" for what in ("last", "best") for of in ("mean", "std", "count")]
    lines = [csv_line(["runs", *keys, *points, "duration_s"])]
    for group in groups:
        values = [_csv_text(group.values.get(key)) for key in keys]
        numbers = [number for spread in (group.last, group.best) for number in _spread_cells(spread)]
        runs = " ".join(names[run.path] for run in group.runs)
        lines.append(csv_line([runs, *values, *numbers, _duration_s(group)]))
    print("".join(lines), end="", flush=True)


def _spread_cells(spread: Spread | None) -> list[float | str]:
    if spread is None:
        return ["", "", 0]
    return [spread.mean, "" if spread.std is None else spread.std, spread.count]


def _group_json(group: Group, keys: Sequence[str]) -> dict[str, Any]:
    return {
        "ids": [run.id for run in group.runs],
        "values": {key: group.values.get(key) for key in keys},
        "last": group.last and asdict(group.last),
        "best": group.best and asdict(group.best),
        "duration_s": _duration_s(group),
    }


def _duration_s(group: Group) -> float | None:
    return round(group.duration.mean, 1) if group.duration else None


def _cells(point: Point | None) -> tuple[str, str]:
    return ("-", "-") if point is None else (f"{point.value:.6g}", str(point.step))


def _write_csv(
    runs: Sequence[ComparedRun], names: Mapping[str, str], keys: Sequence[str], metric: Metric
) -> None:
    heads = [f"last {metric}", "last step", f"best {metric}", "best step", "duration_s"]
    lines = [csv_line(["run", "experiment", *keys, "state", *heads])]
    for run in runs:
        points: list[float | str] = []
        for point in (run.last, run.best):
            points += ["", ""] if point is None else [point.value, point.step]
        values = [_csv_text(run.values[key]) for key in keys]
        lines.append(csv_line([names[run.path], run.name, *values, run.state, *points, run.duration_s]))
    print("".join(lines), end="", flush=True)


def _csv_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
