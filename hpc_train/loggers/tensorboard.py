"""The TensorBoard logger: event files in the run folder's ``tensorboard/``, shown while the run trains.

The curves equal ``metrics.jsonl``: where rows are withdrawn (a rollback, a resume behind the last row), the
next event file tells TensorBoard to drop all events from that step on (its *purge step*), and rows that a
killed attempt had not flushed are written again. ``tensorboard/flushed.json`` has the step up to which the
event files are complete. Images of evaluations are withdrawn and written again together with their rows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.run.files import read_json, write_json
from hpc_train.run.metric_rows import iter_rows

#: What describes a row rather than being measured.
_NOT_METRICS = {"time", "attempt", "split", "step", "epoch"}
#: Events that may wait for the thread that writes them: a slow disk must not delay training.
_MAX_QUEUE = 100_000
#: What a PNG file begins with, before width and height.
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


class TensorboardLogger:
    """Writes each number of a row as the scalar ``<split>/<metric>``, with the row's step and time."""

    def __init__(self, context: LoggerContext) -> None:
        self._paths = context.paths
        self._complete = _flushed_step(context)
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        """Write a row; a background thread does it."""
        assert self._writer is not None, "rows_committed comes first"
        for name, value in row.items():
            if name not in _NOT_METRICS and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"], row["time"])

    def log_images(self, row: Row, images: Mapping[str, Path]) -> None:
        """Write the images of an evaluation as ``val/<name>``, without decoding them."""
        assert self._writer is not None, "rows_committed comes first"
        events: Any = self._writer.file_writer  # opened by the constructor
        for name, path in images.items():
            content = path.read_bytes()
            if not content.startswith(_PNG) or len(content) < len(_PNG) + 8:
                continue  # damaged
            width, height = struct.unpack_from(">2I", content, len(_PNG))
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
            summary = Summary(value=[Summary.Value(tag=f"{row['split']}/{name}", image=image)])
            events.add_summary(summary, row["step"], row["time"])

    def rows_withdrawn(self, after_step: int) -> None:
        """Continue in another event file, which drops the rows past ``after_step``."""
        self._complete = min(self._complete, after_step)
        self._close()

    def rows_committed(self, up_to_step: int) -> None:
        """Put the rows up to ``up_to_step`` into the file system. The first call begins the event file."""
        if self._writer is None:
            self._open()
        assert self._writer is not None
        self._writer.flush()
        self._complete = max(self._complete, up_to_step)
        write_json(self._paths.tensorboard_flushed, {"version": 1, "step": self._complete})

    def close(self, state: str) -> None:
        """Write what waits, and close the event file."""
        self._close()

    def _open(self) -> None:
        """Begin an event file after the rows that are complete; write those that an earlier one may lack."""
        self._writer = SummaryWriter(
            str(self._paths.tensorboard), purge_step=self._complete + 1, max_queue=_MAX_QUEUE
        )
        for row in iter_rows(self._paths.metrics):
            if row["step"] > self._complete:
                self.log(row)
                if row["split"] == "val":
                    self.log_images(row, self._paths.evaluation_images(row["step"]))

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _flushed_step(context: LoggerContext) -> int:
    """Return the step up to which the event files are complete, -1 for none."""
    step = (read_json(context.paths.tensorboard_flushed) or {}).get("step")
    return step if type(step) is int else -1
