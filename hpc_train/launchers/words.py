"""Words for a person, on stderr. That nobody is there to read them any more ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from hpc_train.errors import printable


def say(words: str) -> None:
    """Print words to stderr, or not at all where terminal or pipe are gone."""
    with unheard():
        print(printable(words), file=sys.stderr, flush=True)


@contextmanager
def unheard() -> Iterator[None]:
    """Within, stderr may be gone: a closed terminal, a reader that has left, a full disk."""
    try:
        yield
    except OSError:
        lead_nowhere(sys.stderr)


def lead_nowhere(stream: TextIO) -> None:
    """Let the rest go to /dev/null: Python would fail at exit too, with code 120, as it flushes."""
    with suppress(OSError):  # a stream without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
