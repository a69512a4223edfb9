"""Communication between the ranks' watchdogs, through the rendezvous store.

If the store's process is stopped, no call returns, whatever its timeout: so every call is made on a thread
that nobody needs to wait for (``distributed.timed_call``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from hpc_train.health.hang import Report, Verdict
from hpc_train.run.processes import Process

_WATCH, _ANSWER, _NODE = "hpc_train/watch/", "hpc_train/answer/", "hpc_train/node/"
_ALARM, _VERDICT, _READ = "hpc_train/hang", "hpc_train/hang_verdict", "hpc_train/hang_read"
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.2


class Board:
    """A rank's view of the store, over its own connection. Any method may raise, or never return."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._store.set_timeout(_STORE_TIMEOUT)
        self._rank = rank

    def tell(self, report: Report) -> None:
        """Publish this rank's progress, which other ranks read by ``report_of``."""
        self._store.set(f"{_WATCH}{self._rank}", report.to_text())

    def report_of(self, rank: int) -> Report | None:
        """Return the last report of ``rank``, None if it never sent one."""
        text = self._get(f"{_WATCH}{rank}")
        return None if text is None else Report.from_text(text)

    def publish_node(self, node: int, processes: dict[int, Process]) -> None:
        """Report which processes are the ranks of a node."""
        text = json.dumps({rank: process.to_json() for rank, process in processes.items()})
        self._store.set(f"{_NODE}{node}", text)

    def node(self, node: int) -> dict[int, Process]:
        """Return the ranks of a node, none while unknown."""
        found = json.loads(self._get(f"{_NODE}{node}") or "{}")
        processes = {int(rank): Process.from_json(process) for rank, process in found.items()}
        return {rank: process for rank, process in processes.items() if process is not None}

    def alarm(self) -> int | None:
        """Return the rank that raised the alarm, or None."""
        text = self._get(_ALARM)
        return None if text is None else int(text)

    def raise_alarm(self) -> int:
        """Raise the alarm; return the rank that did so first."""
        return int(self._store.compare_set(_ALARM, "", str(self._rank)))

    def answer(self, report: Report) -> None:
        """Answer the alarm: this rank's stacks are written, and its progress."""
        self._store.set(f"{_ANSWER}{self._rank}", report.to_text())

    def wait_for_answers(self, world_size: int, limit_s: float) -> dict[int, Report]:
        """Return by rank the answers that arrived within ``limit_s``."""
        deadline, found = time.monotonic() + limit_s, dict[int, Report]()
        while True:
            for rank in range(world_size):
                if rank not in found and (text := self._get(f"{_ANSWER}{rank}")) is not None:
                    found[rank] = Report.from_text(text)
            if len(found) == world_size or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def last_words(self, ranks: Iterable[int]) -> dict[int, Report]:
        """Return the last report of each rank that sent one."""
        return {rank: report for rank in ranks if (report := self.report_of(rank)) is not None}

    def agree(self, verdict: Verdict) -> Verdict:
        """Publish a verdict; return the first one that was published."""
        return Verdict.from_text(self._store.compare_set(_VERDICT, "", verdict.to_text()))

    def wait_for_verdict(self, limit_s: float) -> Verdict | None:
        """Return the verdict once a rank has published one; None after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (text := self._get(_VERDICT)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return Verdict.from_text(text)

    def leave(self, num_ranks: int, limit_s: float) -> None:
        """Report that the verdict was read. Rank 0, which may run the store, waits until
        ``num_ranks`` did.
        """
        self._store.add(_READ, 1)
        deadline = time.monotonic() + limit_s
        while self._rank == 0 and self._store.add(_READ, 0) < num_ranks and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
