"""A logger's context and rows, and what wandb's own files hold."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_train.loggers.base import LoggerContext
from hpc_train.paths import RunPaths
from tests.experiments import tiny_experiment


def context(
    folder: Path, attempt: int = 1, mode: str = "auto", args: dict[str, Any] | None = None
) -> LoggerContext:
    logging = {"wandb": {"project": "p", "mode": mode, "tags": ["a"]}}
    experiment = tiny_experiment(name="cifar", logging=logging)
    return LoggerContext(experiment, RunPaths(folder), "run1", attempt, "wid123", args or {})


def row(split: str, step: int, attempt: int = 1) -> dict[str, Any]:
    return {"time": 1.0, "attempt": attempt, "split": split, "step": step, "epoch": 0, "loss": step / 2}


def records(path: Path) -> Iterator[Any]:
    """Read wandb's file: LevelDB's log format after a header of 7 bytes, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as proto

    data, position, parts = path.read_bytes(), 7, b""
    while position < len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            record = proto.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def read_run(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    found = list(records(path))
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    return runs[0], rows


def events_in(run: RunPaths, kind: str, folder: Path | None = None) -> dict[str, list[Any]]:
    """Return the events of a kind, ``scalars`` or ``images``, by their tags."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder or run.tensorboard), size_guidance={kind: 0})
    events.Reload()
    return {tag: getattr(events, kind.capitalize())(tag) for tag in events.Tags()[kind]}


def scalars(run: RunPaths, folder: Path | None = None) -> dict[str, list[tuple[int, float]]]:
    """Return the curves as TensorBoard shows them: step and value of each point."""
    curves = events_in(run, "scalars", folder)
    return {tag: [(point.step, point.value) for point in points] for tag, points in curves.items()}


def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of wandb without what it adds."""
    assert [line["_step"] for line in history] == list(range(len(history)))
    return [{key: value for key, value in line.items() if not key.startswith("_")} for line in history]


def without_images(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without the pictures of predictions, which are in no row of metrics.jsonl."""
    return [{key: row[key] for key in row if "/predictions" not in key} for row in rows]


def offline_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in wandb's offline file, without what it adds."""
    return plain(read_run(path)[1])
