"""A rank's limit of open files is raised as far as allowed; too low a one is named before ranks connect."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from hpc_train.errors import ExitCode
from hpc_train.rank.env import RankFacts
from hpc_train.training.distributed import rank_limits
from hpc_train.training.distributed.rank_limits import TooFewFilesError, needed_files
from tests.waiting import HANG_LIMIT_S

LIMITED = """
import resource, sys
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from hpc_train.training.distributed.rank_limits import check_open_files
from hpc_train.rank.env import RankFacts
from hpc_train.errors import UserError
try:
    check_open_files(RankFacts(1, 400, 1, 8, 0, 50), (1, 1, 400, 1), 0, "n7")
except UserError as error:
    sys.exit(str(error))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limited(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False)


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, *, may_raise: bool = True) -> None:
    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if not may_raise:
            raise ValueError("not allowed to raise maximum limit")
        found.append(wanted)

    found = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limits)


def test_the_soft_limit_becomes_the_hard_limit() -> None:
    done = limited(1024, 1300)
    assert done.stdout.split() == ["1300", "1300"], done.stderr


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number_needed() -> None:
    done = limited(32, 400)
    assert done.returncode == 1
    assert "ulimit -n: rank 1 on node n7 may open 400 files and sockets but needs" in done.stderr
    assert f"needs {48 + 399 + (2 + 2 * 9) + 4 * 3}, with world size 400 and data.workers 0;" in done.stderr


def test_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 32, 32)
    with pytest.raises(TooFewFilesError) as raised:
        rank_limits.check_open_files(RankFacts(), (), 0, "n7")
    assert raised.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("facts", "axes", "loaders", "number"),
    [
        (RankFacts(), (), 0, 48),
        (RankFacts(1, 16, 1, 16), (), 0, 48 + 15 + 10),
        (RankFacts(0, 16, 0, 16), (), 0, 48 + 3 * 15 + 10),
        (RankFacts(1, 16, 1, 16), (1, 2, 8, 1), 0, 48 + 15 + 10 + 4 * 3 + 1 + 7),
        (RankFacts(1, 16, 1, 16), (1, 1, 16, 1), 0, 48 + 15 + 10 + 4 * 3),
        (RankFacts(), (), 4, 48 + 4 * 24),
    ],
    ids=["one rank", "a rank", "rank 0", "a mesh", "an axis of all ranks", "loader processes"],
)
def test_what_a_rank_needs(facts: RankFacts, axes: tuple[int, ...], loaders: int, number: int) -> None:
    assert needed_files(facts, axes, loaders) == number


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 4096])
def test_a_high_limit_is_enough(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 1024, hard)
    rank_limits.check_open_files(RankFacts(1, 1000, 1, 8), (), 8, "n7")


def test_a_limit_that_may_not_be_raised_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, 64, 4096, may_raise=False)
    assert rank_limits.raise_file_limit() == 64
