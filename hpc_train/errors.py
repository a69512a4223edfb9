"""The exception tree and the exit codes that scripts around hpc-train rely on.

Everything raises from here; the command line and the rank's entry turn an exception into its exit code.
A ``UserError`` is a mistake that the user can mend: it prints its message and no traceback.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from enum import IntEnum
from functools import cache


class ExitCode(IntEnum):
    """What a process of hpc-train ends with. Those of 76 to 80 are told by a rank to its launcher only."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    BAD_FILE = 65
    NO_SLURM = 69
    IO = 74
    TRY_AGAIN = 75
    #: This rank ended because another one did.
    PEER_LOST = 76
    #: The run failed, and would again: it is not requeued.
    NO_RETRY = 77
    #: This rank's node failed its check.
    BAD_NODE = 78
    #: This rank made no progress any more; its watchdog ended it.
    HUNG = 79
    #: Its loader process was killed: once it may go better, twice it is the file's to change.
    WORKER_LOST = 80
    INTERRUPTED = 130


class HpcTrainError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the process ends with."""

    exit_code = ExitCode.FAILED


class UserError(HpcTrainError):
    """Something the user can mend; shown without a traceback."""


class UsageError(UserError):
    """A command line that can't be taken: an unknown run, options that exclude each other."""

    exit_code = ExitCode.USAGE


class BadFileError(UserError):
    """An experiment file, or what it names, is wrong. ``problems`` holds every line to print."""

    exit_code = ExitCode.BAD_FILE

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class StorageError(UserError):
    """The disk refused: full, over quota, read-only, or it returned other bytes than were written."""

    exit_code = ExitCode.IO


class TransientStorageError(HpcTrainError):
    """The disk refused in a way that may pass or that another node may not see: the run is requeued."""


class NoSlurmError(UserError):
    """Slurm does not answer."""

    exit_code = ExitCode.NO_SLURM


class TryAgainError(UserError):
    """Stopped early with its progress saved; running it again goes on."""

    exit_code = ExitCode.TRY_AGAIN


class NonFiniteError(HpcTrainError):
    """A loss, a gradient or a weight became NaN or infinite; training again would lead there again."""

    exit_code = ExitCode.NO_RETRY


class BadNodeError(HpcTrainError):
    """The node that this rank is on can't do what training needs; another may."""

    exit_code = ExitCode.BAD_NODE


class PeerLostError(HpcTrainError):
    """Another rank ended; this one can't go on and its own error says nothing of the cause."""

    exit_code = ExitCode.PEER_LOST


#: All but printable ASCII, line breaks and tabs: looked up one by one.
_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")


def printable(text: str) -> str:
    """Return ``text`` with control and format characters shown as escapes, line breaks and tabs kept.

    For anything from a file or a log that goes to a terminal: escape sequences and right-to-left
    overrides must not act there.
    """
    return _UNUSUAL.sub(
        lambda match: _shown(match.group()), text.encode("utf-8", "backslashreplace").decode()
    )


@cache
def _shown(char: str) -> str:
    return char.encode("unicode_escape").decode() if unicodedata.category(char)[0] == "C" else char
