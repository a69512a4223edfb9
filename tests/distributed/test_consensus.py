"""All ranks stop and save at the same step."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from hpc_train.rank.signals import StopFlag
from hpc_train.training.distributed.consensus import (
    _MOST_BAD_SAMPLES,
    Agreement,
    Consensus,
    StepFlags,
    _packed,
    _total,
)
from hpc_train.training.distributed.process_group import Group
from hpc_train.training.distributed.rendezvous import Timeouts
from hpc_train.training.distributed.shared_flags import NUM_BITS
from tests.distributed.scripts import run_script


@pytest.fixture
def alone() -> Group:
    # One rank alone exchanges nothing: no process group is there to be used.
    return Group(0, 1, torch.device("cpu"), None, None, Timeouts())  # type: ignore[arg-type]


def test_one_rank_agrees_with_itself(alone: Group) -> None:
    flag = StopFlag()
    agreement = Agreement(alone, flag)
    assert agreement.exchange(StepFlags(save=True)) == Consensus(save=True)
    assert agreement.exchange() == Consensus()
    assert agreement.exchange(StepFlags(False, True, True, True, 7)) == Consensus(
        False, True, True, True, 7, stop=False
    )
    agreement.begin(StepFlags(save=True))
    flag.note(15)
    assert agreement.wait() == Consensus(stop=True, save=True)
    assert agreement.exchange().stop
    assert agreement.rank_0_says(True)
    assert not agreement.rank_0_says(False)


@pytest.mark.slow
@pytest.mark.fault(1, 5)
@pytest.mark.parametrize("memory", ["shared", "none"])
def test_ranks_agree_whoever_was_asked(memory: str, tmp_path: Path) -> None:
    """In shared memory, and by a sum over the control group where rank 0 can't make any."""
    script = """
import dataclasses, json, os, signal, sys
from pathlib import Path
import torch
from hpc_train.rank import signals
from hpc_train.training.distributed import shared_flags
from hpc_train.training.distributed.consensus import Agreement, StepFlags
from hpc_train.training.distributed.backends import peer_lost
from hpc_train.training.distributed.process_group import join
from hpc_train.rank.env import RankFacts
from hpc_train.errors import PeerLostError
if sys.argv[2] == "none":
    shared_flags.SHM = "/nowhere"
flag = signals.install()
facts = RankFacts.from_environment(os.environ)
group = join(facts, torch.device("cpu"), Path(sys.argv[1]), "token")
assert (group.shared_flags is None) == (sys.argv[2] == "none")
agreement = Agreement(group, flag)
agreed = []
def step(**wish):
    agreed.append(dataclasses.astuple(agreement.exchange(StepFlags(**wish))))
step()  # after it rank 0 has unlinked the file
if group.shared_flags is not None:  # nothing is left there if all ranks are killed
    assert os.readlink(f"/proc/self/fd/{group.shared_flags.file}").endswith("(deleted)")
step(save=facts.rank == 0)
step(save=facts.rank != 0)
step(has_failed=facts.rank == 1, is_waiting=facts.rank == 2, bad_samples=facts.rank)
step(is_non_finite=facts.rank > 0)
agreed.append(agreement.rank_0_says(facts.rank == 0))
agreed.append(agreement.rank_0_says(facts.rank != 0))
step()
if facts.rank == 2:
    os.kill(os.getpid(), signal.SIGTERM)
step()
step(save=True)
print(json.dumps(agreed), flush=True)
if facts.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    step()
except RuntimeError as error:
    os._exit(0 if peer_lost(error) else 1)
except PeerLostError as error:
    os._exit(0 if str(error) == "rank 1 has ended" else 1)
"""
    ranks = run_script(script, 3, str(tmp_path / "rendezvous.json"), memory)
    told = [
        Consensus(),
        Consensus(save=True),
        Consensus(),
        Consensus(has_failed=True, is_waiting=True, bad_samples=3),
        Consensus(is_non_finite=True),
        1,
        0,
        Consensus(),
        Consensus(stop=True),
        Consensus(stop=True, save=True),
    ]
    expected = [each if isinstance(each, int) else list(astuple(each)) for each in told]
    assert [json.loads(rank.stdout or "null") for rank in ranks] == [expected] * 3, ranks[0].stderr
    assert [rank.returncode for rank in ranks] == [0, -9, 0], ranks[0].stderr


@pytest.mark.parametrize(
    "bad_samples", [_MOST_BAD_SAMPLES - 1, _MOST_BAD_SAMPLES, _MOST_BAD_SAMPLES + 1, 10**9]
)
def test_more_bad_samples_than_fit_into_the_shared_number_count_as_the_most(bad_samples: int) -> None:
    packed = _packed((0, 1, 0, 0, 1, bad_samples))
    assert packed < 1 << NUM_BITS
    assert _total([packed]) == (0, 1, 0, 0, 1, min(bad_samples, _MOST_BAD_SAMPLES))
