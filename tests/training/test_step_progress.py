"""The host waits for the device two steps behind: with a stand-in for the device's events, on the CPU."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.errors import ExitCode, PeerLostError
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.rank.env import RankFacts
from hpc_train.training.datasets.types import Batch
from hpc_train.training.distributed.shared_flags import SharedFlags
from hpc_train.training.health.progress import Progress
from hpc_train.training.health.watchdog import Watchdog
from hpc_train.training.loop import Trainer
from hpc_train.training.step_times import RunAhead
from tests.checkpoint.checkpoint_runs import make_run
from tests.training.test_loop import Task, make_trainer
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.usefixtures("one_rank_group")

#: The step that the device never ends.
HANGS_IN = 4


class Device:
    """Does everything at once, until it hangs. Stands in for ``torch.cuda.Event``, too."""

    def __init__(self, num_done: int = sys.maxsize) -> None:
        self.num_recorded, self._num_done = 0, num_done

    def record(self) -> None:
        self.num_recorded += 1

    def query(self) -> bool:
        return self.num_recorded <= self._num_done


class Finite(Task):
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs


def hanging(run: RunPaths, check_peers: Callable[[], None], make_event: Callable[[], Any]) -> Trainer:
    trainer = make_trainer(run, "stop", task=Finite())
    trainer.step_progress.run_ahead = RunAhead(trainer.progress, check_peers, make_event)
    return trainer


def wait_until(is_so: Callable[[], bool]) -> None:
    limit = threading.Event()
    deadline = time.monotonic() + HANG_LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        limit.wait(0.01)


@pytest.mark.fault(54)
def test_a_device_that_hangs_holds_the_loop_two_steps_later_until_a_peer_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "flags"
    file.write_bytes(bytes(mmap.PAGESIZE))
    descriptor = os.open(file, os.O_RDWR)
    flags = SharedFlags(0, 2, descriptor, mmap.mmap(descriptor, 0), HANG_LIMIT_S)
    script = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX, 1, 1)\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert peer.stdout is not None and peer.stdout.readline() == b"\n"
    monkeypatch.setattr(torch.cuda, "Event", lambda: Device(HANGS_IN))
    trainer = hanging(make_run(tmp_path / "run"), flags.check_alive, torch.cuda.Event)
    ended: list[BaseException] = []

    def train() -> None:
        try:
            trainer.train()
        except PeerLostError as error:
            ended.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        wait_until(lambda: trainer.progress.standing[1:3] == ("waiting for the device", HANGS_IN))
        thread.join(0.3)  # it checks its peers several times, and goes no further
        assert thread.is_alive() and trainer.step == HANGS_IN + 2
    finally:
        peer.kill()
        peer.communicate()
        thread.join(HANG_LIMIT_S)
    assert [str(error) for error in ended] == ["rank 1 has ended"]


@pytest.mark.fault(54)
def test_a_device_that_hangs_raises_the_alarm_with_its_step(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    codes: list[ExitCode] = []
    is_over = threading.Event()

    def check_peers() -> None:
        if is_over.is_set():
            raise PeerLostError("the test is over")

    trainer = hanging(make_run(tmp_path / "run"), check_peers, lambda: Device(HANGS_IN))
    attempt, limit_s = AttemptPaths(tmp_path / "3"), {"hang_after_s": 0.3, "first_hang_after_s": HANG_LIMIT_S}
    watchdog = Watchdog(attempt, RankFacts(), "n1", None, trainer.progress, **limit_s, end=codes.append)
    trainer.first_step.on_end = lambda parts: trainer.progress.has_stepped()
    watchdog.start()

    def train() -> None:
        with pytest.raises(PeerLostError):
            trainer.train()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        wait_until(lambda: bool(codes))
    finally:
        is_over.set()
        thread.join(HANG_LIMIT_S)
        watchdog.stop()
    assert codes == [ExitCode.HUNG]
    assert f"in step {HANGS_IN} (waiting for the device)" in attempt.error(0).read_text()


def test_within_a_step_the_host_is_two_micro_batches_ahead() -> None:
    device, progress = Device(), Progress()
    ahead = RunAhead(progress, lambda: None, lambda: device)
    seen = []
    for step, part in ((0, 1), (0, 2), (0, 3), (1, 1)):
        ahead.begin(step, part)
        seen.append((device.num_recorded, progress.standing.step, progress.standing.part))
    assert seen == [(0, None, 0), (1, None, 0), (2, 0, 1), (3, 0, 2)]


def test_a_trainer_on_the_cpu_has_none(tmp_path: Path) -> None:
    assert make_trainer(make_run(tmp_path / "run"), "stop").step_progress.run_ahead is None
