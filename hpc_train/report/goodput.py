"""The share of a run's allocated time that was spent in steps that count: ``goodput`` of ``status``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from hpc_train.report.metrics_reader import Row, number, rows_in

if TYPE_CHECKING:
    from hpc_train.paths import RunPaths
    from hpc_train.run.run_status import RunStatus


class StepSeconds(NamedTuple):
    """The seconds of steps, divided into waits for data and the rest."""

    useful: float
    waited: float


def goodput(
    paths: RunPaths, now: RunStatus, elapsed_s: float | None, rows: Iterable[Row] | None = None
) -> float | None:
    """Return useful seconds divided by ``elapsed_s``, the seconds of all attempts together; None if unknown.

    ``rows``: all of ``metrics.jsonl``, which is read if omitted. It contains each step once, even if a step
    was repeated.
    """
    if not elapsed_s:
        return None
    try:
        found = step_seconds(rows_in(paths.metrics) if rows is None else rows, counted_steps(paths, now))
    except OSError:  # the other facts of the run are still shown
        return None
    return None if found is None else min(found.useful / elapsed_s, 1.0)


def counted_steps(paths: RunPaths, now: RunStatus) -> int:
    """Return the number of useful steps: for a run that has stopped early, the steps in a checkpoint."""
    if now.state in ("running", "completed"):
        return now.step
    saved = paths.checkpoint_folders()
    return saved[-1].step if saved else 0


def step_seconds(rows: Iterable[Row], num_steps: int) -> StepSeconds | None:
    """Return the seconds of the first ``num_steps`` steps; None if no row has a time.

    An attempt's first row has no time: its steps are assumed to take as long as those of the next row that
    has one, and steps after the last row as long as those of that row. So starting and compiling do not
    count.
    """
    useful = waited = 0.0
    step_s: float | None = None
    wait_s = 0.0
    done = untimed = 0
    for row in rows:
        step = row.get("step")
        if row.get("split") != "train" or type(step) is not int or step <= done:
            continue
        untimed += min(step, num_steps) - min(done, num_steps)
        done = step
        if (found := number(row.get("step_s"))) is not None:
            step_s, wait_s = found, number(row.get("data_wait_s")) or 0.0
            useful, waited = useful + untimed * max(0.0, step_s - wait_s), waited + untimed * wait_s
            untimed = 0
    if step_s is None:
        return None
    untimed += max(0, num_steps - done)
    return StepSeconds(useful + untimed * max(0.0, step_s - wait_s), waited + untimed * wait_s)
