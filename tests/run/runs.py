"""A small experiment and its run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.schema import Experiment
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record, write_record
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json, write_json
from tests.experiments import tiny_experiment


def small_experiment(**changes: Any) -> Experiment:
    optimization = {"steps": 10, "global_batch_size": 8} | changes.pop("optimization", {})
    return tiny_experiment(optimization, **({"name": "small"} | changes))


def small_run(folder: Path, run_id: str = "abc", /, **changes: Any) -> RunPaths:
    """Create a run under ``folder``."""
    paths = RunPaths(folder / "small" / run_id)
    assert create_run(paths, small_experiment(**changes), run_id, 10)
    return paths


def record_of(attempt: AttemptPaths) -> AttemptRecord:
    """Return the record of an attempt that has one."""
    record = read_record(attempt)
    assert record is not None
    return record


def change_record(attempt: AttemptPaths, **changes: Any) -> None:
    write_record(attempt, replace(record_of(attempt), **changes))


def change_facts(paths: RunPaths, **facts: Any) -> None:
    """Change facts of run.json."""
    write_json(paths.run, (read_json(paths.run) or {}) | facts)


def write_rows(paths: RunPaths, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of metrics.jsonl."""
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
