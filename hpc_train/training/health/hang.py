"""Determines the rank that made an attempt hang, as a pure function of all ranks' reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_train.run.processes import Process
from hpc_train.training.health.progress import CONNECTING, Standing
from hpc_train.training.health.stacks import in_words

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
