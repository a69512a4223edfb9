"""Shortens a rank's traceback for the terminal to the frames of the user's own code; the log has the rest."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

MAX_LINES = 14
_MAX_FRAMES = 4
_MAX_MESSAGE = 3
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+')
#: Python's replacement for the repeated frames of a recursion.
_REPEATED = re.compile(r"^  \[Previous line repeated \d+ more times?\]$")
#: Installed packages, Python's own modules, compiled strings, and a run's copy of this package.
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^<|/package/hpc_train/")
#: A run's copy of the user's work tree.
_SNAPSHOT_TREE = re.compile(r'"[^"]*/\.code/[^/"]+/tree/')
_PACKAGE = f"{Path(__file__).parents[1]}/"


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
    return (
        f"{Path(user_frames[-1].filename).name}:{user_frames[-1].lineno} in {user_frames[-1].name}"
        if user_frames
        else None
    )


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
