"""Something that may never return (a store whose process is stopped, a disk that hangs), done beside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Errand(Generic[T]):
    """One call at a time on a thread of its own, which inherits the caller's blocked signals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def is_under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def do(self, function: Callable[[], T], limit_s: float) -> T | None:
        """Return what ``function`` returns; None where it raised, or has not returned within ``limit_s``.

        Does nothing while the call before is under way. One that returns late has done what it did.
        """
        if self.is_under_way:
            return None
        results: list[T] = []
        self._thread = threading.Thread(
            target=self._call, args=(function, results), name=self._name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter ends
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
    """Do one errand of its own: see ``Errand.do``."""
    return Errand[T](name).do(function, limit_s)
