"""``report``: runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from hpc_train.cli.command_options import ReportOptions
from hpc_train.cli.many_runs import find_readable
from hpc_train.console import JSON_VERSION, put, put_json
from hpc_train.errors import ExitCode, UsageError, counted
from hpc_train.report.html.collecting import Collected, collect
from hpc_train.report.html.page import render
from hpc_train.run.files import replacing
from hpc_train.run.find import refuse_target

_ENDINGS = (".html", ".htm")


class ReportedRun(TypedDict):
    """A run on the page."""

    id: str
    name: str
    path: str
    #: By which it is compared with the runs of its task.
    metric: str | None


class Page(TypedDict):
    """The page that was written."""

    version: int
    file: str
    bytes: int
    #: By which the runs of the first task are compared: ``val/accuracy``; null if nothing was measured yet.
    metric: str | None
    #: The best one of each task, then the second ones, and so on.
    runs: list[ReportedRun]


def report(options: ReportOptions) -> ExitCode:
    """Write the page of the runs to ``output``, which is replaced atomically.

    Raises UsageError for a metric that none of the runs has, and the errors of ``refuse_target``.
    """
    output, metric = options.output, options.metric
    if output.suffix.lower() not in _ENDINGS:
        raise UsageError(f"-o: {output} must end in .html, since it is a page for a browser")
    refuse_target(output)
    collected = collect(find_readable(options.runs), metric)
    if collected.metric is None and metric is not None:
        listed = ", ".join(sorted(map(str, collected.metrics))[:50]) or "none yet"
        where = (
            "none of the rows that were read, which are a part of all"
            if any(run.is_sampled for run in collected.runs)
            else "no run's metrics.jsonl"
        )
        raise UsageError(f"--metric: {metric} is in {where}; there are {listed}")
    page = render(collected).encode()
    with replacing(output) as file:
        file.write(page)
    if options.as_json:
        put_json(_to_json(collected, output, len(page)))
        return ExitCode.DONE
    put(f"{output}  {counted(len(collected.runs), 'run')}  {len(page) / 2**20:.1f} MB")
    return ExitCode.DONE


def _to_json(collected: Collected, output: Path, size_bytes: int) -> Page:
    metrics = {
        run.paths: None if ranking.metric is None else str(ranking.metric)
        for ranking in collected.rankings
        for run in ranking.runs
    }
    runs = [
        ReportedRun(
            id=run.paths.folder.name,
            name=run.experiment,
            path=str(run.paths.folder.absolute()),
            metric=metrics[run.paths],
        )
        for run in collected.runs
    ]
    metric = None if collected.metric is None else str(collected.metric)
    return Page(version=JSON_VERSION, file=str(output), bytes=size_bytes, metric=metric, runs=runs)
