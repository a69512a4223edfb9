"""Renders the page. The template engine escapes all text from runs, control characters included; the page's
own security policy lets it run no other script and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from hpc_train import __version__
from hpc_train.errors import counted, printable, shortened
from hpc_train.report.changed_keys import value_text
from hpc_train.report.html import evaluation_files, limits
from hpc_train.report.html.collecting import Collected, Ranking, RunData
from hpc_train.report.html.line_charts import LineChart, line_charts, short
from hpc_train.report.metrics_reader import Point
from hpc_train.report.run_files import first_step_words, short_duration
from hpc_train.report.usage import PARTS, summed
from hpc_train.run import spikes
from hpc_train.run.run_status import RunStatus, extension_words

if TYPE_CHECKING:
    from jinja2 import Environment

_TEMPLATES = "hpc_train.report.html"
_PART_TITLES = {
    "training": "training",
    "data": "waiting for data",
    "saving": "saving",
    "starting": "starting",
    "stopping": "stopping",
    "lost": "lost steps",
    "other": "evaluation, other",
}


#: Text and sort key of a cell of the table of runs; an empty text is last.
_Cell = tuple[str, float | str | None]
#: Of a run that has not measured the metric.
_NO_VALUE: _Cell = ("–", "")


def render(collected: Collected) -> str:
    """Return the page of the runs."""
    return _environment().get_template("report.html.j2").render(_content(collected))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(_TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "counted": counted,
        "cut": _cut,
        "duration": short_duration,
        "first_step": first_step_words,
        "short": short,
        "thousands": lambda number: f"{number:,}",
    }
    environment.globals["zip"] = zip
    return environment


def _content(collected: Collected) -> dict[str, Any]:
    from markupsafe import Markup  # with the template engine, which inserts it unchanged

    runs, labels = collected.runs, [_cut(label) for label in collected.labels]
    charts = line_charts(collected)
    style, script = _style(), _file("report.js")
    names = list(dict.fromkeys(run.experiment for run in runs))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    causes = Counter(attempt.cause for run in runs for attempt in run.attempts).most_common()
    return {
        "version": __version__,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "title": shown or "No runs",
        "style": Markup(style),
        "script": Markup(script),
        "policy": (
            f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "limits": limits,
        "runs": runs,
        "labels": labels,
        "tables": [_table(ranking, collected) for ranking in collected.rankings],
        "states": Counter(run.status.state for run in runs).most_common(),
        "interruptions": [pair for pair in causes if pair[0] not in {"completed", "running", "unknown"}],
        "elapsed_s": sum(run.elapsed_s or 0.0 for run in runs),
        "charts": charts,
        "data": Markup(_embedded_json(labels, charts)),
        "has_attempts": any(run.attempts for run in runs),
        "times": _time_rows(runs),
        "parts": [_PART_TITLES[part] for part in PARTS],
        "evaluations": [
            (_heading(label, run), evaluation)
            for label, run in zip(labels[: limits.EVALUATED], runs, strict=False)
            if (evaluation := evaluation_files.newest_evaluation(run.paths)) is not None
        ],
        "ious": _ious(labels, runs),
        "details": [_details(run) for run in runs[: limits.DETAILED]],
        "is_sampled": any(run.is_sampled for run in runs),
    }


def _embedded_json(labels: Sequence[str], charts: Sequence[LineChart]) -> str:
    """Return the data of the page's script as JSON that can't end the element around it."""
    data = {
        "runs": labels,
        "highlighted": limits.HIGHLIGHTED,
        "columns": {"wide": limits.COLUMNS, "narrow": limits.NARROW_COLUMNS},
        "charts": [chart.data() for chart in charts],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char in "<>&'":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _file(name: str) -> str:
    return resources.files(_TEMPLATES).joinpath("templates", name).read_text("utf-8")


def _style() -> str:
    """Return the style sheet, the dark palette both for the system's setting and for the page's button."""
    dark = _file("dark.css")
    return (
        f"{_file('report.css')}\n:root[data-theme=dark] {{\n{dark}}}\n"
        f"@media screen and (prefers-color-scheme: dark) {{\n:root:not([data-theme=light]) {{\n{dark}}}\n}}\n"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _cut(text: object, length: int = limits.CELL_LENGTH) -> str:
    return shortened(printable(str(text)), length)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _table(ranking: Ranking, collected: Collected) -> dict[str, Any]:
    """Return a ranking's table: columns (title, kind, cells) and rows (place, run, name, other cells)."""
    from markupsafe import Markup

    runs, metric = ranking.runs, ranking.metric
    bests = [run.best(metric) if metric else None for run in runs]
    experiments = {run.experiment: None for run in runs}
    swept = {key: None for experiment in experiments for key in collected.swept[experiment]}
    rest = [key for key in collected.keys if key not in swept]
    columns = [
        ("run", "name", [_text_cell(_short_name(run, experiments)) for run in runs]),
        ("state", "status", [_text_cell(run.status.state) for run in runs]),
    ]
    if metric:
        columns += [(f"best {metric}", "number", [_point_cell(best) for best in bests])]
    if len(experiments) > 1:
        columns += [("experiment", "text", [_text_cell(run.experiment) for run in runs])]
    columns += [_key_column(key, runs, collected) for key in swept]
    columns += [
        ("step", "number", [(_steps(run.status), run.status.step) for run in runs]),
        ("time", "number", [(short_duration(run.elapsed_s), run.elapsed_s) for run in runs]),
    ]
    if metric:
        columns += [
            (f"last {metric}", "number", [_point_cell(run.last(metric)) for run in runs]),
            ("best at step", "number", [(f"{at.step:,}", at.step) if at else _NO_VALUE for at in bests]),
        ]
    columns += [
        ("goodput", "number", [(_share(run.goodput), run.goodput) for run in runs]),
        ("attempts", "number", [(str(len(run.attempts)), len(run.attempts)) for run in runs]),
        *(_key_column(key, runs, collected) for key in rest),
        ("reason", "text", [_text_cell(run.status.reason or "") for run in runs]),
    ]
    return {
        "metric": metric,
        "task": ranking.task,
        "best": bests[0] if bests else None,
        "missing": bests.count(None),
        "columns": columns,
        "rows": [
            (collected.places[run.paths], run, name, Markup("".join(cells)))
            for run, (name, _), cells in zip(
                runs, columns[0][2], zip(*map(_cells_html, columns[2:]), strict=True), strict=True
            )
        ],
    }


def _cells_html(column: tuple[str, str, list[_Cell]]) -> list[str]:
    """Return a column's cells as HTML: a loop of the template takes seconds for thousands of runs."""
    from markupsafe import escape

    _, kind, cells = column
    keys = ("" if key is None else f' data-key="{escape(key)}"' for _, key in cells)
    return [
        f'<td class="{kind}"{key}>{escape(text)}</td>' for key, (text, _) in zip(keys, cells, strict=True)
    ]


def _key_column(key: str, runs: Sequence[RunData], collected: Collected) -> tuple[str, str, list[_Cell]]:
    cells = [_value_cell(run.values.get(key)) for run in runs]
    is_short = max(len(text) for text, _ in cells) <= limits.SHORT_CELL
    return collected.names[key], "value" if is_short else "text", cells


def _short_name(run: RunData, experiments: Mapping[str, Any]) -> str:
    """Return the run's name, without its experiment if that has a column."""
    run_id = run.paths.folder.name
    return run_id if len(experiments) > 1 and run.name == f"{run.experiment}/{run_id}" else run.name


def _text_cell(text: str) -> _Cell:
    return _cut(text), None


def _steps(status: RunStatus) -> str:
    return f"{status.step:,} / {'?' if status.total_steps is None else f'{status.total_steps:,}'}"


def _value_cell(value: Any) -> _Cell:
    is_number = type(value) in {int, float} and abs(value) < 1e300
    text = _cut(value_text(value))
    return text, float(value) if is_number else text


def _point_cell(point: Point | None) -> _Cell:
    if point is None:
        return _NO_VALUE
    return (f"{point.value:.6g}", point.value) if math.isfinite(point.value) else ("NaN", "")


def _time_rows(runs: Sequence[RunData]) -> list[tuple[str, str, list[str], str]]:
    """Return title, goodput, duration by part, and total: of all runs together, then of the first runs."""
    timed = [run for run in runs if run.time_use]
    rows = [(run.name, run.time_use) for run in timed[: limits.TIME_ROWS]]
    if len(timed) > 1:
        rows.insert(0, (f"all {len(timed):,} runs", summed(run.time_use for run in timed)))
    return [
        (
            title,
            _share(use["training"] / sum(use.values())),
            [short_duration(use[part]) if use[part] else "" for part in PARTS],
            short_duration(sum(use.values())),
        )
        for title, use in rows
    ]


def _heading(label: str, run: RunData) -> str:
    return label if run.name in label else f"{label} ({run.name})"


def _ious(labels: Sequence[str], runs: Sequence[RunData]) -> list[tuple[str, int, list[tuple[str, float]]]]:
    ious = []
    for label, run in zip(labels[: limits.EVALUATED], runs, strict=False):
        curves = {
            metric.name.removeprefix("iou_"): curve
            for metric, curve in run.curves.items()
            if metric.split == "val" and metric.name.startswith("iou_") and curve
        }
        if curves:
            values = [(name, curve.values[-1]) for name, curve in curves.items()]
            step = max(curve.steps[-1] for curve in curves.values())
            ious.append((_heading(label, run), step, values[: limits.TABLE_ROWS]))
    return ious


def _details(run: RunData) -> dict[str, Any]:
    """Return the run's file and facts. Links that lead out of its folder are not read."""
    from hpc_train.run.create import newest_versions  # the schema

    text = evaluation_files.confined_text(run.paths.experiment, run.paths, limits.TABLE_BYTES)
    versions = newest_versions(run.facts)
    return {
        "run": run,
        "file": None if text is None else _cut(text, limits.FILE_CHARS),
        "facts": [(label, _cut(value)) for label, value in _facts(run) if value],
        "changes": [
            (number, _cut(change))
            for number, listed in (run.facts.get("changes") or {}).items()
            for change in listed[:50]
        ],
        "versions": [(_cut(name), _cut(version)) for name, version in sorted(versions.items())],
    }


def _facts(run: RunData) -> list[tuple[str, str]]:
    code, source = run.facts.get("code") or {}, run.facts.get("source") or {}
    overrides = source.get("overrides")
    changed = " with uncommitted changes" if code.get("dirty") else ""
    return [
        ("state", run.status.state),
        ("reason", run.status.reason or ""),
        ("slow ranks", run.status.slow_words),
        ("spikes", spikes.in_words(run.paths) or ""),
        ("created", str(run.facts.get("created") or "")),
        ("file", str(source.get("file") or "")),
        ("overrides", " ".join(map(str, overrides)) if isinstance(overrides, list) else ""),
        *extension_words(run.facts),
        ("code commit", f"{code['commit']}{changed}" if code.get("commit") else ""),
        ("code snapshot", str(code.get("snapshot") or "")),
        ("folder", str(run.paths.folder)),
    ]
