"""How a rank ended, for the process that judges the attempt: ``rank-<r>.exit`` and ``rank-<r>.error``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.run.files import UnreadableFileError, read_text, write_text

#: An exit code and a node's name.
_MAX_BYTES = 1000


@dataclass(frozen=True)
class RankEnd:
    """A rank's exit code and its node, if known."""

    code: int
    node: str | None = None


def tell_end(attempt: AttemptPaths, rank: int, code: int, node: str | None = None) -> None:
    """Write the exit code for the process that judges the attempt from another node. Never raises."""
    if code == ExitCode.DONE:
        return
    with suppress(OSError):
        write_text(attempt.exit(rank), f"{code} {node or ''}".rstrip() + "\n")


def tell_error(attempt: AttemptPaths, rank: int, text: str) -> None:
    """Write the rank's error. Raises OSError for errors of the disk."""
    write_text(attempt.error(rank), text.rstrip() + "\n")


def rank_ends(attempt: AttemptPaths) -> dict[int, RankEnd]:
    """Return the exit code and node by rank; a rank killed by a signal has none."""
    ends = {}
    for rank, path in attempt.files_of_ranks(".exit").items():
        code, _, node = _read(path).partition(" ")
        if code.isdecimal() and len(code) <= 3:
            ends[rank] = RankEnd(int(code), node.strip() or None)
    return ends


def exit_codes(attempt: AttemptPaths) -> dict[int, int]:
    """Return the exit codes by rank."""
    return {rank: end.code for rank, end in rank_ends(attempt).items()}


def _read(path: Path) -> str:
    with suppress(FileNotFoundError, UnreadableFileError):
        return read_text(path, _MAX_BYTES, errors="replace").strip()
    return ""
