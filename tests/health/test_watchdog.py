"""A rank that hangs is named, all stacks are saved, all ranks end; one that is only slow is left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.rank.env import RankFacts
from hpc_train.rank.signals import STOP_SIGNALS
from hpc_train.run.attempts import rank_ends, tell_end
from hpc_train.run.files import read_json
from hpc_train.training.distributed import backends
from hpc_train.training.health import hang as alarm
from hpc_train.training.health.hang import Report
from hpc_train.training.health.progress import Progress
from hpc_train.training.health.watchdog import Watchdog
from tests import warm
from tests.distributed.scripts import REPOSITORY
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S
#: A rank that trains until the file ``done`` exists and calls ``work`` in each step. An alarm waits until all
#: but ``num_silent`` ranks have answered, however long that takes on a busy machine.
RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from hpc_train.errors import ExitCode
from hpc_train.paths import AttemptPaths
from hpc_train.run.attempts import tell_end
from hpc_train.training.health import hang as alarm
from hpc_train.training.health.hang import Report
from hpc_train.training.distributed.process_group import join
from hpc_train.training.health.progress import Progress
from hpc_train.rank.env import RankFacts
from hpc_train.training.health.hang import Board
from hpc_train.training.health.watchdog import Watchdog
rank, world_size, num_nodes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[3])
# Dealt to nodes in turn: a node's ranks need not be in a row.
facts = RankFacts(rank, world_size, rank // num_nodes, world_size // num_nodes, rank % num_nodes, num_nodes)
attempt, node = AttemptPaths(Path(sys.argv[1])), f"n{facts.node + 1}"
group = join(facts, torch.device("cpu"), attempt.rendezvous, "token")
progress = Progress()
def end(code):
    tell_end(attempt, rank, code, node)
    os._exit(code)
alarm._ANSWER_LIMIT_S, answers_until_now = {limit_s}, Board.wait_for_answers
def wait_for_answers(board, world_size, limit_s):
    while len(answers := answers_until_now(board, world_size, 0.0)) < world_size - int(sys.argv[4]):
        time.sleep(0.02)
    return answers
Board.wait_for_answers = wait_for_answers
watchdog = Watchdog(attempt, facts, node, group.store, progress, hang_after_s=float(sys.argv[2]),
                    first_hang_after_s=600.0, end=end)
watchdog.start()
def is_time():  # to hang: the ranks know of each other, which takes some ticks
    return all((attempt.folder / f"known-{each}").exists() for each in range(world_size))
{work}
def train():
    is_done, step = torch.zeros(1), 0
    while not is_done:
        progress.at("training", step)
        work(step)
        is_done = torch.tensor([float((attempt.folder / "done").exists())])
        dist.all_reduce(is_done)
        progress.has_stepped()
        if 0 in watchdog._reports and len(watchdog._neighbours) == facts.local_world_size:
            (attempt.folder / f"known-{rank}").touch()
        step += 1
        (attempt.folder / f"step-{rank}").write_text(str(step))
        time.sleep(0.02)
try:
    train()
except RuntimeError as error:
    watchdog.wait_if_ending()
    end(ExitCode.PEER_LOST)
group.wait_to_leave()
watchdog.stop()
os._exit(0)
"""


@contextmanager
def started(
    folder: Path, world_size: int, work: str, *, hang_after_s: float, num_nodes: int = 1, num_silent: int = 0
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of ``RANK``; they are gone at the end."""
    script = RANK.replace("{work}", work).replace("{limit_s}", str(HANG_LIMIT_S))
    arguments = [str(folder), str(hang_after_s), str(num_nodes), str(num_silent)]
    variables = {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    if num_nodes > 1:
        variables |= {"SLURM_SRUN_COMM_HOST": "127.0.0.1"}
    folder.mkdir()
    ranks = [
        warm.start_script(
            script,
            *arguments,
            cwd=REPOSITORY,
            env=os.environ | variables | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def codes_of(ranks: list[subprocess.Popen[str]]) -> list[int]:
    return [rank.wait(LIMIT_S) for rank in ranks]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def steps(folder: Path, rank: int) -> int:
    path = folder / f"step-{rank}"
    return int(path.read_text() or 0) if path.exists() else 0


def ends(attempt: AttemptPaths) -> dict[int, tuple[int, str | None]]:
    return {rank: (end.code, end.node) for rank, end in sorted(rank_ends(attempt).items())}


# One rank, in this process.


class Watched:
    """A watchdog of one rank, whose process is not ended."""

    def __init__(self, folder: Path, hang_after_s: float = 0.2, first_hang_after_s: float = 600.0) -> None:
        folder.mkdir()
        self.attempt, self.progress = AttemptPaths(folder), Progress()
        self.codes: list[ExitCode] = []
        self.watchdog = Watchdog(
            self.attempt, RankFacts(), "n1", None, self.progress,
            hang_after_s=hang_after_s, first_hang_after_s=first_hang_after_s, end=self.codes.append,
        )  # fmt: skip

    def ticks(self) -> int:
        return self.watchdog._tick

    def hang(self, step: int = 1) -> None:
        """Have the rank hang in this step until the watchdog ends it."""
        self.progress.has_stepped()
        self.progress.at("training", step)
        self.watchdog.start()
        wait_until(lambda: bool(self.codes), "the end")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path / "3")
    yield watched
    watched.watchdog.stop()


@pytest.mark.fault(17)
def test_one_rank_that_hangs_is_reported_with_its_stacks(watched: Watched) -> None:
    watched.hang(step=57)
    assert watched.codes == [ExitCode.HUNG]
    assert watched.watchdog.is_ending.is_set()
    error = watched.attempt.error(0).read_text()
    assert re.match(
        r"HangError: rank 0 on n1 made no progress for \d+ s in step 57 \(training\); stacks in ", error
    )
    assert "attempts/3/rank-*.stacks" in error
    assert ends(watched.attempt) == {0: (79, "n1")}
    stacks = watched.attempt.stacks(0).read_text()
    assert "step 57 (training)" in stacks
    assert "test_one_rank_that_hangs" in stacks
    heartbeat = read_json(watched.attempt.heartbeat("n1"))
    assert heartbeat is not None
    assert heartbeat["hang"] == error.strip()


@pytest.mark.slow
@pytest.mark.fault(18)
def test_before_the_first_step_a_rank_may_take_long(watched: Watched) -> None:
    watched.progress.at("loading")
    watched.watchdog.start()
    wait_until(lambda: watched.ticks() > 8, "twice the short limit")
    assert not watched.watchdog.is_ending.is_set()
    watched.progress.at("first step", 0)
    watched.progress.has_stepped()
    watched.progress.at("training", 1)
    wait_until(lambda: bool(watched.codes), "the end")


def test_a_rank_that_gets_on_is_left_alone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """For three times the limit; it has done a step whenever the watchdog looks, however busy the machine."""
    look = watched.watchdog._look

    def step_and_look() -> None:
        watched.progress.at("training", watched.ticks())
        look()

    monkeypatch.setattr(watched.watchdog, "_look", step_and_look)
    watched.progress.has_stepped()
    watched.watchdog.start()
    wait_until(lambda: watched.ticks() >= 12 or bool(watched.codes), "twelve ticks")
    assert watched.codes == []


def test_the_heartbeat_is_there_from_the_start(watched: Watched) -> None:
    watched.progress.at("building")
    watched.watchdog.start()
    path = watched.attempt.heartbeat("n1")
    wait_until(path.exists, "the heartbeat")
    told = json.loads(path.read_text())
    assert (told["version"], told["attempt"], told["node"], told["hang"]) == (1, 3, "n1", None)
    rank = told["ranks"]["0"]
    assert (rank["phase"], rank["step"], rank["pid"]) == ("building", None, os.getpid())


def test_a_folder_that_is_gone_ends_nothing(watched: Watched) -> None:
    watched.attempt.folder.rmdir()
    watched.watchdog.start()
    wait_until(lambda: watched.ticks() > 3, "three ticks")
    assert watched.codes == []


def test_stop_signals_are_left_to_the_main_thread(watched: Watched) -> None:
    watched.watchdog.start()
    thread = watched.watchdog._thread.native_id
    wait_until(lambda: watched.ticks() > 0, "a tick")
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk:")).split()[1], 16)
    assert all(blocked >> (number - 1) & 1 for number in STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


def test_the_end_that_a_rank_left_itself_stands(watched: Watched) -> None:
    tell_end(watched.attempt, 0, ExitCode.FAILED, "n1")
    watched.hang()
    assert ends(watched.attempt) == {0: (1, "n1")}
    assert not watched.attempt.error(0).exists()


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_hung_disk_blocks_no_exit(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def hang(*arguments: Any) -> None:
        is_over.wait(LIMIT_S)

    monkeypatch.setattr(alarm, "save_stacks", hang)
    monkeypatch.setattr(alarm, "tell_error", hang)
    monkeypatch.setattr(alarm, "_DISK_LIMIT_S", 0.2)
    watched.hang()
    is_over.set()
    assert watched.codes == [ExitCode.HUNG]


@pytest.mark.fault(53)
def test_the_connecting_librarys_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's first, then NCCL's; ProcessGroupNCCL2 connects as soon as it is made."""

    def named(phase: str) -> str:
        report = Report(0, "n1", 0, None, 1, phase, None, None, 200.0, 9)
        own = alarm.Alarm(AttemptPaths(tmp_path / "3"), RankFacts(), "n1", None, None, report, {}, None)
        return own.verdict().text.split("profile: ")[1].split(";")[0]

    monkeypatch.setattr(backends, "uses_nccl2", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert named("connecting devices") == "network_interface (GLOO_SOCKET_IFNAME)"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert named("connecting") == "network_interface (GLOO_SOCKET_IFNAME)"
    assert named("connecting devices") == "network_interface (NCCL_SOCKET_IFNAME)"
    monkeypatch.setattr(backends, "uses_nccl2", lambda: True)
    assert named("connecting") == "network_interface (NCCL_SOCKET_IFNAME)"


# Several, as processes of their own.


ONE = """
def work(step):
    if rank == {rank} and is_time():
        {act}
"""


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_stopped_rank_is_named_and_all_end(tmp_path: Path) -> None:
    work = ONE.format(rank=2, act="os.kill(os.getpid(), signal.SIGSTOP)")
    attempt = AttemptPaths(tmp_path / "3")
    with started(attempt.folder, 4, work, hang_after_s=2, num_nodes=2, num_silent=1) as ranks:
        others = [ranks[0], ranks[1], ranks[3]]
        assert codes_of(others) == [ExitCode.PEER_LOST] * 3, others[0].stderr
        assert ranks[2].poll() is None
    error = attempt.error(2).read_text()
    assert "HangError: rank 2 on n1 made no progress for" in error
    assert re.search(
        r"s in step \d+ \(training\) and does not answer; its process is stopped \(SIGSTOP\)", error
    )
    assert ends(attempt) == {0: (76, "n1"), 1: (76, "n2"), 2: (79, "n1"), 3: (76, "n2")}
    assert [attempt.error(rank).exists() for rank in (0, 1, 3)] == [False] * 3
    for rank in (0, 1, 3):
        assert "in train" in attempt.stacks(rank).read_text()
    assert "is stopped (SIGSTOP)" in attempt.stacks(2).read_text()
    first, second = (read_json(attempt.heartbeat(node)) or {} for node in ("n1", "n2"))
    assert (sorted(first["ranks"]), sorted(second["ranks"])) == (["0", "2"], ["1", "3"])
    assert first["hang"] == second["hang"] == error.strip()


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_rank_in_a_loop_of_its_own_is_named_by_what_it_has_not_begun(tmp_path: Path) -> None:
    loop = "def never_ends():\n    while True:\n        time.sleep(0.01)\n"
    work = loop + ONE.format(rank=1, act="never_ends()")
    attempt = AttemptPaths(tmp_path / "3")
    with started(attempt.folder, 2, work, hang_after_s=2) as ranks:
        assert codes_of(ranks) == [ExitCode.PEER_LOST, ExitCode.HUNG]
    error = attempt.error(1).read_text()
    assert "rank 1 on n1 made no progress for" in error
    assert "others wait for it in a collective operation that it has not started" in error
    assert "in never_ends" in attempt.stacks(1).read_text()
    assert "in all_reduce" in attempt.stacks(0).read_text()
    assert ends(attempt) == {0: (76, "n1"), 1: (79, "n1")}


@pytest.mark.slow
@pytest.mark.fault(17)
def test_a_rank_whose_interpreter_is_held_is_like_one_that_is_stopped(tmp_path: Path) -> None:
    work = ONE.format(rank=1, act="ctypes.PyDLL(None).sleep(600)")
    attempt = AttemptPaths(tmp_path / "3")
    with started(attempt.folder, 2, work, hang_after_s=2, num_silent=1) as ranks:
        assert codes_of(ranks[:1]) == [ExitCode.PEER_LOST]
    error = attempt.error(1).read_text()
    assert "does not answer; its process sleeps without letting Python's other threads run" in error
    assert ends(attempt) == {0: (76, "n1"), 1: (79, "n1")}


@pytest.mark.slow
@pytest.mark.fault(17)
def test_rank_0_is_named_where_the_store_that_it_keeps_is_silent(tmp_path: Path) -> None:
    work = ONE.format(rank=0, act="os.kill(os.getpid(), signal.SIGSTOP)")
    attempt = AttemptPaths(tmp_path / "3")
    with started(attempt.folder, 2, work, hang_after_s=2, num_silent=1) as ranks:
        assert codes_of(ranks[1:]) == [ExitCode.PEER_LOST]
    error = attempt.error(0).read_text()
    assert "rank 0 on n1 does not answer, nor does the store" in error
    assert "its process is stopped (SIGSTOP)" in error
    assert ends(attempt) == {0: (79, "n1"), 1: (76, "n1")}
    assert "in train" in attempt.stacks(1).read_text()
    assert "is stopped (SIGSTOP)" in attempt.stacks(0).read_text()


@pytest.mark.slow
def test_a_slow_rank_is_left_alone(tmp_path: Path) -> None:
    """Its steps take longer than the limit in all, and less each."""
    work = """
def work(step):
    if rank == 1 and 1 <= step <= 7:
        time.sleep(1)
    if step == 8:
        (attempt.folder / "done").touch()
"""
    attempt = AttemptPaths(tmp_path / "3")
    with started(attempt.folder, 2, work, hang_after_s=6) as ranks:
        assert codes_of(ranks) == [0, 0]
    assert not list(attempt.folder.glob("rank-*"))


@pytest.mark.slow
def test_a_suspended_job_continues_where_it_was(tmp_path: Path) -> None:
    """All ranks are stopped in the midst of a step for longer than the limit, as gang scheduling does it."""
    work = """
def work(step):
    for count in range(30):  # a single sleep would be over when the process goes on
        time.sleep(0.05)
        if step > 0 and count == 5:
            (attempt.folder / f"within-{rank}").touch()
"""
    attempt = AttemptPaths(tmp_path / "3")
    within = [attempt.folder / f"within-{rank}" for rank in (0, 1)]
    with started(attempt.folder, 2, work, hang_after_s=4) as ranks:
        wait_until(lambda: all(path.exists() for path in within), "the midst of a step of each")
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        time.sleep(8)  # the fault itself
        before = steps(attempt.folder, 0)
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        wait_until(lambda: steps(attempt.folder, 0) > before + 2, "more steps")
        (attempt.folder / "done").touch()
        assert codes_of(ranks) == [0, 0]
    assert not list(attempt.folder.glob("rank-*"))
