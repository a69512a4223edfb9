"""A rank while it connects to the others: it is watched, obeys signals, and names the interface."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.rank.signals import StopFlag
from hpc_train.run.attempts import EventLog, read_events
from hpc_train.training.health.progress import Progress
from hpc_train.training.health.stacks import limit_core_files
from hpc_train.training.rank import Rank
from tests import warm
from tests.distributed.scripts import REPOSITORY
from tests.run.runs import small_run
from tests.waiting import HANG_LIMIT_S

#: A rank whose call of ``argv[2]`` from the thread that connects never returns on the ranks of ``argv[3]``.
RANK = """
import os, sys, threading
from pathlib import Path
import torch.distributed as dist
from hpc_train.rank import signals
from hpc_train.training.distributed import process_group
from hpc_train.paths import RunPaths
from hpc_train.training import main, rank
signals.block()
paths, name, blocked = RunPaths(Path(sys.argv[1])), sys.argv[2], sys.argv[3].split(",")
rank.CONNECT_LIMIT_S, process_group._CONNECT_LIMIT_S = float(sys.argv[4]), 0.5
call = getattr(dist, name)
def wait_or_call(*arguments, **keys):
    if threading.current_thread() is threading.main_thread():
        return call(*arguments, **keys)
    (paths.folder / f"connecting-{os.environ['RANK']}").touch()
    if os.environ["RANK"] in blocked:
        threading.Event().wait()
    return call(*arguments, **keys)
setattr(dist, name, wait_or_call)
code = main.run(paths, 1)
sys.stderr.flush()
os._exit(int(code))
"""
#: By call that blocks, the phase in which it does.
PHASES = {"init_process_group": "connecting", "all_reduce": "connecting devices"}
pytestmark = pytest.mark.slow


@contextmanager
def started(
    paths: RunPaths, call: str, blocked: str, limit_s: float
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two ranks; they are gone at the end."""
    paths.attempt(1).folder.mkdir(parents=True)
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        warm.start_script(
            RANK,
            *(str(paths.folder), call, blocked, str(limit_s)),
            cwd=REPOSITORY,
            env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.fault(53)
@pytest.mark.parametrize("call", PHASES)
def test_ranks_that_can_not_connect_end_and_name_the_interface(call: str, tmp_path: Path) -> None:
    paths = small_run(tmp_path, recovery={"hang_after_min": 0.1})
    with started(paths, call, "0,1", limit_s=3.0) as ranks:
        codes = [rank.wait(HANG_LIMIT_S) for rank in ranks]
        assert codes == [ExitCode.HUNG, ExitCode.PEER_LOST], ranks[0].communicate()
    error = paths.attempt(1).error(0).read_text()
    assert f"all 2 ranks are in {PHASES[call]} for " in error
    assert (
        "gloo can't connect over its interface lo; profile: network_interface (GLOO_SOCKET_IFNAME)" in error
    )
    assert "wait_or_call" in paths.attempt(1).stacks(1).read_text()


@pytest.mark.fault(2)
@pytest.mark.parametrize("call", PHASES)
def test_a_stop_signal_ends_a_rank_that_connects(call: str, tmp_path: Path) -> None:
    """Rank 0 waits in torch for rank 1, where no signal handler runs."""
    paths = small_run(tmp_path)
    with started(paths, call, "1", limit_s=HANG_LIMIT_S) as (first, second):
        deadline = time.monotonic() + HANG_LIMIT_S
        while not (paths.folder / "connecting-0").exists():
            assert time.monotonic() < deadline and first.poll() is None, first.communicate()
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        assert first.wait(HANG_LIMIT_S) == ExitCode.TRY_AGAIN, first.communicate()
        assert second.poll() is None


def test_ranks_write_no_core_files_unless_they_are_asked_for() -> None:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
        limit_core_files({"HPC_TRAIN_CORE_FILES": "1"})
        assert resource.getrlimit(resource.RLIMIT_CORE) == (limits[1], limits[1])
        limit_core_files({})
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)


def test_a_rollback_does_not_replace_the_times_of_the_first_step(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.attempt(1).folder.mkdir(parents=True, exist_ok=True)
    rank = SimpleNamespace(flag=StopFlag(), progress=Progress(), events=EventLog(run.attempt(1)))
    rank.note = rank.events.note
    for seconds in (4.0, 0.1):
        Rank.has_stepped(cast(Rank, rank), {"run_s": seconds})
        rank.events.saved(1.0, 0.0)
    assert read_events(run.attempt(1)).first_step == {"run_s": 4.0}
