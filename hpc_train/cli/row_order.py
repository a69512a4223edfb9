"""The order of ``status --sort``: by a column, a metric or a swept key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpc_train.cli.run_row import RunRow
from hpc_train.errors import UsageError
from hpc_train.registry import suggestion
from hpc_train.report.changed_keys import short_names

_Key = Callable[[RunRow], Any]
#: ``metric``: the metric that the table shows.
_COLUMNS: dict[str, _Key] = {
    "run": lambda row: row.id,
    "experiment": lambda row: row.name,
    "state": lambda row: row.state,
    "step": lambda row: row.step,
    "attempt": lambda row: row.attempt,
    "elapsed": lambda row: row.elapsed_s,
    "eta": lambda row: row.eta_s,
    "metric": lambda row: None if row.last_metric is None else row.last_metric["value"],
}


def sorted_rows(rows: Sequence[RunRow], key: str) -> list[RunRow]:
    """Return the rows by ascending value; rows without a value come last.

    ``key``: a column, or a swept key, also by its last part (``lr``). Raises UsageError for any other.
    """
    names = short_names(list(dict.fromkeys(name for row in rows for name in row.values)))
    swept = {short: name for name, short in names.items()} | {name: name for name in names}
    value_of = _COLUMNS.get(key.lower())
    if value_of is None and key in swept:
        value_of = partial(_swept_value, swept[key])
    if value_of is None:
        remedy = suggestion(key, [*_COLUMNS, *swept])
        raise UsageError(f"--sort: there is no column or swept key {key!r}; {remedy}")
    return sorted(rows, key=lambda row: _comparable(value_of(row)))


def _comparable(value: Any) -> tuple[int, float, str]:
    """Return a key that orders numbers by value, then texts, then missing values."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return 2, 0.0, ""
    if isinstance(value, int | float):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _swept_value(name: str, row: RunRow) -> Any:
    return row.values.get(name)
