"""The ranks' watchdogs after one of them has raised the alarm, until their processes end.

Each watchdog writes its rank's stacks and answers. The rank that raised the alarm determines the hung rank
from the answers (``judge``, a pure function of the ranks' reports), writes the verdict as that rank's error,
and publishes it; then all exit. No rank exits earlier: the others' main threads would notice and exit first.
If the store does not answer, each rank blames rank 0, which runs it.

They communicate through the rendezvous store (``Board``). If the store's process is stopped, no call returns,
whatever its timeout. Every call is therefore made on a thread that can be abandoned
(``distributed.timed_call``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.rank import network
from hpc_train.rank.env import RankFacts
from hpc_train.run.attempts import tell_end, tell_error
from hpc_train.run.processes import Process
from hpc_train.training.distributed import backends
from hpc_train.training.distributed.timed_call import TimedCall, within
from hpc_train.training.health.progress import CONNECTING, Standing
from hpc_train.training.health.stacks import describe, in_words, save_flight_record, save_stacks, state_of

_NETWORK = "the network between the nodes, and on GPUs at the collectives in rank-<r>.nccl.json"


@dataclass(frozen=True)
class Report:
    """A rank's report to the other ranks, also written to the heartbeat file."""

    rank: int
    node: str
    #: ``RankFacts.node``.
    node_index: int
    process: Process | None
    count: int
    phase: str
    step: int | None
    note: str | None
    #: Seconds since its last progress.
    age_s: float
    #: Increases while its watchdog runs.
    tick: int
    #: Number of collectives started, per process group.
    collectives: dict[str, int] = field(default_factory=dict)
    #: The kernel's state of the process of each rank on this node, including this rank.
    seen: dict[int, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The step and the phase, for messages."""
        return Standing(0, self.phase, self.step, 0, self.note, False, 0.0, False).__str__()

    def to_text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Report:
        """Parse the result of ``to_text``."""
        data = json.loads(text)
        data["process"] = Process.from_json(data["process"])
        data["seen"] = {int(rank): state for rank, state in data["seen"].items()}
        return cls(**data)


@dataclass(frozen=True)
class Verdict:
    """The hung rank, agreed on by all ranks."""

    #: None if no rank is behind the others.
    guilty: int | None
    node: str | None
    text: str
    answered: list[int]
    silent: list[int]

    @property
    def speaker(self) -> int:
        """The rank to which the hang is attributed."""
        if self.guilty is not None:
            return self.guilty
        return min(self.answered, default=0)

    def to_text(self) -> str:
        """Return the verdict as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | bytes) -> Verdict:
        """Parse the result of ``to_text``."""
        data: dict[str, Any] = json.loads(text)
        return cls(**data)


def judge(
    world_size: int,
    answers: Mapping[int, Report],
    last: Mapping[int, Report],
    stacks: str,
    cant_connect: str,
) -> Verdict:
    """Determine the hung rank.

    ``answers``: reports of ranks that answered the alarm; ``last``: earlier reports of silent ranks.
    ``stacks``: the place of the stacks, for the message; ``cant_connect``: the cause if ranks were
    connecting. A rank that does not answer is not running; otherwise a rank that is behind keeps the others
    waiting. On GPUs, hosts are compared by the work that they have enqueued: if a device hangs, no rank is
    behind.
    """
    silent = [rank for rank in range(world_size) if rank not in answers]
    answered = sorted(answers)
    if silent:
        guilty = silent[0]
        previous = last.get(guilty)
        text = _silent_text(guilty, silent, previous, answers.values())
        return Verdict(guilty, previous.node if previous else None, _message(text, stacks), answered, silent)
    cause = f"; {cant_connect}" if any(answer.phase in CONNECTING for answer in answers.values()) else ""
    behind = _furthest_behind(answers)
    if behind is None:
        first = answers[answered[0]]
        cause = cause or f"; look at {'the disk that the data are on' if first.note else _NETWORK}"
        text = (
            f"all {world_size} ranks are in {first.where} for {_longest(answers.values()):.0f} s and none "
            f"is behind the others{cause}"
        )
        return Verdict(None, None, _message(text, stacks), answered, [])
    report = answers[behind]
    return Verdict(behind, report.node, _message(_behind_text(report, answers) + cause, stacks), answered, [])


def store_is_silent(report: Report, rank_0: Report | None, state: str | None, stacks: str) -> Verdict:
    """Return the verdict of a rank without contact: rank 0, which runs the store, does not answer."""
    text = _place(0, rank_0) + " does not answer, nor does the store that it runs"
    if state is not None:
        text += f"; its process {in_words(state)}"
    text += f"; rank {report.rank} made no progress for {report.age_s:.0f} s in {report.where}"
    return Verdict(0, rank_0.node if rank_0 else None, _message(text, stacks), [report.rank], [0])


def _message(text: str, stacks: str) -> str:
    return f"HangError: {text}; stacks in {stacks}"


def _place(rank: int, report: Report | None) -> str:
    return f"rank {rank} on {report.node}" if report else f"rank {rank}"


def _longest(reports: Iterable[Report]) -> float:
    return max((report.age_s for report in reports), default=0.0)


def _silent_text(guilty: int, silent: list[int], last: Report | None, answers: Iterable[Report]) -> str:
    reports = list(answers)
    text = _place(guilty, last)
    if last is not None:
        age_s = max(last.age_s, _longest(reports))
        text += f" made no progress for {age_s:.0f} s in {last.where} and"
    text += " does not answer"
    state = next((report.seen[guilty] for report in reports if guilty in report.seen), None)
    if state is not None:
        text += f"; its process {in_words(state)}"
    elif last is None:
        text += " and never did"
    else:
        text += f"; nor does any other rank on {last.node}, which may be down or disconnected"
    if len(silent) > 1:
        text += f"; nor do ranks {', '.join(map(str, silent[1:]))}"
    return text


def _behind_text(report: Report, answers: Mapping[int, Report]) -> str:
    text = f"{_place(report.rank, report)} made no progress for {report.age_s:.0f} s in {report.where}"
    if len(answers) == 1:
        return text
    ahead = max(answers.values(), key=lambda other: other.count)
    if ahead.count > report.count:
        text += f" while rank {ahead.rank} has reached {ahead.where}"
    elif report.note is not None:
        text += " while others have what they need"
    else:
        text += " while others wait for it in a collective operation that it has not started"
    if (state := report.seen.get(report.rank)) == "D":
        text += f"; its process {in_words(state)}"
    return text


def _furthest_behind(answers: Mapping[int, Report]) -> int | None:
    """Return the rank that is furthest behind; None if none is. A single rank counts as behind."""
    if len(answers) == 1:
        return next(iter(answers))
    notes = {rank for rank, report in answers.items() if report.note is not None}
    groups = set.intersection(*(set(report.collectives) for report in answers.values()))

    def distance(rank: int) -> tuple[int, int, int]:
        report = answers[rank]
        # Ranks that wait for another rank's data keep polling and never have equal counts.
        begun = 0 if notes else sum(report.collectives[group] for group in groups)
        return report.count, rank not in notes, begun

    least, most = min(map(distance, answers)), max(map(distance, answers))
    return None if least == most else min(rank for rank in answers if distance(rank) == least)


#: Keys of the store.
_WATCH, _ANSWER, _NODE = "hpc_train/watch/", "hpc_train/answer/", "hpc_train/node/"
_ALARM, _VERDICT, _READ = "hpc_train/hang", "hpc_train/hang_verdict", "hpc_train/hang_read"
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.2
#: Longer than a watchdog's tick and the writing of stacks: a rank that answers later is not running.
_ANSWER_LIMIT_S = 10.0
#: Limit for a shared disk to write a few kilobytes; after it the attempt ends without them.
_DISK_LIMIT_S = 5.0
#: The hung rank exits first, so that its exit counts as the cause and the others' exits as consequences.
_HEAD_START_S = 1.0


@dataclass(frozen=True)
class Alarm:
    """One rank's part in the alarm."""

    attempt: AttemptPaths
    facts: RankFacts
    node: str
    #: None for a single rank.
    board: Board | None
    #: The rank that raised the alarm; None if the store did not answer.
    raised_by: int | None
    #: The progress of this rank.
    answer: Report
    #: The ranks of this node, including this one.
    neighbours: Mapping[int, Process]
    #: Rank 0's last report, if this rank knows it.
    rank_0: Report | None

    def verdict(self) -> Verdict:
        """Save this rank's stacks, agree with the others on the hung rank, and write the verdict."""
        within(_DISK_LIMIT_S, self._save_stacks, "watchdog-stacks")
        verdict = self._verdict()
        within(_DISK_LIMIT_S, lambda: self._describe_silent(verdict), "watchdog-processes")
        # Last, because it queries NCCL and may hold the interpreter while NCCL does not answer.
        within(_DISK_LIMIT_S, self._save_flight_record, "watchdog-flight-record")
        return verdict

    def leave(self, verdict: Verdict, end: Callable[[ExitCode], None]) -> None:
        """End the process once the others have read the verdict."""
        board, is_speaker = self.board, verdict.speaker == self.facts.rank
        if board is not None:
            count = len(verdict.answered)
            within(_DISK_LIMIT_S, lambda: board.leave(count, _DISK_LIMIT_S), "watchdog-leave")
        if not is_speaker:
            time.sleep(_HEAD_START_S)
        code = ExitCode.HUNG if is_speaker else ExitCode.PEER_LOST
        ending = TimedCall[None]("watchdog-end")
        ending.do(lambda: end(code), _DISK_LIMIT_S)
        if ending.is_under_way:  # the last output waits for a disk
            os._exit(code)

    def _save_stacks(self) -> None:
        rank, answer = self.facts.rank, self.answer
        process = f"rank {rank} on {self.node}, process {os.getpid()}"
        save_stacks(self.attempt.stacks(rank), f"{process}: {answer.where}, for {answer.age_s:.0f} s")

    def _save_flight_record(self) -> None:
        if torch.cuda.is_initialized():
            save_flight_record(self.attempt.flight_record(self.facts.rank))

    def _verdict(self) -> Verdict:
        board, by, place = self.board, self.raised_by, self._stacks_place
        if board is None:
            return self._write_verdict(judge(1, {0: self.answer}, {}, place, self._cant_connect))
        verdict = None
        if by is not None:
            limit_s = 2 * (_ANSWER_LIMIT_S + _DISK_LIMIT_S)
            verdict = within(limit_s, lambda: self._agreed_verdict(board, by), "watchdog-verdict")
        if verdict is None:
            state = state_of(self.neighbours[0]) if 0 in self.neighbours else None
            verdict = self._write_verdict(store_is_silent(self.answer, self.rank_0, state, place))
        return verdict

    def _agreed_verdict(self, board: Board, by: int) -> Verdict:
        board.answer(self.answer)
        is_judge = by == self.facts.rank
        if not is_judge:
            verdict = board.wait_for_verdict(_ANSWER_LIMIT_S + _DISK_LIMIT_S)
            if verdict is not None:
                return verdict
        world_size = self.facts.world_size
        answers = board.wait_for_answers(world_size, _ANSWER_LIMIT_S if is_judge else 0.0)
        last = board.latest_reports(rank for rank in range(world_size) if rank not in answers)
        # Written before it is published, because ranks exit afterwards.
        verdict = judge(world_size, answers, last, self._stacks_place, self._cant_connect)
        return board.agree(self._write_verdict(verdict))

    def _write_verdict(self, verdict: Verdict) -> Verdict:
        """Write the verdict as the error of the hung rank, unless that rank wrote an error."""
        within(_DISK_LIMIT_S, lambda: self._write_end(verdict), "watchdog-error")
        return verdict

    def _write_end(self, verdict: Verdict) -> None:
        rank, attempt = verdict.speaker, self.attempt
        if attempt.error(rank).exists() or attempt.exit(rank).exists():
            return
        tell_end(attempt, rank, ExitCode.HUNG, verdict.node)
        tell_error(attempt, rank, verdict.text)

    def _describe_silent(self, verdict: Verdict) -> None:
        """Write the kernel's information on this node's ranks that don't answer; on one rank per node."""
        silent = [rank for rank in self.neighbours if rank in verdict.silent]
        running = [rank for rank in self.neighbours if rank not in verdict.silent]
        if min(running, default=None) != self.facts.rank:
            return
        for rank in silent:
            text = f"rank {rank} on {self.node} wrote no stacks: it does not answer\n\n"
            with suppress(OSError):
                self.attempt.stacks(rank).write_text(text + describe(self.neighbours[rank]), "utf-8")

    @property
    def _cant_connect(self) -> str:
        is_nccl = torch.cuda.is_initialized() and (
            self.answer.phase != CONNECTING[0] or backends.uses_nccl2()
        )
        return network.cant_connect("NCCL" if is_nccl else "gloo", os.environ)

    @property
    def _stacks_place(self) -> str:
        return f"attempts/{self.attempt.number}/rank-*.stacks"


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
