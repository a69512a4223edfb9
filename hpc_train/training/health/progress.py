"""This rank's phase and the time of its last progress. Written by the training loop, read by the watchdog.

Ranks are compared by the number of their progress updates, so **every rank must call** ``at`` **for the same
work in the same order**. Work of a single rank (rank 0 writes a row) is not reported. Waits for data are
notes, which are not counted, because only the waiting rank reports them.
"""

from __future__ import annotations

import time
from typing import NamedTuple

PHASES = (
    "joining", "connecting", "checking", "connecting devices", "building", "staging data", "loading",
    "first step", "verifying", "training", "waiting for the device", "waiting for data", "evaluating",
    "sampling text", "saving", "leaving",
)  # fmt: skip
#: Phases in which the ranks connect inside torch, first gloo and then NCCL; they have a separate limit.
CONNECTING = ("connecting", "connecting devices")
#: Waits of a single rank in the middle of collective work.
_NOTES = frozenset({"waiting for data"})
#: Phases in which all may wait for the slow disk of one rank.
_LONG = frozenset({"saving"})


class Standing(NamedTuple):
    """The progress of a rank. Immutable, so that another thread reads it without a lock."""

    #: Number of progress updates, equal on all ranks after equal work.
    times: int
    phase: str
    step: int | None
    #: Distinguishes parts of a phase: a batch of an evaluation.
    part: int
    #: The reason of its wait, if it waits.
    note: str | None
    #: Whether it has waited since its last progress.
    has_waited: bool
    #: ``time.monotonic()`` of its last progress.
    since: float
    #: Whether this phase may compile, read cold data, or wait for a slow disk.
    may_take_long: bool
    #: Number of the graph that torch compiles, from 1; 0: none.
    graph: int = 0

    @property
    def doing(self) -> str:
        """The phase, with the graph that is being compiled."""
        return f"{self.phase}, compiling graph {self.graph}" if self.graph else self.phase

    def __str__(self) -> str:
        doing = self.doing if self.note is None else f"{self.doing}, {self.note}"
        return doing if self.step is None else f"step {self.step} ({doing})"


class Progress:
    """One per process; written by the main thread only."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        #: The latest progress; any thread may read it.
        self.standing = Standing(0, "joining", None, 0, None, False, time.monotonic(), True)

    def at(self, phase: str, step: int | None = None, part: int = 0) -> None:
        """Report that ``phase`` starts for ``step``. Call it at every step and batch; it takes a microsecond.

        A repeated call has no effect: a loop that polls for the same data makes no progress. Call it for a
        step's training once its data have arrived. The first evaluation may take long, because it also
        compiles, and a save always may. ``part``: the batch, for loops within a phase.
        """
        assert phase in PHASES, phase
        last = self.standing
        if phase in _NOTES:
            self._wait_for(phase)
        elif (phase, step, part) == (last.phase, last.step, last.part):
            self.standing = last._replace(note=None)
        else:
            if phase != last.phase:
                self._known.add(last.phase)
            may_take_long = phase in _LONG or phase not in self._known
            self.standing = Standing(
                last.times + 1, phase, step, part, None, False, time.monotonic(), may_take_long
            )

    def compiles(self, graph: int) -> None:
        """Report that torch compiles its ``graph``-th graph; 0: it has finished. Not counted as progress."""
        self.standing = self.standing._replace(graph=graph)

    def has_stepped(self) -> None:
        """Report that a step is complete: from now on the phases of training are quick."""
        self._known |= {"first step", "training", "waiting for the device"}
        if self.standing.phase in self._known:
            self.standing = self.standing._replace(may_take_long=False)

    def forget_phases(self) -> None:
        """Report a rebuild, after which each phase may take long again."""
        self._known.clear()

    def _wait_for(self, note: str) -> None:
        last = self.standing
        if not last.has_waited:  # the previous work is done, so the wait starts a new interval
            last = last._replace(since=time.monotonic(), has_waited=True)
        self.standing = last._replace(note=note)
