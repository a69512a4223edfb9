"""``LogTail``: the end of a log that grows, in constant memory."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_train.console import one_line
from hpc_train.launchers.lookup import launcher_of
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import UnreadableFileError, open_regular

#: Bytes read of an existing log, and of the text added between two calls; the rest is skipped.
TAIL_BYTES = 1 << 16
#: Characters of a line that are shown.
_MAX_LINE = 2000


def log_of(paths: RunPaths) -> Path:
    """Return rank 0's log of the newest attempt; before its ranks start, the job's output, if any."""
    return launcher_of(paths).output(paths) or paths.attempt(max(newest_number(paths), 1)).log(0)


class LogTail:
    """Yields the last lines of a file, then appended lines; a replaced file is read again."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        self.path = path
        self._tail_bytes = tail_bytes
        self._inode = self._offset = 0

    def new_lines(self) -> list[str]:
        """Return the complete lines since the last call, safe for a terminal; none if there is no file."""
        try:
            file = open_regular(self.path)
        except (OSError, UnreadableFileError):
            return []
        with file:
            seen = os.fstat(file.fileno())
            is_new = seen.st_ino != self._inode or seen.st_size < self._offset
            start = max(0 if is_new else self._offset, seen.st_size - self._tail_bytes)
            file.seek(start)
            data = file.read(self._tail_bytes)
        end = data.rfind(b"\n") + 1
        skips_part = start > 0 and (is_new or start > self._offset)
        self._inode, self._offset = seen.st_ino, start + end
        lines = data[:end].decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return [one_line(line[:_MAX_LINE]) for line in lines[1 if skips_part else 0 : -1]]
