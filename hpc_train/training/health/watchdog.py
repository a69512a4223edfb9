"""A thread of each rank that monitors its progress and ends the attempt if a rank hangs.

Each tick it reports its rank's progress to the others, through the store. A watchdog whose rank makes no
progress for too long raises the alarm, and every watchdog continues as described in ``health.hang``.

If the main thread holds the interpreter lock, in a C extension that does not release it, the watchdog can't
run either, and the rank looks stopped to the others. Calls that may never return, to the store and to disks,
are made on threads with a limited wait (``distributed.timed_call``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.rank import signals
from hpc_train.rank.env import RankFacts
from hpc_train.run.attempts import now
from hpc_train.run.files import write_json
from hpc_train.run.processes import Process
from hpc_train.training.distributed.timed_call import TimedCall, within
from hpc_train.training.health.hang import Alarm, Board, Report
from hpc_train.training.health.progress import CONNECTING, Progress
from hpc_train.training.health.stacks import state_of

#: Assumed: one store serves a job of many ranks.
_LONGEST_TICK_S = 4.0
_HEARTBEAT_S = 30.0
_STORE_LIMIT_S = 5.0
_ENDING_LIMIT_S = 60.0
#: Assumed: a working network connects thousands of ranks in less time, and the wrong interface never does.
CONNECT_LIMIT_S = 180.0
_log = logging.getLogger(__name__)


class Watchdog:
    """Runs from the ranks' meeting, before the process group is created, until before it is destroyed."""

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
        connect_after_s: float = CONNECT_LIMIT_S,
        end: Callable[[ExitCode], None],
    ) -> None:
        """``store``: unshared, None for a single rank. ``end``: ends the process; called on the thread."""
        self._attempt, self._facts, self._node = attempt, facts, node
        self._progress, self._end = progress, end
        self._hang_after_s, self._first_hang_after_s = hang_after_s, first_hang_after_s
        self._connect_after_s = connect_after_s
        self._tick_s = min(_LONGEST_TICK_S, hang_after_s / 4)
        self._board = Board(store, facts.rank) if store is not None and facts.world_size > 1 else None
        self._process = Process.current()
        #: The known ranks of this node, including this rank.
        self._neighbours = {facts.rank: self._process}
        self._reports: dict[int, tuple[Report, float]] = {}
        self._exchanging, self._writing = (
            TimedCall[bool]("watchdog-store"),
            TimedCall[None]("watchdog-heartbeat"),
        )
        self._stopping = threading.Event()
        #: The alarm was raised, so that the watchdog will end this process.
        self.is_ending = threading.Event()
        self._alarm_by: int | None = None
        self._tick = 0
        self._heartbeat_at = float("-inf")
        #: Earliest start of ages; earlier the ranks were suspended.
        self._awake_since = time.monotonic()
        self._looked_at = self._awake_since
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        # The thread inherits the mask: stop signals must reach the main thread, perhaps in a system call.
        with signals.blocked():
            self._thread.start()

    def stop(self) -> None:
        """Stop watching. Returns quickly, also if the store no longer answers."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(self._tick_s)

    def wait_if_ending(self) -> None:
        """Keep the main thread from ending the process while the watchdog reports the hung rank.

        Call it when an error, such as a lost peer, is about to end the process.
        """
        if self.is_ending.is_set():
            time.sleep(_ENDING_LIMIT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
            except Exception:  # without its watchdog the rank would look stopped
                _log.warning("rank %d: the watchdog failed", self._facts.rank, exc_info=True)
            self._stopping.wait(self._tick_s)

    def _look(self) -> None:
        """Run one tick: report, read the alarm, check this rank's age."""
        self._tick += 1
        if self._board is not None:
            self._exchanging.do(self._exchange, self._tick_s)
        at = time.monotonic()
        # The wait and the exchange take at most a tick each. If more time has passed, this process was not
        # running, for example because its job was suspended; then missing progress means nothing.
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
        standing = self._progress.standing
        if standing.phase in CONNECTING:
            return self._connect_after_s
        return self._first_hang_after_s if standing.may_take_long else self._hang_after_s

    # Communication with the other ranks, by timed calls.

    def _exchange(self) -> bool:
        board = self._board
        assert board is not None
        board.publish(self._report())
        self._alarm_by = board.alarm()
        if len(self._neighbours) < self._facts.local_world_size:
            self._find_neighbours(board)
        if 0 not in self._reports:  # its node must be known when the store no longer answers
            self._read(board, [0])
        if self._facts.local_rank == 0:
            self._read(board, [rank for rank in self._neighbours if rank != self._facts.rank])
        return True

    def _find_neighbours(self, board: Board) -> None:
        """Find the ranks of this node. Its first rank reads all reports: they need not be consecutive."""
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
        for rank, report in board.latest_reports(ranks).items():
            previous = self._reports.get(rank)
            if previous is None or previous[0].tick != report.tick:
                self._reports[rank] = report, time.monotonic()

    def _report(self) -> Report:
        standing = self._progress.standing
        return Report(
            self._facts.rank,
            self._node,
            self._facts.node,
            self._process,
            standing.times,
            standing.doing,
            standing.step,
            standing.note,
            round(self._age_s(), 1),
            self._tick,
        )

    # The heartbeat file.

    def _write_heartbeat(self, hang: str | None) -> None:
        self._heartbeat_at = time.monotonic()
        reports = {
            rank: _report_json(report, at)
            for rank, (report, at) in list(self._reports.items())
            if rank in self._neighbours
        }
        reports[self._facts.rank] = _report_json(self._report(), self._heartbeat_at)
        data = {
            "version": 1, "attempt": self._attempt.number, "node": self._node, "time": now(), "hang": hang,
            "ranks": {str(rank): reports[rank] for rank in sorted(reports)},
        }  # fmt: skip
        path = self._attempt.heartbeat(self._node)
        self._writing.do(lambda: write_json(path, data), 0.0 if hang is None else _STORE_LIMIT_S)

    def _sound_alarm(self) -> None:
        """Agree with the others on the hung rank, and end the process."""
        self.is_ending.set()
        board = self._board
        if board is not None and self._alarm_by is None:
            self._alarm_by = within(_STORE_LIMIT_S, board.raise_alarm, "watchdog-alarm")
        rank_0, _ = self._reports.get(0, (None, 0.0))
        seen = {rank: state for rank, process in self._neighbours.items() if (state := state_of(process))}
        facts = vars(self._report()) | {"collectives": collectives_begun(), "seen": seen}
        alarm = Alarm(
            self._attempt,
            self._facts,
            self._node,
            board,
            self._alarm_by,
            Report(**facts),
            dict(self._neighbours),
            rank_0,
        )
        verdict = alarm.verdict()
        if self._facts.local_rank == 0:
            self._write_heartbeat(verdict.text)
        alarm.leave(verdict, self._end)
        self._stopping.set()


def _report_json(report: Report, at: float) -> dict[str, object]:
    """Return a report in the format of the heartbeat file; ``at``: the time when it was first read."""
    facts = {key: getattr(report, key) for key in ("count", "phase", "step", "note", "age_s")}
    pid = report.process.pid if report.process else None
    return facts | {"pid": pid, "told_s_ago": round(time.monotonic() - at, 1)}


def collectives_begun() -> dict[str, int]:
    """Return the number of collectives that this rank has started, by process group and device.

    Any thread may call it.

    A group's name is the same on all its ranks, and a rank that is behind has started fewer. On CUDA, started
    means enqueued by the host: NCCL's flight recorder records the start on the device only with
    TORCH_NCCL_ENABLE_TIMING, with which, according to torch, torch's watchdog hangs more often.
    ProcessGroupNCCL2 does not count them; without an entry for CUDA, no rank counts as behind.
    """
    counts: dict[str, int] = {}
    types = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    with suppress(Exception):  # private, and the main thread may be changing it
        for group in list(distributed_c10d._world.pg_map):
            for device_type in types:
                with suppress(
                    RuntimeError
                ):  # the group has no backend for this device, or that does not count
                    backend = group._get_backend(torch.device(device_type))
                    number = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
                    counts[f"{group.group_name} {device_type}"] = int(number)
    return counts
