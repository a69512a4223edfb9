"""What this rank is doing, and since when: told by the loop, looked at by ``runtime.watchdog``.

Ranks are compared by how often they came further, so **every rank must call** ``at`` **with the same work in
the same order**: what one rank alone does (rank 0 writes a row) is none of the loop's work and is not told.
Waits for data are notes, which count for nothing: the rank that waits says so, the others do not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

PHASES = (
    "joining", "checking", "building", "loading", "first step", "training", "waiting for data", "evaluating",
    "saving", "leaving",
)  # fmt: skip
#: What a rank waits for on its own, in the midst of what all do.
_NOTES = frozenset({"waiting for data"})
#: One rank's disk may be slow, and the others wait for it.
_LONG = frozenset({"saving"})


class Standing(NamedTuple):
    """Where a rank stands. Never changed, so that another thread reads it whole without a lock."""

    #: How often it came further; equal work gives equal numbers on all ranks.
    times: int
    phase: str
    step: int | None
    #: Distinguishes pieces of a phase: a batch of an evaluation.
    part: int
    #: What it waits for, if for anything.
    note: str | None
    #: Whether it has waited since it last came further.
    has_waited: bool
    #: ``time.monotonic()`` when it last came further.
    since: float
    #: Whether this phase may compile, read cold data, or wait for a slow disk.
    may_take_long: bool

    def __str__(self) -> str:
        doing = self.phase if self.note is None else f"{self.phase}, {self.note}"
        return doing if self.step is None else f"step {self.step} ({doing})"


class Progress:
    """One a process; written by the main thread alone."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._standing = Standing(0, "joining", None, 0, None, False, time.monotonic(), True)

    @property
    def standing(self) -> Standing:
        return self._standing

    def at(self, phase: str, step: int | None = None, part: int = 0) -> None:
        """Say that ``phase`` begins, for ``step``; costs a microsecond, so call it at every step and batch.

        Said again it changes nothing: a loop that asks for the same data over and over is not getting on.
        Call it for a step's training once its data are there. The first evaluation may take long, since it
        compiles too, and a save always may. ``part``: which batch, for loops within a phase.
        """
        assert phase in PHASES, phase
        last = self._standing
        if phase in _NOTES:
            self._wait_for(phase)
        elif (phase, step, part) == (last.phase, last.step, last.part):
            self._standing = last._replace(note=None)
        else:
            if phase != last.phase:
                self._known.add(last.phase)
            may_take_long = phase in _LONG or phase not in self._known
            self._standing = Standing(
                last.times + 1, phase, step, part, None, False, time.monotonic(), may_take_long
            )

    def has_stepped(self) -> None:
        """Say that a step is done: what comes next in training is quick."""
        self._known |= {"first step", "training"}
        if self._standing.phase in self._known:
            self._standing = self._standing._replace(may_take_long=False)

    def begin_anew(self) -> None:
        """Say that all is built once more: each phase may take long again."""
        self._known.clear()

    @contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Say that ``phase`` begins, and at its end that what went before goes on."""
        before = self._standing
        self.at(phase, step)
        yield
        self.at(before.phase, before.step, before.part)

    def _wait_for(self, note: str) -> None:
        last = self._standing
        if not last.has_waited:  # the work before it is done, so the wait has a time of its own
            last = last._replace(since=time.monotonic(), has_waited=True)
        self._standing = last._replace(note=note)
