"""Timestamps of an attempt's events: rank 0 writes a small file, which is read with the attempt's record."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hpc_train.paths import AttemptPaths
from hpc_train.run.attempts import EVENTS, now_ms, read_events
from hpc_train.run.files import write_json


@dataclass
class EventLog:
    """Rank 0's record of one attempt. Errors in writing an event are ignored."""

    attempt: AttemptPaths
    #: Parts of the first step's time, see ``AttemptRecord``; written with the next event.
    first_step: dict[str, float] = field(default_factory=dict)
    _events: dict[str, str] = field(default_factory=dict)
    _save_s: float | None = None
    _stall_s: float = 0.0
    _signal: str | None = None

    def note(self, event: str, time: str | None = None) -> None:
        """Record that ``event`` happened, at ``time`` (UTC, ISO 8601) or now. Only the first time counts.

        If ranks agree to stop before this rank received a signal, the signal came to another rank.
        """
        assert event in EVENTS, event
        if event == "agreed":
            self._events.setdefault("signal", time or now_ms())
        if event not in self._events:
            self._events[event] = time or now_ms()
            self._write()

    def signalled(self, name: str, time: str) -> None:
        """Record the signal that requested the stop, and its time."""
        self._signal = self._signal or name
        self._events.setdefault("signal", time)
        self._write()

    def saved(self, duration_s: float, stall_s: float) -> None:
        """Record the longest save, and add ``stall_s`` to the total time that training waited for saves."""
        self._save_s = max(round(duration_s, 3), self._save_s or 0.0)
        self._stall_s += stall_s
        self._write()

    def _write(self) -> None:
        with suppress(OSError):
            facts = {"events": self._events, "save_s": self._save_s, "signal": self._signal}
            stall = {"checkpoint_stall_s": round(self._stall_s, 4)} if self._save_s is not None else {}
            first = {"first_step": self.first_step} if self.first_step else {}
            write_json(self.attempt.events, {"version": 1} | facts | stall | first)


def noted_signal(attempt: AttemptPaths) -> str | None:
    """Return the name of the signal that stopped rank 0, or None."""
    return read_events(attempt).signal
