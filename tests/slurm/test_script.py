"""The batch script on a real Slurm: it comes back after a preemption, and only its own task does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launchers.slurm import script
from hpc_train.launchers.slurm.script import Batch
from tests.launchers.slurm.scripts import fake_batch
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slow
LIMIT_S = 120.0


def submit(cluster: Cluster, batch: Batch, runs: int = 1) -> str:
    path = batch.submission / "script.sh"
    path.write_text(script.script_text(batch, runs))
    return cluster.run("sbatch", "--parsable", str(path)).strip()


def wait_for_the_end(cluster: Cluster) -> None:
    cluster.wait(lambda: not cluster.run("squeue", "--noheader", "--format=%i"), "end of all jobs", LIMIT_S)


def ranks(batch: Batch) -> list[str]:
    """Return ``rank restart`` of each rank that ran, sorted."""
    path = batch.submission / "ranks"
    return sorted(line[:3] for line in path.read_text().splitlines()) if path.exists() else []


def test_ranks_that_stopped_for_now_are_started_again_by_the_script(cluster: Cluster, tmp_path: Path) -> None:
    batch = fake_batch(tmp_path / "ru ns'", slurm={"nodes": 2, "ranks_per_node": 2, "partition": "low"})
    (batch.submission / "rank").write_text("75 75 0")
    job = submit(cluster, batch)
    wait_for_the_end(cluster)
    assert ranks(batch) == [f"{rank} {restart}" for rank in range(4) for restart in range(3)]
    assert "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job)


def test_of_an_array_only_the_task_that_asks_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    # The last task has the array's own number; a requeue by that would take all of them along.
    batch = fake_batch(tmp_path)
    rank = tmp_path / ".code/content/package/hpc_train/launchers/slurm/rank.py"
    rank.write_text(
        f"import os, sys, time\n"
        f"task, restart = os.environ['SLURM_ARRAY_TASK_ID'], os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        f"open({str(batch.submission / 'ranks')!r}, 'a').write(task + ' ' + restart + '\\n')\n"
        f"time.sleep(0 if task == '2' else 5)\n"
        f"sys.exit(75 if task == '2' and restart == '0' else 0)\n"
    )
    submit(cluster, batch, runs=3)
    wait_for_the_end(cluster)
    assert ranks(batch) == ["0 0", "1 0", "2 0", "2 1"]


@pytest.mark.fault(46)
def test_a_cancelled_job_does_not_come_back(cluster: Cluster, tmp_path: Path) -> None:
    batch = fake_batch(tmp_path)
    rank = tmp_path / ".code/content/package/hpc_train/launchers/slurm/rank.py"
    rank.write_text(
        f"import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open({str(batch.submission / 'ranks')!r}, 'a').write('0 0\\n')\n"
        f"time.sleep(100)\n"
    )
    job = submit(cluster, batch)
    cluster.wait(lambda: ranks(batch) == ["0 0"], "a rank", LIMIT_S)
    cluster.run("scancel", job)
    wait_for_the_end(cluster)
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", job)
    assert ranks(batch) == ["0 0"]
    assert not (batch.submission / "code").exists()


def test_submitit_places_what_the_ranks_start(cluster: Cluster, tmp_path: Path) -> None:
    batch = fake_batch(tmp_path / "ru ns", held=True)
    jobs = script.executor(batch).submit_array([print, print])
    assert "JobHeldUser" in cluster.run("squeue", "--noheader", "--format=%r")
    cluster.run("scontrol", "release", jobs[0].job_id.partition("_")[0])
    wait_for_the_end(cluster)
    assert ranks(batch) == ["0 0", "0 0"]
    assert all(job.paths.submitted_pickle.is_file() for job in jobs)
