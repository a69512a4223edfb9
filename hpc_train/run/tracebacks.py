"""An error as users see it: a traceback shortened to the frames of their own code, or one line.

One line is enough for an error whose cause is the environment of the process: reached limits, variables,
refused system calls.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.errors import shortened
from hpc_train.run.resource_limits import reached
from hpc_train.run.storage_errors import place_of

MAX_LINES = 14
_MAX_FRAMES = 4
_MAX_MESSAGE = 3
_BEGIN = "Traceback (most recent call last):"
_HEAD = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
#: An error of a script itself, which Python prints without a traceback.
_SYNTAX_ERROR = re.compile(r'^  File "[^"\n]+", line \d+\n(?: .*\n)*\w+Error: .*', re.MULTILINE)
#: Before the lines of a rank: of torch's excepthook, or of torchrun.
RANK_PREFIX = re.compile(r"^(?:\[\w+\]: ?)+", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+')
#: Python's replacement for the repeated frames of a recursion.
_REPEATED = re.compile(r"^  \[Previous line repeated \d+ more times?\]$")
#: Installed packages, Python's own modules, compiled strings, and a run's copy of this package.
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<|/package/hpc_train/")
#: A run's copy of the user's work tree, and the working folder of a program.
_SNAPSHOT_TREE = re.compile(r'"[^"]*/(?:\.code/[^/"]+/tree|[0-9a-f]{10}/work)/')
_PACKAGE = f"{Path(__file__).parents[1]}/"
#: Prefixes of the variables that libraries read on import.
_READ_BY_LIBRARIES = ("TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCHINDUCTOR_", "TRITON_")


@dataclass
class _Part:
    """One traceback of a chain: its frames, each with its source lines, and its final message."""

    frames: list[list[str]] = field(default_factory=list)
    message: list[str] = field(default_factory=list)


def shortened_traceback(text: str, log: Path | None = None) -> str:
    """Return ``text`` in at most ``MAX_LINES`` lines; a longer one is cut and refers to ``log`` for the rest.

    Keeps the frames of the user's code in the last traceback of the chain that has any; without any, the
    innermost frames. Files of a run's snapshot are named by their path in the work tree.
    """
    lines = text.splitlines()
    if len(lines) <= MAX_LINES:
        return "\n".join(lines)
    see_log = [] if log is None else [f"the rest is in {log}"]
    parts = _parts(lines)
    if not parts:
        return "\n".join([*lines[: MAX_LINES - 1], *see_log])
    if not parts[-1].frames:
        return "\n".join([*lines[1 - MAX_LINES :], *see_log])
    user_frames = next(
        (frames for part in reversed(parts) if (frames := list(filter(_is_own, part.frames)))), None
    )
    head = "Traceback of your code (most recent call last):" if user_frames else _BEGIN
    frames = (user_frames or parts[-1].frames)[-_MAX_FRAMES:]
    shown = [_SNAPSHOT_TREE.sub('"', line) for frame in frames for line in frame[:2]]
    message = parts[-1].message
    cut = message[:_MAX_MESSAGE] + (["…"] if len(message) > _MAX_MESSAGE else [])
    return "\n".join([head, *shown, *cut, *see_log])


def printed_error(log: str, folder: Path, is_follower: Callable[[str], bool]) -> str | None:
    """Return the last traceback of a script in ``folder``, or its syntax error, in the end of a log.

    ``log``: without ``RANK_PREFIX``. ``is_follower``: whether an error has its cause in another rank; its
    traceback is returned only if there is no other one. torchrun and accelerate print tracebacks of their own
    after those of their ranks.
    """
    own = f"/{folder.parent.name}/{folder.name}/"
    if begins := [match.start() for match in _HEAD.finditer(log)]:
        ends = [*begins[1:], len(log)]
        tracebacks = [log[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return max(tracebacks[::-1], key=lambda part: 2 * (own in part) - is_follower(part))
    syntax_error = _SYNTAX_ERROR.search(log)
    return None if syntax_error is None else syntax_error[0]


def users_traceback(error: BaseException) -> str | None:
    """Return the shortened traceback of an error that passed through the user's code; None for any other.

    Other errors are those of the disk, of an installed package, or our own, and need all frames.
    """
    text = "".join(traceback.format_exception(error))
    is_users = any(_is_own(frame) for part in _parts(text.splitlines()) for frame in part.frames)
    return shortened_traceback(text) if is_users else None


def users_frame(error: BaseException) -> str | None:
    """Return the line of the user's code that raised it: ``model.py:12 in forward``; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _is_foreign(frame.filename)]
    if not user_frames:
        return None
    last = user_frames[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def _parts(lines: list[str]) -> list[_Part]:
    parts: list[_Part] = []
    for line in lines:
        if line.strip() == _BEGIN:
            parts.append(_Part())
        elif not parts or _REPEATED.match(line):
            continue
        elif _FRAME.match(line) and not parts[-1].message:
            parts[-1].frames.append([line])
        elif parts[-1].frames and line.startswith("    ") and not parts[-1].message:
            parts[-1].frames[-1].append(line)
        elif line.strip():
            parts[-1].message.append(line)
    return parts


def _is_own(frame: list[str]) -> bool:
    match = _FRAME.match(frame[0])
    return match is not None and not _is_foreign(match["file"])


def _is_foreign(file: str) -> bool:
    return _FOREIGN.search(file) is not None or _PACKAGE in file


def refusal(error: BaseException) -> str | None:
    """Return ``error`` in one line that names its cause in this environment; None if it is elsewhere."""
    resource, limits = reached(error)
    if limits and resource is not None:
        return f"{_one_line(resource)}{limits}; raised at {place_of(resource)}"
    if name := _variable(error):
        return f"{name}={os.environ[name]}: {_one_line(error)}; correct the variable, or unset it"
    return None


def _one_line(error: BaseException) -> str:
    text = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    return shortened(text, 300)


def _variable(error: BaseException) -> str | None:
    for name, value in os.environ.items():
        if not value or not name.startswith(_READ_BY_LIBRARIES):
            continue
        if isinstance(error, ValueError) and (name in str(error) or f"settings: {value}," in str(error)):
            return name
        if isinstance(error, OSError) and isinstance(error.filename, str):
            path = Path(error.filename)
            if path == Path(value) or (value.startswith("/") and path.is_relative_to(value)):
                return name
    return None
