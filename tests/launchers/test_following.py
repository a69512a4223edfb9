"""When another attempt follows a crash on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpc_train.errors import ExitCode
from hpc_train.launchers.base import LaunchRequest, StartRequest
from hpc_train.launchers.following import FollowingLauncher
from hpc_train.run.attempts import now, tell_end, tell_error
from tests.run.runs import change_record, small_experiment, small_run


@dataclass
class CrashingOnce:
    """The first attempt saves a checkpoint, and its ranks end with these exit codes and errors."""

    ends: dict[int, ExitCode]
    attempts: list[int] = field(default_factory=list)

    def launch(self, request: LaunchRequest, poll: Callable[[], None]) -> ExitCode:
        self.attempts.append(request.attempt)
        if request.attempt > 1:
            return ExitCode.DONE
        attempt = request.paths.attempt(request.attempt)
        for rank, code in self.ends.items():
            tell_error(attempt, rank, "DistBackendError: NCCL error: remote process exited")
            tell_end(attempt, rank, int(code))
        change_record(attempt, end=now(), cause="crash", reason="rank 1: killed by SIGKILL", saved_step=5)
        return ExitCode.FAILED


@pytest.mark.parametrize(
    ("ends", "attempts"),
    [
        ({}, [1, 2]),
        ({0: ExitCode.PEER_LOST, 2: ExitCode.PEER_LOST}, [1, 2]),  # NCCL reports a lost peer as an error
        ({0: ExitCode.PEER_LOST, 2: ExitCode.FAILED}, [1]),
    ],
)
def test_an_exception_of_a_rank_ends_a_run_and_the_loss_of_a_killed_peer_does_not(
    ends: dict[int, ExitCode], attempts: list[int], tmp_path: Path
) -> None:
    paths, plugin = small_run(tmp_path), CrashingOnce(ends)
    FollowingLauncher("local", plugin).start(paths.siblings, [StartRequest(paths, small_experiment())])
    assert plugin.attempts == attempts
