"""The test cluster does what the other tests rely on, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.runs import REPOSITORY, wait_for
from tests.slurm import host, processes
from tests.slurm.cluster import Cluster
from tests.slurm.fixtures import REQUIRED, leave_out
from tests.slurm.host import claimed_ports, slurm_version
from tests.slurm.ordinary_user import OrdinaryUser
from tests.slurm.runs import grace, high_job, preempt, sbatch, squeue, state, wait_for_state
from tests.waiting import HANG_LIMIT_S

LIMIT_S = HANG_LIMIT_S


def _living_jobs(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%i").split()


def _wait_for_line(path: Path, *lines: str) -> None:
    wait_for(lambda: path.exists() and set(lines) <= set(path.read_text().split("\n")), str(path), LIMIT_S)


def test_a_step_runs_on_two_nodes(any_cluster: Cluster, tmp_path: Path) -> None:
    wrap = "srun sh -c 'echo $SLURMD_NODENAME:$SLURM_LOCALID'"
    job = sbatch(any_cluster, "-N2", "--ntasks-per-node=2", wrap=wrap, folder=tmp_path)
    assert wait_for_state(any_cluster, job, "COMPLETED", "FAILED") == "COMPLETED"
    lines = (tmp_path / f"{job}.out").read_text().split()
    assert sorted(lines) == ["n1:0", "n1:1", "n2:0", "n2:1"]


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_of_jobs_are_forked_from_a_warm_process(cluster: Cluster, tmp_path: Path) -> None:
    rank = [sys.executable, "-m", "tests.start_facts", "one"]
    wrap = f"srun {shlex.join(warm.forking_task(rank))}"
    # srun's own messages would be written into the middle of a line.
    options = (f"--chdir={REPOSITORY}", f"--error={tmp_path}/errors")
    job = sbatch(cluster, *options, wrap=wrap, folder=tmp_path)
    assert wait_for_state(cluster, job, "COMPLETED", "FAILED") == "FAILED"  # with the rank's own exit code
    assert json.loads((tmp_path / f"{job}.out").read_text().splitlines()[0])["has torch"]


def test_gpus_are_given_out(cluster: Cluster, tmp_path: Path) -> None:
    wrap = "echo $CUDA_VISIBLE_DEVICES; sleep 600"
    first = sbatch(cluster, "--nodelist=n1", "--gres=gpu:3", wrap=wrap, folder=tmp_path)
    _wait_for_line(tmp_path / f"{first}.out", "0,1,2")
    second = sbatch(cluster, "--nodelist=n1", "--gres=gpu:1", wrap=wrap, folder=tmp_path)
    _wait_for_line(tmp_path / f"{second}.out", "3")
    third = sbatch(cluster, "--nodelist=n1", "--gres=gpu:1", wrap=wrap)
    wait_for(lambda: squeue(cluster)[third].reason == "Resources", "a job that waits for a GPU", LIMIT_S)


_STAYS = "echo restart ${SLURM_RESTART_COUNT:-0}; while :; do sleep 0.1; done"


def test_preemption_asks_ranks_to_leave(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks at once, the batch script only after the grace; if all leave, Slurm requeues from 24.05 on."""
    ranks = f"trap 'echo asked; exit 75' TERM; {_STAYS}"
    wrap = f"trap 'echo script asked' TERM; srun sh -c {shlex.quote(ranks)}; echo srun $?; exit 3"
    leaves = sbatch(cluster, "--nodelist=n1", "--exclusive", "--requeue", wrap=wrap, folder=tmp_path)
    _wait_for_line(tmp_path / f"{leaves}.out", "restart 0")
    with high_job(cluster, ["n1"]) as job:
        _wait_for_line(tmp_path / f"{leaves}.out", "asked", "srun 75")
        wait_for_state(cluster, job, "RUNNING")
        assert squeue(cluster)[job].nodes == "n1"
    end = "FAILED" if slurm_version() < (24, 5) else "PENDING"
    assert wait_for_state(cluster, leaves, "FAILED", "PENDING") == end
    assert "script asked" not in (tmp_path / f"{leaves}.out").read_text()


def test_preemption_requeues_what_stays(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodelist=n1", "--exclusive", "--requeue", "--open-mode=append")
    ranks = f"trap '' TERM; {_STAYS}"
    wrap = f"trap '' TERM; srun sh -c {shlex.quote(ranks)}"
    with grace(cluster, 1):
        job = sbatch(cluster, *options, wrap=wrap, folder=tmp_path)
        _wait_for_line(tmp_path / f"{job}.out", "restart 0")
        with high_job(cluster, ["n1"]) as above:
            wait_for_state(cluster, job, "PENDING")
            wait_for_state(cluster, above, "RUNNING")


def test_accounting_is_there_or_not(cluster: Cluster, cluster_without_accounting: Cluster) -> None:
    job = sbatch(cluster, wrap="exit 3")
    wait_for_state(cluster, job, "FAILED")
    words = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "state,exitcode")
    wait_for(lambda: cluster.run(*words).strip() == "FAILED|3:0", "sacct's record", LIMIT_S)
    with pytest.raises(RuntimeError, match="accounting storage is disabled"):
        cluster_without_accounting.run("sacct", "-j", "1")
    config = cluster_without_accounting.run("scontrol", "show", "config")
    (line,) = [line for line in config.splitlines() if line.startswith("AccountingStorageType ")]
    assert line.partition("= ")[2] in {"accounting_storage/none", "(null)"}, "22.05; 24.11, 26.05"


def test_unknown_accounts_are_refused(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="Invalid account"):
        sbatch(cluster, "--account=nobody", wrap="true")


# tests/slurm/test_recovery.py kills a node that comes back.
@pytest.mark.soak
def test_a_killed_node_loses_its_own_steps_only_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    wrap = "echo $SLURMD_NODENAME; srun sh -c 'echo rank on $SLURMD_NODENAME; sleep 600'"
    away = sbatch(cluster, "-N2", "--nodelist=n2,n3", "--requeue", wrap=wrap, folder=tmp_path)
    beside = sbatch(cluster, "--nodelist=n4", wrap="srun sh -c 'echo up; sleep 600'", folder=tmp_path)
    _wait_for_line(tmp_path / f"{away}.out", "n2", "rank on n2", "rank on n3")
    _wait_for_line(tmp_path / f"{beside}.out", "up")
    steps = {node: processes.daemons(cluster.folder, f"slurmd-{node}.log") for node in ("n2", "n3", "n4")}
    assert [len(pids) for pids in steps.values()] == [3, 2, 3]  # slurmd, the batch script's, srun's

    cluster.kill_node("n3")

    assert processes.daemons(cluster.folder, "slurmd-n3.log") == []
    assert processes.daemons(cluster.folder, "slurmd-n4.log") == steps["n4"]
    assert len(processes.of_jobs(cluster.conf, "n3")) > 0, "ranks live on"
    wait_for_state(cluster, away, "PENDING", "CONFIGURING")
    assert state(cluster, beside) == "RUNNING"
    cluster.clear()
    assert _living_jobs(cluster) == []
    assert processes.of_jobs(cluster.conf) == []
    job = sbatch(cluster, "--nodelist=n3", wrap="true")
    wait_for_state(cluster, job, "COMPLETED")


def test_a_node_killed_with_its_jobs_leaves_no_process(cluster: Cluster, tmp_path: Path) -> None:
    job = sbatch(
        cluster, "--nodelist=n2", wrap="setsid sleep 600 & env -i sleep 601 & echo up; wait", folder=tmp_path
    )
    _wait_for_line(tmp_path / f"{job}.out", "up")
    cluster.kill_node("n2", with_jobs=True)
    assert processes.of_jobs(cluster.conf, "n2") == []


def test_a_stopped_controller_refuses_and_a_frozen_one_is_silent(cluster: Cluster) -> None:
    job = sbatch(cluster, wrap="sleep 600")
    with cluster.without("slurmctld"), pytest.raises(RuntimeError, match="Unable to contact"):
        cluster.run("squeue")
    assert state(cluster, job) in {"PENDING", "RUNNING"}
    with cluster.frozen("slurmctld"), pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["squeue"], env=os.environ | cluster.environment, timeout=1, check=False)
    assert job in squeue(cluster)


def test_clear_brings_all_back(cluster: Cluster) -> None:
    for node in ("n1", "n2"):
        sbatch(cluster, f"--nodelist={node}", wrap="trap '' TERM; while :; do sleep 0.1; done")
    sbatch(cluster, "--array=0-5%1", "--hold", wrap="true")
    cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    preempt(cluster, ["n1"])
    cluster.run("scontrol", "update", "PartitionName=low", "State=DOWN", "GraceTime=77")
    with cluster.without("slurmctld"):  # which saves that as it ends
        pass
    cluster.kill("slurmctld")
    cluster.kill("slurmd-n3")
    cluster.clear()
    assert _living_jobs(cluster) == []
    low = cluster.run("scontrol", "show", "partition", "low")
    assert "State=UP" in low and f"GraceTime={cluster.settings.grace_s}" in low
    assert cluster.run("sinfo", "-h", "-p", "low", "-o", "%D %t").split() == ["4", "idle"]


def test_an_ordinary_user_submits(cluster: Cluster, ordinary_user: OrdinaryUser) -> None:
    name, home = ordinary_user.name, ordinary_user.home
    job = sbatch(cluster, wrap="id -un", user=name, folder=home)
    wait_for_state(cluster, job, "COMPLETED")
    assert (home / f"{job}.out").read_text().split() == [name]
    assert name in cluster.run("sacct", "-n", "-X", "-j", job, "-o", "user%20", user=name)
    if ordinary_user.python:
        words = [str(ordinary_user.python), "-m", "hpc_train", "--help"]
        assert "submit" in cluster.run(*words, user=name, variables=ordinary_user.environment)


def test_a_missing_slurm_skips_tests_or_fails_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PROGRAMS", ("no-such-program",))
    assert "no-such-program" in host.why_not()
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no reason"):
        leave_out("no reason")
    monkeypatch.delenv(REQUIRED)
    with pytest.raises(pytest.skip.Exception, match="no reason"):
        leave_out("no reason")


def test_two_clusters_that_start_at_once_choose_other_ports() -> None:
    (one, ports), (other, others) = claimed_ports(), claimed_ports()
    with one, other:
        assert not set(ports) & set(others)
    with socket.create_server(("", ports[3])):
        again, found = claimed_ports()
        again.close()
        assert ports[3] not in found


_STARTS_AND_WAITS = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
import time
from tests.slurm.cluster import running
from tests.slurm.configuration import Settings
with running(Settings(accounting=False)) as cluster:
    cluster.run("sbatch", "-N2", "--output=/dev/null", "--wrap=srun setsid sleep 600")
    print(cluster.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_its_starter(number: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTS_AND_WAITS],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with starter:
        assert starter.stdout
        folder = Path(starter.stdout.readline().decode().strip())
        wait_for(lambda: len(processes.of_jobs(folder / "slurm.conf")) > 3, "ranks", LIMIT_S)
        os.kill(starter.pid, number)
    wait_for(lambda: not folder.exists(), "the end of the cluster's files", LIMIT_S)
    assert processes.daemons(folder) == []
    assert processes.of_jobs(folder / "slurm.conf") == []
