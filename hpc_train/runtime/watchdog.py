"""A thread of each rank that looks whether the rank gets on, and ends the attempt where one hangs.

Each tick it tells the others, through the store, where its rank stands. Whoever sees its own rank stand still
for too long raises the alarm, and every watchdog goes on as ``runtime.alarm`` says.

A rank whose main thread holds the interpreter's lock, in a C extension that does not let go of it, can't run
its watchdog either: to the others it is like one that is stopped. Calls that may never return, those of the
store and of disks, are made on threads that nobody waits for for long (``runtime.errand``).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.run_folder.attempts import now
from hpc_train.run_folder.files import write_json
from hpc_train.run_folder.processes import Process
from hpc_train.runtime.alarm import Alarm
from hpc_train.runtime.collectives import collectives_begun
from hpc_train.runtime.errand import Errand, within
from hpc_train.runtime.hang import Report
from hpc_train.runtime.progress import Progress
from hpc_train.runtime.ranks import RankFacts
from hpc_train.runtime.signals import STOP_SIGNALS
from hpc_train.runtime.stacks import state_of
from hpc_train.runtime.watch_board import Board

#: Assumed: ranks of one job may be many, and one store serves them all.
_LONGEST_TICK_S = 4.0
_HEARTBEAT_S = 30.0
_STORE_LIMIT_S = 5.0
_log = logging.getLogger(__name__)


class Watchdog:
    """Started once the ranks have met, stopped before the process group is torn down."""

    def __init__(
        self,
        attempt: AttemptPaths,
        facts: RankFacts,
        node: str,
        store: Store | None,
        progress: Progress,
        *,
        hang_after_s: float,
        first_hang_after_s: float,
        end: Callable[[ExitCode], None],
    ) -> None:
        """``store``, which nobody else may use, may be None for one rank alone. ``end`` ends the process,
        called on a thread of ours.
        """
        self._attempt, self._facts, self._node = attempt, facts, node
        self._progress, self._end = progress, end
        self._hang_after_s, self._first_hang_after_s = hang_after_s, first_hang_after_s
        self._tick_s = min(_LONGEST_TICK_S, hang_after_s / 4)
        self._board = Board(store, facts.rank) if store is not None and facts.world_size > 1 else None
        self._process = Process.current()
        #: The ranks of this node, this one too, as far as they are known.
        self._neighbours = {facts.rank: self._process}
        self._reports: dict[int, tuple[Report, float]] = {}
        self._exchanging, self._writing = Errand[bool]("watchdog-store"), Errand[None]("watchdog-heartbeat")
        self._stopping, self._ending = threading.Event(), threading.Event()
        self._alarm_by: int | None = None
        self._tick = 0
        self._heartbeat_at = float("-inf")
        #: Ages count from here at the earliest: before it nobody ran.
        self._awake_since = time.monotonic()
        self._looked_at = self._awake_since
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        # The thread inherits the mask: stop signals must reach the main thread, in a system call perhaps.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        """Watch no longer. Returns within a moment, also where the store answers no more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(self._tick_s)

    def has_stepped(self) -> None:
        """Wait for ``hang_after_s`` from now on; called by the main thread after the attempt's first step."""
        self._progress.has_stepped()

    @property
    def is_ending(self) -> bool:
        """Whether the alarm was raised: this process is about to be ended by its watchdog."""
        return self._ending.is_set()

    def wait_if_ending(self, limit_s: float = 60.0) -> None:
        """Keep the main thread from ending the process by itself while the watchdog says who hung.

        To be called where an error, as of a lost peer, is about to end the process.
        """
        if self.is_ending:
            time.sleep(limit_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
            except Exception:  # a watchdog that is gone would be taken for a rank that is
                _log.warning("rank %d: the watchdog failed", self._facts.rank, exc_info=True)
            self._stopping.wait(self._tick_s)

    def _look(self) -> None:
        """One tick: tell, ask, look at one's own age."""
        self._tick += 1
        if self._board is not None:
            self._exchanging.do(self._exchange, self._tick_s)
        at = time.monotonic()
        # The wait and the exchange take a tick each at most. Later, this process was not running itself: its
        # job was suspended, and what all ranks have not done meanwhile says nothing.
        if at - self._looked_at > 3 * self._tick_s:
            self._awake_since = at
        self._looked_at = at
        if self._stopping.is_set():
            return
        if self._alarm_by is not None or self._age_s() > self._limit_s():
            self._sound_alarm()
        elif self._facts.local_rank == 0 and at - self._heartbeat_at >= _HEARTBEAT_S:
            self._write_heartbeat(None)

    def _age_s(self) -> float:
        return time.monotonic() - max(self._progress.standing.since, self._awake_since)

    def _limit_s(self) -> float:
        is_long = self._progress.standing.may_take_long
        return self._first_hang_after_s if is_long else self._hang_after_s

    # What the others are told and asked, on an errand.

    def _exchange(self) -> bool:
        board = self._board
        assert board is not None
        board.tell(self._report())
        self._alarm_by = board.alarm()
        if len(self._neighbours) < self._facts.local_world_size:
            self._find_neighbours(board)
        if 0 not in self._reports:  # where it is must be known once the store answers no more
            self._read(board, [0])
        if self._facts.local_rank == 0:
            self._read(board, [rank for rank in self._neighbours if rank != self._facts.rank])
        return True

    def _find_neighbours(self, board: Board) -> None:
        """Learn which ranks share the node: its first rank looks at all, since they need not be in a row."""
        if self._facts.local_rank > 0:
            self._neighbours |= board.node(self._facts.node)
            return
        self._read(board, [rank for rank in range(self._facts.world_size) if rank not in self._reports])
        for report, _ in list(self._reports.values()):
            if report.node_index == self._facts.node and report.process is not None:
                self._neighbours[report.rank] = report.process
        if len(self._neighbours) == self._facts.local_world_size:
            board.publish_node(self._facts.node, self._neighbours)

    def _read(self, board: Board, ranks: list[int]) -> None:
        for rank, report in board.last_words(ranks).items():
            known = self._reports.get(rank)
            if known is None or known[0].tick != report.tick:
                self._reports[rank] = report, time.monotonic()

    def _report(self) -> Report:
        standing = self._progress.standing
        return Report(
            self._facts.rank,
            self._node,
            self._facts.node,
            self._process,
            standing.times,
            standing.phase,
            standing.step,
            standing.note,
            round(self._age_s(), 1),
            self._tick,
        )

    def _answer(self) -> Report:
        """Return the report that a verdict needs: with collectives, and the node's processes as seen."""
        seen = {rank: state for rank, process in self._neighbours.items() if (state := state_of(process))}
        told = vars(self._report()) | {"collectives": collectives_begun(), "seen": seen}
        return Report(**told)

    # The heartbeat's file.

    def _write_heartbeat(self, hang: str | None) -> None:
        self._heartbeat_at = time.monotonic()
        told = {
            rank: _told(report, at)
            for rank, (report, at) in list(self._reports.items())
            if self._is_near(rank)
        }
        told[self._facts.rank] = _told(self._report(), self._heartbeat_at)
        data = {
            "version": 1, "attempt": self._attempt.number, "node": self._node, "time": now(), "hang": hang,
            "ranks": {str(rank): told[rank] for rank in sorted(told)},
        }  # fmt: skip
        path = self._attempt.heartbeat(self._node)
        self._writing.do(lambda: write_json(path, data), 0.0 if hang is None else _STORE_LIMIT_S)

    def _is_near(self, rank: int) -> bool:
        return rank in self._neighbours

    def _sound_alarm(self) -> None:
        """Find out who hung, with the others, and end the process."""
        self._ending.set()
        board = self._board
        if board is not None and self._alarm_by is None:
            self._alarm_by = within(_STORE_LIMIT_S, board.raise_alarm, "watchdog-alarm")
        rank_0, _ = self._reports.get(0, (None, 0.0))
        alarm = Alarm(
            self._attempt,
            self._facts,
            self._node,
            board,
            self._alarm_by,
            self._answer(),
            dict(self._neighbours),
            rank_0,
        )
        verdict = alarm.verdict()
        if self._facts.local_rank == 0:
            self._write_heartbeat(verdict.text)
        alarm.leave(verdict, self._end)
        self._stopping.set()


def _told(report: Report, at: float) -> dict[str, object]:
    """Return a report as the heartbeat's file has it; ``at``: when it was seen first."""
    told = {key: getattr(report, key) for key in ("count", "phase", "step", "note", "age_s")}
    pid = report.process.pid if report.process else None
    return told | {"pid": pid, "told_s_ago": round(time.monotonic() - at, 1)}
