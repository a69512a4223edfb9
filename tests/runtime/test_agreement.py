"""All ranks stop and save at the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.runtime.agreement import SAVE, STOP, Agreement
from hpc_train.runtime.process_group import Group, Timeouts
from hpc_train.runtime.signals import StopFlag
from tests.runtime.scripts import run_script


@pytest.fixture
def alone() -> Group:
    # One rank alone exchanges nothing: no process group is there to be used.
    return Group(0, 1, torch.device("cpu"), None, None, None, Timeouts())  # type: ignore[arg-type]


def test_one_rank_agrees_with_itself(alone: Group) -> None:
    flag = StopFlag()
    agreement = Agreement(alone, flag)
    agreement.begin(save=True)
    assert agreement.wait() == SAVE
    agreement.begin()
    assert agreement.wait() == 0
    assert not agreement.poll()
    agreement.begin(save=True)
    flag.note(15)
    assert agreement.wait() == STOP | SAVE
    assert agreement.poll()
    assert agreement.rank_0_says(True)
    assert not agreement.rank_0_says(False)


@pytest.mark.slow
def test_ranks_agree_whoever_was_asked(tmp_path: Path) -> None:
    script = """
import json, os, signal, sys
from pathlib import Path
import torch
from hpc_train.runtime import signals
from hpc_train.runtime.agreement import Agreement
from hpc_train.runtime.process_group import join
from hpc_train.runtime.ranks import RankFacts
flag = signals.install()
facts = RankFacts.from_environment(os.environ)
group = join(facts, torch.device("cpu"), Path(sys.argv[1]), "token")
agreement = Agreement(group, flag)
agreed = []
def step(save=False):
    agreement.begin(save=save)
    agreed.append(agreement.wait())
step()
step(save=facts.rank == 0)
step(save=facts.rank != 0)
agreed.append(int(agreement.rank_0_says(facts.rank == 0)))
agreed.append(int(agreement.rank_0_says(facts.rank != 0)))
agreed.append(int(agreement.poll()))
if facts.rank == 2:
    os.kill(os.getpid(), signal.SIGTERM)
step()
step(save=True)
agreed.append(int(agreement.poll()))
print(json.dumps(agreed), flush=True)
group.leave()
os._exit(0)
"""
    ranks = run_script(script, 3, str(tmp_path / "rendezvous.json"))
    expected = [0, SAVE, 0, 1, 0, 0, STOP, STOP | SAVE, 1]
    assert [json.loads(rank.stdout or "null") for rank in ranks] == [expected] * 3, ranks[0].stderr
