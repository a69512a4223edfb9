"""Nodes that lost a GPU, and ranks that NCCL aborts over a device's error, on a real Slurm without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import aborts
from tests.lost_gpus import library
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    TWO_RANKS,
    account,
    records,
    submit_one,
    wait_for_attempt_end,
    wait_for_state,
)
from tests.slurm.test_recovery import standing_of, wait_for_attempt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Slurm gives each node two GPUs, for one rank.
GPUS = ("slurm.gpus_per_node=2", "slurm.ranks_per_node=1")


@pytest.mark.fault(50)
@pytest.mark.usefixtures("fresh_ranks")
def test_a_node_that_lost_a_gpu_is_left_out(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(library(tmp_path)))
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_GPUS_n1", "1")
    paths = submit_one(tmp_path, *GPUS, text=TWO_RANKS)
    assert "n1" not in wait_for_attempt(paths, 2), account(paths)
    first = records(paths)[0]
    how = "failed its check: torch finds 1 of the 2 GPUs that Slurm gave it"
    assert (first.hosts, first.cause) == (["n1", "n2"], "bad node"), account(paths)
    assert (first.reason, first.bad_nodes) == (f"crash 1 of 3: n1 {how}", {"n1": how})
    assert standing_of(paths)["excluded_nodes"] == {"n1": how}


@pytest.mark.fault(50)
@pytest.mark.usefixtures("fresh_ranks")
def test_where_no_node_has_its_gpus_a_first_attempt_is_final(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(library(tmp_path)))
    monkeypatch.setenv("FAKE_GPUS", "e802")
    paths = submit_one(tmp_path, *GPUS, text=TWO_RANKS)
    assert wait_for_state(paths, "failed", "completed", "requeued") == "failed", account(paths)
    (record,) = records(paths)
    assert (record.cause, record.bad_nodes) == ("user error", {}), account(paths)
    words = "all 2 nodes fail alike, so no single node is the cause: torch finds 0 of the 2 GPUs"
    assert (record.reason or "").startswith(words)
    assert "Error 802: system not yet initialized" in (record.reason or "")


@pytest.mark.fault(51)
def test_a_device_error_behind_nccls_abort_is_blamed_on_its_node(cluster: Cluster, tmp_path: Path) -> None:
    text = TWO_RANKS.replace("tests.end_to_end.paced:net", "tests.slurm.aborting:net")
    paths = submit_one(tmp_path, text=text)
    first = wait_for_attempt_end(paths, 1)
    assert first.cause == "crash", account(paths)
    reason = f"rank 1 on n2: killed by SIGABRT: {aborts.DEVICE_LINE}"
    assert (first.reason or "").endswith(reason)
    assert first.bad_nodes == {"n2": f"rank 1: {aborts.DEVICE_LINE}"}
    wait_for_state(paths, "completed")
