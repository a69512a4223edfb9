"""The TensorBoard logger: event files in the run folder's ``tensorboard/``, shown while the run trains.

The curves equal ``metrics.jsonl``: if rows are withdrawn (a rollback, a resume before the last row), the next
event file makes TensorBoard drop all events from that step on (its *purge step*), and rows that a killed
attempt had not flushed are written again. ``tensorboard/flushed.json`` has the step up to which the event
files are complete. Images of evaluations are withdrawn and written again together with their rows. ``sync``
writes event files by the same class.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from typing_extensions import override

from hpc_train.loggers.base import LoggerContext, Row
from hpc_train.loggers.sending import BusyError, Mirror, locked
from hpc_train.paths import RunPaths
from hpc_train.run.files import read_json, write_json
from hpc_train.run.metric_rows import iter_rows, numbers, time_of

#: Events that may wait for the thread that writes them: a slow disk must not delay training.
_MAX_QUEUE = 100_000
#: The first bytes of a PNG file, before width and height.
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


class EventFiles:
    """A run's event files in ``folder``: each number of a row is the scalar ``<split>/<metric>``, with the
    row's step and time.
    """

    def __init__(self, paths: RunPaths, folder: Path) -> None:
        self._paths = paths
        self._folder = folder
        self._record = folder / paths.tensorboard_flushed.name
        self._writer: SummaryWriter | None = None
        step = (read_json(self._record) or {}).get("step")
        has_files = any(folder.glob("events.out.tfevents.*"))
        #: All rows up to this step are complete; -1 without rows.
        self.complete_step = step if type(step) is int and has_files else -1

    def log(self, row: Row) -> None:
        """Write a row; a background thread does it. One without a time, of a damaged file, is skipped."""
        assert self._writer is not None, "begin comes first"
        if (time_s := time_of(row)) is not None:
            for name, value in numbers(row).items():
                self._writer.add_scalar(f"{row['split']}/{name}", value, row["step"], time_s)

    def log_images(self, row: Row, images: Mapping[str, Path]) -> None:
        """Write the images of an evaluation as ``val/<name>``, without decoding them."""
        assert self._writer is not None, "begin comes first"
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
        """Close the event file; the next one drops the rows past ``after_step``."""
        self.complete_step = min(self.complete_step, after_step)
        EventFiles.close(self)  # a logger keeps its lock

    def begin(self, last_step: int | None = None) -> int:
        """Begin an event file, unless one is open, and write the rows that earlier files may lack to it.

        ``last_step``: last step to write. Returns the number of rows written.
        """
        if self._writer is not None:
            return 0
        self._writer = SummaryWriter(
            str(self._folder), purge_step=self.complete_step + 1, max_queue=_MAX_QUEUE
        )
        num_rows = 0
        for row in iter_rows(self._paths.metrics):
            if row["step"] > self.complete_step and (last_step is None or row["step"] <= last_step):
                self.log(row)
                num_rows += time_of(row) is not None
                if row["split"] == "val" and time_of(row) is not None:
                    self.log_images(row, self._paths.evaluation_images(row["step"]))
        return num_rows

    def complete(self, step: int) -> None:
        """Flush the event file, and record that all rows up to ``step`` are in it."""
        assert self._writer is not None, "begin comes first"
        self._writer.flush()
        self.complete_step = max(self.complete_step, step)
        write_json(self._record, {"version": 1, "step": self.complete_step})

    def close(self, state: str = "") -> None:
        """Write the waiting rows, and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class TensorboardLogger(EventFiles):
    """Shows the rows while the run trains, including rows that may still be withdrawn."""

    def __init__(self, context: LoggerContext) -> None:
        super().__init__(context.paths, context.paths.tensorboard)
        self._lock: IO[bytes] | None = None
        with suppress(BusyError):  # `sync` writes rows that are final, and is about to end
            self._lock = locked(context.paths.tensorboard_lock, limit_s=0, must=True)

    def rows_committed(self, up_to_step: int) -> None:
        """Put the rows up to ``up_to_step`` into the file system. The first call begins the event file."""
        self.begin()
        self.complete(up_to_step)

    @override
    def close(self, state: str = "") -> None:
        super().close(state)
        if self._lock is not None:
            self._lock.close()


class EventFilesMirror(Mirror):
    """Event files that ``sync`` writes."""

    def begin(self) -> None:
        """Withdraw rows that the files have and ``metrics.jsonl`` has no longer."""
        folder = Path(self._settings["event_files"])
        folder.mkdir(parents=True, exist_ok=True)
        self._take_lock(folder / self._paths.tensorboard_lock.name)
        self._files = EventFiles(self._paths, folder)
        self.target = str(folder)
        if self._settings["withdraw_to"] is not None:
            self._files.rows_withdrawn(self._settings["withdraw_to"])

    def send(self, committed_step: int) -> None:
        """Write the rows up to this step that the files lack."""
        if self._files.complete_step < committed_step:
            self.num_sent += self._files.begin(committed_step)
            self._files.complete(committed_step)

    def finish(self, exit_code: int | None) -> None:
        """Close the event file."""
        self._files.close()

    def _num_at_tracker(self) -> tuple[int, bool]:
        step = self._files.complete_step
        return sum(1 for row in iter_rows(self._paths.metrics) if row["step"] <= step), True
