"""Nodes that lost a GPU, and ranks that NCCL aborts over a device's error, on a real Slurm without GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import aborts, fake_cuda
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import rows
from tests.lost_gpus import library
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import (
    TWO_RANKS,
    account,
    records,
    submit_one,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.test_end_to_end import preempting
from tests.slurm.test_recovery import standing_of, wait_for_attempt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Slurm gives each node two GPUs, for one rank.
GPUS = ("slurm.gpus_per_node=2", "slurm.ranks_per_node=1")
RANK_SITE = str(Path(__file__).with_name("rank_site"))


#: Each rank takes tenths of a second of CPU time for a step on a stand-in.
SHORT = ("optimization.steps=10", "optimization.schedule.warmup_steps=4")


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """Fork ranks with stand-ins for GPUs; set up before ``cluster``, which tells jobs where."""
    if problem := fake_cuda.why_not():
        pytest.skip(problem)
    with fake_cuda.forking():
        yield


def use_stand_ins(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    for name, value in fake_cuda.environment(devices).items():
        monkeypatch.setenv(name, value)


# The next test, and test_recovery.py for a first attempt.
@pytest.mark.soak
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


@pytest.mark.fault(50, 54)
@pytest.mark.usefixtures("stand_ins")
def test_a_run_survives_a_device_that_hangs_and_a_node_that_loses_a_gpu_before_a_restart(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks train on stand-ins for GPUs, two per node, which complete nothing from step 5 on."""
    use_stand_ins(monkeypatch, 2)
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("FAKE_CUDA_HANGS", str(hangs))
    monkeypatch.setenv("FAKE_CUDA_LOST", str(tmp_path / "lost"))
    own = (*GPUS, *SHORT, "recovery.hang_after_min=0.4", "device=cuda")
    with Hold(tmp_path, 5) as hold:
        paths = submit_one(tmp_path, *own, hold.override, text=TWO_RANKS)
        wait_for_step(paths, 5)
        hangs.touch()
        hold.at(8, since_attempt=2)
        first = wait_for_attempt_end(paths, 1)
        hangs.unlink()
        assert first.cause == "hang" and "waiting for the device" in (first.reason or ""), account(paths)

        assert wait_for_attempt(paths, 2) == ["n1", "n2"]
        wait_for_step(paths, 8)
        with preempting(cluster, paths):
            assert wait_for_attempt_end(paths, 2).cause == "preemption", account(paths)
            (tmp_path / "lost-n3").touch()
            assert wait_for_attempt(paths, 3) == ["n3", "n4"], "the other two nodes"
    wait_for_state(paths, "completed", "failed")
    last = wait_for_attempt_end(paths, 4)
    assert [record.cause for record in records(paths)] == ["hang", "preemption", "bad node", "completed"]
    assert "n3" not in last.hosts
    reason = "failed its check: torch finds 1 of the 2 GPUs that Slurm gave it"
    assert standing_of(paths)["excluded_nodes"] == {"n3": reason}
    assert [row["step"] for row in rows(paths, "train")] == list(range(1, 11)), "resumed from the checkpoint"
    assert "on 2 × cuda:0" in paths.attempt(4).log(0).read_text()


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
    paths = submit_one(tmp_path, *SHORT, text=text)
    first = wait_for_attempt_end(paths, 1)
    assert first.cause == "crash", account(paths)
    reason = f"rank 1 on n2: killed by SIGABRT: {aborts.DEVICE_LINE}"
    assert (first.reason or "").endswith(reason)
    assert first.bad_nodes == {"n2": f"rank 1: {aborts.DEVICE_LINE}"}
    wait_for_state(paths, "completed")


@pytest.mark.fault(53)
@pytest.mark.usefixtures("fresh_ranks")
def test_ranks_that_can_not_connect_name_the_interface_and_the_run_resumes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch()
    monkeypatch.setenv("WRONG_NETWORK", str(wrong))
    monkeypatch.setenv("PYTHONPATH", RANK_SITE)
    paths = submit_one(tmp_path, *SHORT, "recovery.hang_after_min=0.1", text=TWO_RANKS)
    first = wait_for_attempt_end(paths, 1)
    wrong.unlink()
    assert first.cause == "hang", account(paths)
    assert "gloo can't connect over its interface" in (first.reason or "")
    assert "network_interface (GLOO_SOCKET_IFNAME)" in (first.reason or "")
    wait_for_state(paths, "completed", "failed")
    assert wait_for_attempt_end(paths, 2).cause == "completed", account(paths)


@pytest.mark.fault(52)
def test_each_rank_of_a_node_has_its_own_mig_device(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process one MIG device only, whatever CUDA_VISIBLE_DEVICES names."""
    if problem := fake_cuda.why_not():
        pytest.skip(problem)
    use_stand_ins(monkeypatch, 1)
    monkeypatch.setenv("VISIBLE_TO_RANKS", "MIG-1111,MIG-2222")
    monkeypatch.setenv("PYTHONPATH", RANK_SITE)
    model = f'model={{name: "tests.slurm.visible:net", args: {{folder: "{tmp_path}"}}}}'
    two = ("slurm.nodes=1", "slurm.ranks_per_node=2", "slurm.gpus_per_node=2", "device=cuda")
    one_step = ("optimization.steps=1", "optimization.schedule={name: constant}", "evaluation=null")
    paths = submit_one(tmp_path, *two, *one_step, model, text=TWO_RANKS)
    wait_for_completion(paths)
    visible = [(tmp_path / f"visible-{rank}").read_text() for rank in range(2)]
    assert visible == ["MIG-1111", "MIG-2222"]
