"""Standard output and error of a rank, its log: temporary file server errors never end a rank."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from hpc_train.run.storage_errors import TRANSIENT, retried


def install() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``; call it before anything keeps a reference to them."""
    sys.stdout, sys.stderr = (tolerant(stream) for stream in (sys.stdout, sys.stderr))


def tolerant(stream: Any) -> Any:
    """Return a text stream to the same file whose writes survive temporary errors of a file server."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # closed by the parent process, or not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LogFile(descriptor)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _LogFile(io.RawIOBase):
    """Retries a failed write, and drops it if the error persists; other errors are raised."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        text = bytes(data)
        try:
            if not self._dropped:
                return retried(lambda: os.write(self._descriptor, text), Path("log"), tells=False)
            # The first failure has been retried with pauses; training must not wait for every line.
            os.write(self._descriptor, b"(%d bytes of this log could not be written)\n" % self._dropped)
            self._dropped = 0
            return os.write(self._descriptor, text)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            self._dropped += len(text)
            return len(text)
