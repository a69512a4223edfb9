"""Runs calls that may block forever (a store with a stopped process, a hung disk) with a timeout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class TimedCall(Generic[T]):
    """One call at a time on a separate thread, which inherits the caller's blocked signals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the last call is still running; until it returns ``do`` does nothing."""
        return self._thread is not None and self._thread.is_alive()

    def do(self, function: Callable[[], T], limit_s: float) -> T | None:
        """Return the result of ``function``; None if it raised or did not return within ``limit_s``.

        Does nothing while the previous call is running. A call that returns late still has its effect.
        """
        if self.is_under_way:
            return None
        results: list[T] = []
        self._thread = threading.Thread(
            target=self._call, args=(function, results), name=self._name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._thread = None
            return None
        self._thread.join(limit_s)
        return results[0] if results else None

    def _call(self, function: Callable[[], T], results: list[T]) -> None:
        try:
            results.append(function())
        except Exception as error:
            _log.debug("%s: %s", self._name, error)


def within(limit_s: float, function: Callable[[], T], name: str) -> T | None:
    """Run a single call: see ``TimedCall.do``."""
    return TimedCall[T](name).do(function, limit_s)
