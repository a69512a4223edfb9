"""A node that computes wrongly, on a real Slurm: named, excluded, and its steps undone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpc_train.run.checkpoints import is_set_aside
from tests.end_to_end.flips import FLIP, FLIPS_ON
from tests.end_to_end.node_faults import SlurmSweep
from tests.end_to_end.runs import assert_equal_to_the_bit
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    ENVIRONMENT,
    TWO_RANKS,
    account,
    records,
    standing_of,
    submit_one,
    wait_for_attempt_end,
    wait_for_completion,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = TWO_RANKS.replace("tests.end_to_end.paced:net", "tests.end_to_end.flips:net")
EVERY = 5
KEYS = (f"recovery.verify_every_steps={EVERY}", "checkpoint.every_steps=4")


@pytest.fixture
def first_wrong(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make node n2 flip a bit of a gradient in every micro-batch from a random step on; return the step."""
    step = random.randint(2, 50)
    monkeypatch.setenv(FLIP, f"gradient:{step}-60:0-3:head:18")
    monkeypatch.setenv(FLIPS_ON, "n2")
    return step


@pytest.mark.fault(68)
def test_a_node_that_computes_wrongly_is_left_out(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path, first_wrong: int
) -> None:
    paths = submit_one(tmp_path, *KEYS, "slurm.nodes=3", text=TEXT)
    wait_for_completion(paths)
    second, (first, *_) = wait_for_attempt_end(paths, 2), records(paths)
    compared = -(-(first_wrong - 1) // EVERY) * EVERY + 1
    words = (
        f"failed its check: rank 1 computed wrong numbers in step {compared}: the gradient of head.weight in"
    )
    assert (first.hosts, first.cause) == (["n1", "n2", "n3"], "bad node"), account(paths)
    assert (first.reason or "").startswith(f"crash 1 of 3: n2 {words}"), (first_wrong, first.reason)
    assert list(first.bad_nodes) == ["n2"] and standing_of(paths)["excluded_nodes"].keys() == {"n2"}
    assert (second.hosts, second.cause) == (["n1", "n3", "n4"], "completed"), account(paths)
    trusted = int(second.checkpoints[0].removeprefix("step-")) if second.checkpoints else 0
    assert trusted <= compared - 1 - EVERY < trusted + 4, (first_wrong, second.checkpoints)
    set_aside = [folder.name for folder in paths.checkpoints.iterdir() if is_set_aside(folder)]
    assert len(set_aside) >= 1 and all(name.endswith(".unverified") for name in set_aside)
    assert_equal_to_the_bit(quiet_runs.of(text=TEXT, ranks=3, environment=ENVIRONMENT), paths)


@pytest.mark.parametrize("seed", [23, 40, pytest.param(60, marks=pytest.mark.soak)])
def test_a_bit_in_the_state_of_one_node_is_noticed(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """In a moment at the last step, in a weight and in a moment; ``make verify-faults`` has all faults."""
    result = SlurmSweep(tmp_path, cluster).verified(seed)
    assert not result.error, f"{result.line()}\n{result.error}"


@pytest.mark.fault(68)
def test_of_two_nodes_that_differ_both_are_left_out_at_the_second_time(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path, first_wrong: int
) -> None:
    paths = submit_one(tmp_path, *KEYS, text=TEXT)
    wait_for_completion(paths)
    third, (first, second, *_) = wait_for_attempt_end(paths, 3), records(paths)
    assert [record.cause for record in (first, second, third)] == ["bad node", "bad node", "completed"]
    assert first.hosts == second.hosts == ["n1", "n2"] and second.in_place, account(paths)
    assert "ranks 0, 1 compute different numbers in step" in (first.reason or "")
    assert first.bad_nodes.keys() == second.bad_nodes.keys() == {"n1", "n2"}
    assert third.hosts == ["n3", "n4"], account(paths)
    assert_equal_to_the_bit(quiet_runs.of(text=TEXT, environment=ENVIRONMENT), paths)
