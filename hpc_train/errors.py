"""The exception tree and the exit codes that scripts around hpc-train rely on.

Every error derives from here; the command line and the rank's entry turn an exception into its exit code. A
``UserError`` is a mistake that the user can fix: it prints its message and no traceback.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from enum import IntEnum
from functools import cache


class ExitCode(IntEnum):
    """The exit codes of hpc-train's processes. Codes 76 to 82 are used between a rank and its
    launcher only; there each code has one cause.
    """

    DONE = 0
    FAILED = 1
    USAGE = 2
    BAD_FILE = 65
    NO_SCHEDULER = 69
    IO = 74
    TRY_AGAIN = 75
    #: This rank ended because another one did.
    PEER_LOST = 76
    #: The run diverged, and would again: it is not requeued.
    NO_RETRY = 77
    #: This rank's node failed its check.
    BAD_NODE = 78
    #: This rank made no progress; its watchdog ended it.
    HUNG = 79
    #: Its loader process was killed: the first time it is retried, the second time the file must change.
    WORKER_LOST = 80
    #: A limit, a variable or a version of this environment does not permit the run: it is not requeued.
    ENVIRONMENT = 81
    #: This rank and another compute different numbers, and which of them is wrong is unknown.
    UNEQUAL = 82
    INTERRUPTED = 130


class HpcTrainError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is the exit code of the process."""

    exit_code = ExitCode.FAILED


class UserError(HpcTrainError):
    """An error that the user can fix; shown without a traceback."""


class UsageError(UserError):
    """An invalid command line: an unknown run, options that exclude each other."""

    exit_code = ExitCode.USAGE


class BadFileError(UserError):
    """An experiment file, or something that it names, is wrong. ``problems`` has every line to print."""

    exit_code = ExitCode.BAD_FILE

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class StorageError(UserError):
    """A disk error: full, over quota, read-only, or it returned other bytes than were written."""

    exit_code = ExitCode.IO


class TransientStorageError(HpcTrainError):
    """A disk error that may be temporary or may not affect another node: the run is requeued."""


class NoSchedulerError(UserError):
    """The scheduler does not answer."""

    exit_code = ExitCode.NO_SCHEDULER


class TryAgainError(UserError):
    """Stopped early with its progress saved; running it again continues."""

    exit_code = ExitCode.TRY_AGAIN


class WaitTimeoutError(UserError):
    """A run has not ended within the time that ``Run.wait`` was given."""


class EnvironmentRefusesError(UserError):
    """A limit, or an installed package's version, does not permit the run; it has to be changed first."""

    exit_code = ExitCode.ENVIRONMENT


#: Remedy for non-finite values.
FINITE_REMEDY = "lower the learning rate, clip gradients, or, under fp16, use bf16 or fp32"


class NonFiniteError(HpcTrainError):
    """A loss, a gradient or a weight became NaN or infinite; training again would repeat it.

    ``step``: the step to replay; None if a replay would not show the cause.
    """

    exit_code = ExitCode.NO_RETRY

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class BadNodeError(HpcTrainError):
    """This rank's node does not meet a requirement of training; another node may."""

    exit_code = ExitCode.BAD_NODE


class UnequalResultsError(HpcTrainError):
    """This rank and a rank of another node compute different numbers, and either may be wrong."""

    exit_code = ExitCode.UNEQUAL


class NetworkFaultError(UserError):
    """This rank could not connect to the others, over the interface that the message names."""


class PeerLostError(HpcTrainError):
    """Another rank ended; this one can't continue, and its own error does not name the cause."""

    exit_code = ExitCode.PEER_LOST


#: All but printable ASCII, line breaks and tabs: looked up one by one.
_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")


def printable(text: str) -> str:
    """Return ``text`` with control and format characters shown as escapes, line breaks and tabs kept.

    For anything from a file or a log that is printed to a terminal: escape sequences and right-to-left
    overrides must not act there.
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNUSUAL.sub(
        lambda match: _shown(match.group()), text.encode("utf-8", "backslashreplace").decode()
    )


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``, ``3 batches``."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(names: Sequence[str], most: int) -> str:
    """Return ``a, b, c``; for more than ``most`` names, the first ones and ``…``."""
    return ", ".join([*names[:most], *(["…"] if len(names) > most else [])])


def shortened(text: str, length: int = 60) -> str:
    """Return ``text``, cut to at most ``length`` characters including ``…``."""
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"


@cache
def _shown(char: str) -> str:
    return char.encode("unicode_escape").decode() if unicodedata.category(char)[0] == "C" else char
