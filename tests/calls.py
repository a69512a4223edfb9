"""Work counted rather than timed: what a test asserts of a cost must hold on a slow machine too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


def count_calls(function: Callable[[], object]) -> int:
    """Return how many functions, Python's and C's, ``function`` calls in this thread.

    It runs twice; the first time, which fills caches, is not counted.
    """
    function()
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


class Work:
    """What a function asks of the operating system, whatever thread does it."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.programs: list[str] = []
        self.syncs = 0


def work_of(function: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Work:
    """Run ``function``; return the files that it opened, the programs that it started, and its fsyncs."""
    work = Work()
    fsync = os.fsync

    def count_sync(descriptor: int) -> None:
        work.syncs += 1
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", count_sync)
        _listeners.append(work)
        if len(_listeners) == 1:
            sys.addaudithook(_note)
        try:
            function()
        finally:
            _listeners[-1] = None
    return work


#: An audit hook can't be removed: it stays for the one that listens, the last one.
_listeners: list[Work | None] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    work = _listeners[-1]
    if work is None:
        return
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        work.opened.append(os.fspath(arguments[0]))
    elif event == "subprocess.Popen":
        work.programs.append(str(arguments[0]))
