"""Tracks the rows of ``metrics.jsonl`` that a service has, so that its history equals the file.

The history of wandb and of MLflow is append-only. So a row is sent once a checkpoint contains its step,
because no rollback or resume withdraws it after that. A resumed run continues after the last row that the
service has. If rows that were sent are withdrawn nevertheless (the checkpoint that contained them is
damaged), the whole file goes to another run of the service, ``<id>-2``: the next *segment*.

The record, ``sent.json``, is written before rows are sent, so that it names at least those that the service
may have. wandb's offline files have a separate record, since an offline attempt may write them while ``sync``
sends; the next process reads both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_train.run.files import UnreadableFileError, open_regular, read_json, write_json
from hpc_train.run.metric_rows import Row, parse_row

#: Rows sent between two writes of the record (assumed).
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Sent:
    """The rows that the service may have: ``rows`` of them, the ``last`` one ending at byte ``end``."""

    segment: int
    rows: int
    end: int
    last: str

    @classmethod
    def read(cls, path: Path) -> Sent | None:
        """Return the record; None if it is missing or damaged."""
        data: dict[str, Any] = read_json(path) or {}
        sent: dict[str, Any] = {name: data.get(name) for name in ("segment", "rows", "end", "last")}
        is_valid = isinstance(sent.pop("last"), str) and all(
            type(number) is int and number > 0 for number in sent.values()
        )
        return cls(**sent, last=data["last"]) if is_valid else None

    def write(self, path: Path) -> None:
        """Replace the record atomically; its folder is made if it is missing."""
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"version": 1} | asdict(self))


class SentRows:
    """The rows of a run folder's ``metrics.jsonl`` to send.

    ``record`` is written by one process at a time; ``others`` are read only, and the farthest record applies.
    """

    def __init__(self, metrics: Path, record: Path, *others: Path) -> None:
        self._metrics = metrics
        self._record = record
        records = [sent for path in (record, *others) if (sent := Sent.read(path)) is not None]
        self._sent = max(records, key=lambda sent: (sent.segment, sent.rows), default=None)
        self._segment = 1 if self._sent is None else self._sent.segment
        self._rows = self._end = 0
        if self.has_withdrawn():
            self.begin_segment()

    @property
    def num_may_have(self) -> int:
        """Number of rows, from the first one on, that the service may have."""
        return 0 if self._sent is None else self._sent.rows

    @property
    def num_read(self) -> int:
        """Number of rows, from the first one on, that were skipped or yielded."""
        return self._rows

    @property
    def segment(self) -> int:
        """Number of the service's run that receives the rows."""
        return self._segment

    @property
    def suffix(self) -> str:
        """The suffix of that run's id and name."""
        return "" if self._segment == 1 else f"-{self._segment}"

    def has_withdrawn(self) -> bool:
        """Return True if rows that the service may have are no longer in the file."""
        if self._sent is None or self._sent.rows == 0:
            return False
        last = self._sent.last.encode()
        try:
            with open_regular(self._metrics) as file:
                file.seek(max(0, self._sent.end - len(last)))
                return file.read(len(last)) != last
        except (FileNotFoundError, UnreadableFileError):
            return True

    def begin_segment(self) -> None:
        """Switch to another run of the service, which receives the file from its first row."""
        self._segment += 1
        self._sent = None
        self._rows = self._end = 0

    def skip(self, count: int) -> bool:
        """Continue after the first ``count`` rows; False if they can't be rows that were sent."""
        if count == 0:
            return True
        if self._sent is None or count > self._sent.rows:
            return False
        return sum(1 for _ in islice(self._read(), count)) == count

    def rows_up_to(self, step: int) -> Iterator[tuple[int, Row]]:
        """Yield (number, row) of the rows up to ``step`` that were not yielded yet."""
        for batch in self.batches_up_to(step):
            yield from batch

    def batches_up_to(self, step: int) -> Iterator[list[tuple[int, Row]]]:
        """Yield ``rows_up_to`` in the batches that are recorded together."""
        number = self._rows
        while batch := list(islice(self._read(step), _BATCH_ROWS)):
            self._note(batch[-1][0])
            yield [(number + index, row) for index, (_, row) in enumerate(batch)]
            number += len(batch)

    def _note(self, last: bytes) -> None:
        """Record that the service may have all rows up to the last row read."""
        if self._sent is None or self._rows > self._sent.rows:
            self._sent = Sent(self._segment, self._rows, self._end, last.decode())
            self._sent.write(self._record)

    def _read(self, step: int | None = None) -> Iterator[tuple[bytes, Row]]:
        """Yield the next (line, row), up to ``step``, and advance past each."""
        try:
            file = open_regular(self._metrics)
        except (FileNotFoundError, UnreadableFileError):
            return
        with file:
            file.seek(self._end)
            for line in file:
                row = parse_row(line)
                if not line.endswith(b"\n") or (row is not None and step is not None and row["step"] > step):
                    return
                self._end += len(line)
                if row is not None:
                    self._rows += 1
                    yield line, row
