"""``doctor`` and ``init`` on a real Slurm: planted faults are found, and a new file can be planned."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_train.launchers import machine_checks
from hpc_train.launchers.slurm import commands
from hpc_train.paths import runs_root
from tests.cli.commands import hpc_train
from tests.plan.files import EXPERIMENT
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.waiting import HANG_LIMIT_S

#: Lines of slurm.conf → what is planted instead.
_FAULTS = {
    "JobRequeue=1": "JobRequeue=0",
    "KillWait=10": "KillWait=1",
    "SlurmdTimeout=10": "SlurmdTimeout=0",
    "PriorityTier=1 PreemptMode=REQUEUE": "PriorityTier=1 PreemptMode=CANCEL",
    "GraceTime=60": "GraceTime=3",
    "MaxTime=00:10:00 State=UP": "MaxTime=00:10:00 State=DOWN",
    "InactiveLimit=0": "InactiveLimit=0\nRequeueExit=3",
}
#: A Python whose clock is an hour ahead, under a low limit of open files.
_WRONG_CLOCK = "import time\nright = time.time\ntime.time = lambda: right() + 3600\n"


def findings(*arguments: str) -> tuple[int, dict[str, str], str]:
    """Run ``doctor``; return its code, check → level of what is not ok, and all it found."""
    done = hpc_train("doctor", "--json", *arguments)
    assert done.out, done.err
    found = json.loads(done.out)["findings"]
    return done.code, {each["check"]: each["level"] for each in found if each["level"] != "ok"}, done.out


@contextmanager
def planted(cluster: Cluster) -> Iterator[None]:
    """The cluster with another configuration, and then with its own again."""
    before = cluster.conf.read_text()
    text = before
    for line, fault in _FAULTS.items():
        assert line in text, line
        text = text.replace(line, fault, 1)
    try:
        cluster.conf.write_text(text)
        cluster.run("scontrol", "reconfigure")
        yield
    finally:
        cluster.conf.write_text(before)
        cluster.run("scontrol", "reconfigure")


@contextmanager
def without_runs(cluster: Cluster, node: str) -> Iterator[None]:
    """A while in which an empty file system hides the folder of runs from the node."""
    cluster.kill(f"slurmd-{node}")
    hidden = f"mount -t tmpfs none {runs_root()} && exec slurmd -D -N {node} -f {cluster.conf}"
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", hidden], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        cluster.wait(lambda: cluster._answers(f"slurmd-{node}"), f"slurmd of {node}")
        yield
    finally:
        process.terminate()
        process.wait(HANG_LIMIT_S)
        cluster.start_node(node)


def test_planted_faults_are_found(
    cluster_without_accounting: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven of the configuration, four of nodes."""
    cluster = cluster_without_accounting
    monkeypatch.setattr(machine_checks, "this_machine", lambda **_: [])  # it is no part of the cluster
    with planted(cluster):
        code, found, said = findings()
    assert code == 1, said
    assert (
        found.items()
        >= {
            "slurm.exit-codes": "error",
            "slurm.grace": "warning",
            "slurm.kill-wait": "warning",
            "slurm.node-timeout": "error",
            "slurm.partition": "warning",
            "slurm.preempt-mode": "error",
            "slurm.requeue": "warning",
        }.items()
    ), said

    (tmp_path / "sitecustomize.py").write_text(_WRONG_CLOCK)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nulimit -n 200\nPYTHONPATH={tmp_path} exec {shutil.which("python3")} "$@"\n'
    )
    python.chmod(0o755)
    file = tmp_path / "exp.yaml"
    file.write_text(f"{EXPERIMENT}slurm: {{partition: low}}\nenvironment: {{python: {python}}}\n")
    code, found, said = findings(str(file), "--nodes", NODES[0])
    assert found["machine.clock"] == found["machine.nofile"] == "warning", said
    ahead = re.search(rf"node {NODES[0]}: its clock is (\d+) s ahead", said)
    # A busy machine adds the time between its two readings.
    assert ahead is not None and 3540 < int(ahead[1]) < 3660, said

    code, found, said = findings(str(file), "environment.python=/no/python", "--submit")
    assert (code, found["machine.python"]) == (1, "error"), said
    profiles = tmp_path / "profiles"
    profiles.mkdir(mode=0o755)
    (profiles / "site.yaml").write_text("setup: [export A=1, source /not/there.sh]\n")
    monkeypatch.setenv("HPC_TRAIN_PROFILES", str(profiles))
    code, found, said = findings(str(file), "slurm.profile=site", "--submit")
    assert (code, found["machine.modules"]) == (1, "error"), said
    assert "profile site: setup: `source /not/there.sh` ended with exit code 1" in said
    assert not runs_root().exists(), "made for the check"
    runs_root().mkdir()
    with without_runs(cluster, NODES[3]):
        code, found, said = findings("--nodes", NODES[3])
    assert (code, found["machine.runs"]) == (1, "error"), said
    assert "it is not there" in said
    assert not list(runs_root().iterdir()), "the folders of the checks are gone"
    cluster.wait(lambda: not cluster.run("squeue", "--noheader"), "the end of all jobs")


def test_each_pair_of_nodes_is_measured(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By names, and by a number of nodes that Slurm chooses."""
    monkeypatch.setattr(machine_checks, "this_machine", lambda **_: [])
    runs_root().mkdir(exist_ok=True)
    for nodes, pairs in (("n2,n[3-4]", ["n2-n3", "n2-n4", "n3-n4"]), ("2", ["n1-n2"])):
        done = hpc_train("doctor", "--json", "--nodes", nodes)
        found = {each["check"]: each for each in json.loads(done.out)["findings"]}["slurm.bandwidth"]
        assert found["level"] in {"ok", "warning"}, done.out  # the pairs share this machine with others
        assert "gloo" in found["what"]
        named = re.findall(r"(n\d-n\d) [\d.e+-]+", found["what"])
        assert named == pairs or (found["level"] == "warning" and set(named) < set(pairs))
    assert not list(runs_root().iterdir()), "the folders of the checks are gone"
    assert not commands.own_jobs()


def test_init_validate_and_plan_are_one_session(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "exp.yaml"
    done = hpc_train("init", "-o", file)
    assert done.code == 0, done.err
    text = file.read_text()
    assert "# partition low (default): 4 nodes with 4 GPUs, no time limit" in text
    assert "# accounts: test" in text
    assert "  partition: low " in text and "  gpus_per_node: 4 " in text
    assert hpc_train("validate", file).code == 0
    plan = json.loads(hpc_train("plan", file, "--json", "--script").out)
    assert plan["runs"][0]["ranks"] == 4
    assert "#SBATCH --partition=low" in plan["scripts"][0]
    cluster.run("sbatch", "--test-only", "--partition=low", "--gpus-per-node=4", "--wrap=true")


def test_a_job_that_cannot_start_is_cancelled(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "this_machine", lambda **_: [])
    cluster.run("scontrol", "update", "PartitionName=low", "State=DOWN")
    try:
        code, found, said = findings("--submit", "--wait-min", "0.01")
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", "State=UP")
    assert (code, found["slurm.submit"]) == (1, "warning"), said
    assert "still pending after 1 s (PartitionDown)" in said
    assert not commands.own_jobs()
