"""Communication between the ranks' watchdogs, through the rendezvous store.

If the store's process is stopped, no call returns, whatever its timeout. Every call is therefore made on a
thread that can be abandoned (``distributed.timed_call``).
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
    """A rank's view of the store, over a separate connection. Any method may raise or never return."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._store.set_timeout(_STORE_TIMEOUT)
        self._rank = rank

    def publish(self, report: Report) -> None:
        """Publish this rank's progress, which other ranks read with ``report_of``."""
        self._store.set(f"{_WATCH}{self._rank}", report.to_text())

    def report_of(self, rank: int) -> Report | None:
        """Return the last report of ``rank``; None if it has sent no report."""
        text = self._get(f"{_WATCH}{rank}")
        return None if text is None else Report.from_text(text)

    def publish_node(self, node: int, processes: dict[int, Process]) -> None:
        """Publish the processes of a node's ranks."""
        text = json.dumps({rank: process.to_json() for rank, process in processes.items()})
        self._store.set(f"{_NODE}{node}", text)

    def node(self, node: int) -> dict[int, Process]:
        """Return the processes of a node's ranks, by rank; empty while unknown."""
        content = json.loads(self._get(f"{_NODE}{node}") or "{}")
        processes = {int(rank): Process.from_json(process) for rank, process in content.items()}
        return {rank: process for rank, process in processes.items() if process is not None}

    def alarm(self) -> int | None:
        """Return the rank that raised the alarm; None if there is no alarm."""
        text = self._get(_ALARM)
        return None if text is None else int(text)

    def raise_alarm(self) -> int:
        """Raise the alarm; return the rank that raised it first."""
        return int(self._store.compare_set(_ALARM, "", str(self._rank)))

    def answer(self, report: Report) -> None:
        """Answer the alarm with this rank's progress, after its stacks are written."""
        self._store.set(f"{_ANSWER}{self._rank}", report.to_text())

    def wait_for_answers(self, world_size: int, limit_s: float) -> dict[int, Report]:
        """Return the answers that arrive within ``limit_s``, by rank."""
        deadline, answers = time.monotonic() + limit_s, dict[int, Report]()
        while True:
            for rank in range(world_size):
                if rank not in answers and (text := self._get(f"{_ANSWER}{rank}")) is not None:
                    answers[rank] = Report.from_text(text)
            if len(answers) == world_size or time.monotonic() > deadline:
                return answers
            time.sleep(_POLL_S)

    def latest_reports(self, ranks: Iterable[int]) -> dict[int, Report]:
        """Return the last report of each rank that has sent a report."""
        return {rank: report for rank in ranks if (report := self.report_of(rank)) is not None}

    def agree(self, verdict: Verdict) -> Verdict:
        """Publish a verdict; return the verdict that was published first."""
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
        """Report that the verdict was read. Rank 0, which may run the store, waits for ``num_ranks``."""
        self._store.add(_READ, 1)
        deadline = time.monotonic() + limit_s
        while self._rank == 0 and self._store.add(_READ, 0) < num_ranks and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
