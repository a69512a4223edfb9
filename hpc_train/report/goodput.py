"""The share of a run's allocated time that was spent in steps that count: ``goodput`` of ``status``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hpc_train.report.metrics_reader import Row, number, rows_in

if TYPE_CHECKING:
    from hpc_train.paths import RunPaths
    from hpc_train.run.run_status import RunStatus


def goodput(paths: RunPaths, now: RunStatus, elapsed_s: float | None) -> float | None:
    """Return useful seconds divided by ``elapsed_s``, those of all attempts together; None if unknown.

    Reads all of ``metrics.jsonl``, which contains each step once, whatever was done twice.
    """
    try:
        useful_s = step_seconds(rows_in(paths.metrics), counted_steps(paths, now))
    except OSError:  # the other facts of the run are shown all the same
        return None
    if useful_s is None or not elapsed_s:
        return None
    return min(useful_s / elapsed_s, 1.0)


def counted_steps(paths: RunPaths, now: RunStatus) -> int:
    """Return how many steps count: of a run that has stopped early, those that a checkpoint contains."""
    if now.state in ("running", "completed"):
        return now.step
    saved = paths.checkpoint_folders()
    return saved[-1].step if saved else 0


def waited_seconds(row: Row) -> float | None:
    """Return the seconds per step that a row's steps waited for data."""
    return None if number(row.get("step_s")) is None else number(row.get("data_wait_s")) or 0.0


def useful_seconds(row: Row) -> float | None:
    """Return the seconds per step without that wait."""
    step_s, wait_s = number(row.get("step_s")), number(row.get("data_wait_s"))
    return None if step_s is None else max(0.0, step_s - (wait_s or 0.0))


def step_seconds(
    rows: Iterable[Row], num_steps: int, seconds_of: Callable[[Row], float | None] = useful_seconds
) -> float | None:
    """Return the seconds of the first ``num_steps`` steps without waits for data; None if no row has a time.

    An attempt's first row has no time: its steps count as those of the next row that has one, and steps
    after the last row as those of that row. So starting and compiling do not count.
    """
    seconds, done, untimed = 0.0, 0, 0
    per_step: float | None = None
    for row in rows:
        step, found = row.get("step"), seconds_of(row)
        if row.get("split") != "train" or type(step) is not int or step <= done:
            continue
        untimed += min(step, num_steps) - min(done, num_steps)
        done = step
        if found is not None:
            per_step = found
            seconds, untimed = seconds + untimed * per_step, 0
    if per_step is None:
        return None
    return seconds + (untimed + max(0, num_steps - done)) * per_step
