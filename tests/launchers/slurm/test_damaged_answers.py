"""Seeded sequences of damaged answers of Slurm's programs: no run is judged wrongly, no job submitted twice.

A sequence is the life of one job, seen through answers that are late, incomplete, repeated or surrounded by a
site's banners. HPC_TRAIN_TEST_ANSWERS is the number of sequences: 100, 3,000 in ``make test-full``, or 10,000
for ``make answers``.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpc_train.launchers.slurm import commands, queue, queue_status, sbatch
from hpc_train.launchers.slurm.commands import NoAnswerError, RefusedError
from hpc_train.launchers.slurm.submission import Batch
from hpc_train.paths import RunPaths, SubmissionPaths
from hpc_train.run.attempts import read_record, write_record
from hpc_train.run.run_status import GOING_ON, RunStatus, read_status, write_status
from tests.launchers.slurm.queued import begin, queued_run

_SEQUENCES = int(os.environ.get("HPC_TRAIN_TEST_ANSWERS", "100"))
_PER_TEST = 50
_JOB = "4100"
_SEPARATOR = "\x1f"
#: Seconds by which a cached answer may be late.
_LATE_MAX_S = 30.0
#: The words of ten sites' wrappers, plug-ins and login messages, written after public reports.
BANNERS = (
    "--- notice of the site ---\nlargest charge of this job 48 units",
    "sbatch: lua: Submitting job 77 to the debug queue is free until Friday",
    "Welcome to the Python of this site",
    "WARNING: your project p12 has 0 node hours left | see https://example.org/job 12",
    "INFO: job 4099 of yours has ended. JobState=FAILED Reason=TimeLimit",
    "slurm_load_jobs: cache of 25 s",
    "###########################\n# Maintenance: 48 h left  #\n###########################",
    "Checking quota ... ok (48% of 1024 GB)\n",
    "\x1b[1mPlease acknowledge us\x1b[0m",
    "srun: lua: job is billed as 4 GPUs\r",
)


@dataclass(frozen=True)
class Version:
    """How a version of Slurm prints a job (``recorded.json``)."""

    name: str

    def row(self, state: str, restarts: int, ended: float | None) -> str:
        end = "N/A" if ended is None else _utc(ended)
        code = "15" if self.name.startswith("22") else "0:15"
        nodes = "n1" if state == "RUNNING" else ""
        fields = [_JOB, state, "None", str(restarts), "N/A", end, code, nodes, "small", "(null)"]
        return "".join(f"{text}{_SEPARATOR}" for text in fields)


VERSIONS = (Version("22.05.8"), Version("24.11.5"), Version("26.05.3"))


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).replace(tzinfo=None).isoformat(timespec="seconds")


@dataclass
class Truth:
    """The job as it is. ``state``: None before sbatch and once Slurm has dropped it."""

    state: str | None = None
    restarts: int = 0
    ended: float | None = None


@dataclass
class Cluster:
    """The truth over time, and programs that tell it badly."""

    chance: random.Random
    version: Version
    has_accounting: bool
    now: float = 1.8e9
    history: list[tuple[float, Truth]] = field(default_factory=list)
    is_damaged: bool = True

    def become(self, **facts: object) -> None:
        self.history.append((self.now, replace(self.truth, **facts)))  # type: ignore[arg-type]

    @property
    def truth(self) -> Truth:
        return self.history[-1][1] if self.history else Truth()

    def run(self, argv: Sequence[str], **_: object) -> str:
        if self.is_damaged and self.chance.random() < 0.1:
            raise NoAnswerError("Unable to contact slurm controller")
        seen = self._seen()
        if argv[0] == "squeue":
            return self._squeue(argv, seen)
        if argv[0] == "sacct":
            return self._sacct(argv, seen)
        if seen.state is None:
            raise RefusedError(argv, "slurm_load_jobs error: Invalid job id specified")
        end = "Unknown" if seen.ended is None else _utc(seen.ended)
        return self._damaged(
            f"JobId={_JOB} JobName=small UserId=me(1000) JobState={seen.state} Reason=None Dependency=(null) "
            f"Requeue=1 Restarts={seen.restarts} ExitCode=0:0 EndTime={end} NodeList=n1 Command=(null)"
        )

    def _seen(self) -> Truth:
        """Return the truth of now or, from a cache, of a moment ago."""
        late_s = self.chance.choice([0.0, self.chance.uniform(0, _LATE_MAX_S)]) if self.is_damaged else 0.0
        return next((truth for at, truth in reversed(self.history) if at <= self.now - late_s), Truth())

    def _squeue(self, argv: Sequence[str], seen: Truth) -> str:
        other = self.version.row("RUNNING", 0, None).replace(_JOB, "4099")
        if seen.state is None:
            if any(word.startswith("--jobs") for word in argv):
                raise RefusedError(argv, "slurm_load_jobs error: Invalid job id specified")
            return self._damaged(other)
        return self._damaged(f"{other}\n{self.version.row(seen.state, seen.restarts, seen.ended)}")

    def _sacct(self, argv: Sequence[str], seen: Truth) -> str:
        if not self.has_accounting:
            raise RefusedError(argv, "Slurm accounting storage is disabled")
        known = [truth for _, truth in self.history if truth.state is not None]
        last = seen if seen.state is not None else known[-1] if known else None
        if last is None:
            return self._damaged("")
        end = "Unknown" if last.ended is None else _utc(last.ended)
        return self._damaged(_SEPARATOR.join([_JOB, str(last.state), end, "0:0", "n1", "small"]))

    def _damaged(self, text: str) -> str:
        if not self.is_damaged:
            return text
        return damaged(self.chance, text)


def damaged(chance: random.Random, text: str) -> str:
    """Return the lines of an answer dropped, repeated, cut or between banners."""
    lines = text.split("\n")
    match chance.randrange(7):
        case 0:
            return ""
        case 1:
            lines = [line for line in lines if chance.random() < 0.5]
        case 2:
            lines = [line for line in lines for _ in range(chance.choice([1, 2]))]
        case 3:
            return text[: chance.randrange(len(text) + 1)]
    if chance.random() < 0.5:
        lines = [chance.choice(BANNERS), *lines]
    if chance.random() < 0.3:
        lines = [*lines, chance.choice(BANNERS)]
    return "\n".join(lines) + "\n"


class Life:
    """A run and its job, moved on step by step; each look at it is checked against the truth."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        self.cluster = Cluster(self.chance, self.chance.choice(VERSIONS), self.chance.random() < 0.5)
        self.paths: RunPaths = queued_run(folder, _JOB)
        self.attempt = 0
        monkeypatch.setenv("HPC_TRAIN_CACHE", str(folder / "cache"))
        monkeypatch.setattr(queue, "run", self.cluster.run)
        for module in (queue.commands, queue_status):
            monkeypatch.setattr(module, "cluster_name", lambda: "big")
        monkeypatch.setattr(queue.time, "time", lambda: self.cluster.now)
        monkeypatch.setattr(queue, "datetime", _clock(self.cluster))
        monkeypatch.setattr(queue_status, "say", lambda *_: None)
        monkeypatch.setattr(queue_status, "silent_s", lambda *_: self._silent_s())
        self.expected: set[str] = set()

    def _silent_s(self) -> float:
        """An attempt writes a heartbeat each 30 s while it runs."""
        began = [at for at, truth in self.cluster.history if truth.state == "RUNNING"]
        last = self.cluster.now if self.cluster.truth.state == "RUNNING" else self.cluster.history[-1][0]
        return self.cluster.now - last + self.chance.uniform(0, 30) if began else 1e9

    def look(self) -> str:
        (status,) = queue_status.statuses([self.paths])
        is_alive = self.cluster.truth.state in {"PENDING", "RUNNING"}
        if is_alive:
            assert status.state in GOING_ON, f"seed {self.seed}: {status} while {self.cluster.truth}"
            assert read_status(self.paths).state in GOING_ON, f"seed {self.seed}"
        return status.state

    def pass_time(self) -> None:
        self.cluster.now += self.chance.choice([1.0, 11.0, 40.0, 90.0, 400.0])

    def live(self) -> None:
        """Let the job be submitted, start, come back perhaps, and end; look at it all the time."""
        self.cluster.become(state="PENDING")
        for _ in range(self.chance.randrange(4)):
            self._look_twice()
            if self.chance.random() < 0.1:
                self._end("CANCELLED", {"cancelled", "failed"} if self.attempt else {"cancelled"})
                return
            self._start()
            self._look_twice()
            self._leave(self.chance.random() < 0.5)
        self._look_twice()
        if self.cluster.truth.state == "PENDING":
            self._start()
            self._look_twice()
        self._end_of_attempt()

    def _look_twice(self) -> None:
        for _ in range(self.chance.randrange(3)):
            self.pass_time()
            self.look()
        self.pass_time()

    def _start(self) -> None:
        self.cluster.become(state="RUNNING")
        self.attempt = begin(self.paths, _JOB, self.cluster.truth.restarts)

    def _leave(self, by_script: bool) -> None:
        """Requeue the job: its batch script does, or Slurm, which writes nothing into the folder."""
        if by_script:
            self._write("requeued", "preemption")
        self.cluster.become(state="PENDING", restarts=self.cluster.truth.restarts + 1)

    def _write(self, state: str, cause: str) -> None:
        record = read_record(self.paths.attempt(self.attempt))
        assert record is not None
        end = f"{_utc(self.cluster.now)}+00:00"
        events = record.events | {"end": end}
        write_record(self.paths.attempt(self.attempt), replace(record, end=end, cause=cause, events=events))
        write_status(self.paths, RunStatus(state, 5, 10, attempt=self.attempt))

    def _end_of_attempt(self) -> None:
        state = self.chance.choice(["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"])
        if state == "COMPLETED":
            self._write("completed", "completed")
        elif state == "FAILED":
            self._write("failed", "crash")
        ends = {"COMPLETED": {"completed"}, "CANCELLED": {"cancelled", "failed"}}
        self._end(state, ends.get(state, {"failed"}))

    def _end(self, state: str, expected: set[str]) -> None:
        self.cluster.become(state=state, ended=self.cluster.now)
        self.expected = expected
        for _ in range(self.chance.randrange(4)):
            self.pass_time()
            self.look()
        if self.chance.random() < 0.5:  # MinJobAge
            self.cluster.now += 301
            self.cluster.become(state=None)
            self.look()
        self.cluster.is_damaged = False
        for _ in range(2):
            self.cluster.now += 61
            state = self.look()
        assert state in self.expected, f"seed {self.seed}: {state}, not {self.expected}"


def _clock(cluster: Cluster) -> type[datetime]:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(cluster.now, UTC)

    return Clock


@pytest.mark.parametrize("first", range(0, _SEQUENCES, _PER_TEST))
def test_damaged_answers_keep_status(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, min(first + _PER_TEST, _SEQUENCES)):
        with monkeypatch.context() as patched:
            Life(tmp_path / str(seed), seed, patched).live()


class Queue:
    """sbatch, squeue and scancel; sbatch may be heard though its answer is lost."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance, self.folder = chance, folder
        self.jobs: list[str] = []
        self.cancelled: list[str] = []

    def run(self, argv: Sequence[str], **_: object) -> str:
        if argv[0] == "squeue":
            rows = [f"{job}|{self.folder}/batch.sh" for job in self.jobs] + ["48|/a/b.sh"]
            return "\n".join([*self.chance.sample(BANNERS, 1), *rows])
        if argv[0] == "scancel":
            self.cancelled += argv[1:]
            return ""
        how = self.chance.random()
        if how < 0.2:
            raise NoAnswerError("Unable to contact slurm controller")
        self.jobs.append(str(4100 + len(self.jobs)))
        if how < 0.4:
            raise NoAnswerError("Socket timed out on send/recv operation")
        line = self.chance.choice(["{}", "{};big", "Submitted batch job {}"]).format(self.jobs[-1]) + "\n"
        return damaged(self.chance, line)


@pytest.mark.parametrize("first", range(0, _SEQUENCES, _PER_TEST))
def test_damaged_answers_submit_one_job(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number cut short, such as 41 of 4100, is not taken for the job's."""
    paths = SubmissionPaths(tmp_path / "runs/exp/.slurm/token")
    batch = Batch(paths.folder, "python", {"additional_parameters": {}})
    paths.folder.mkdir(parents=True)
    monkeypatch.setattr(sbatch.script, "script_text", lambda *_: "")
    monkeypatch.setattr(sbatch.time, "sleep", lambda _: None)
    monkeypatch.setattr(sbatch, "say", lambda *_: None)
    for seed in range(first, min(first + _PER_TEST, _SEQUENCES)):
        programs = Queue(random.Random(seed), paths.folder)
        monkeypatch.setattr(commands, "run", programs.run)
        number = sbatch.send(paths, batch, 1)
        assert [job for job in programs.jobs if job not in programs.cancelled] == [number], f"seed {seed}"


def test_the_banners_name_jobs_but_no_line_is_sbatchs_own() -> None:
    assert any(re.search(r"job \d+", banner) for banner in BANNERS)
    assert {sbatch.job_number(banner) for banner in BANNERS} == {None}
