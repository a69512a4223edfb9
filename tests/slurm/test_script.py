"""The batch script on a real Slurm: it comes back after a preemption, and only its own task does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.launchers.slurm import sbatch, script
from hpc_train.launchers.slurm.profiles import Profile
from hpc_train.launchers.slurm.submission import Batch
from tests.launchers.slurm.scripts import fake_batch
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.slurm.runs import field, high_job
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow
LIMIT_S = HANG_LIMIT_S


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


#: Leaves when it is preempted; started again, it ends with the code that the file `last` holds.
PREEMPTED_ONCE = """\
import os, pathlib, signal, sys
folder = pathlib.Path(os.environ["HPC_TRAIN_RUN_FOLDER"]).parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
with (folder / "ranks").open("a") as file:
    file.write(f"0 {restart}\\n")
if restart == "0":
    signal.pause()
sys.exit(int((folder / "last").read_text()))
"""


@pytest.mark.fault(1, 36)
@pytest.mark.parametrize("code", [0, 65])
def test_a_job_that_ends_after_a_preemption_is_not_requeued_by_slurm(
    code: int, cluster: Cluster, tmp_path: Path
) -> None:
    """From 24.05 on Slurm requeues a preempted job when its batch script exits, also long after."""
    batch = fake_batch(tmp_path, slurm={"partition": "low"})
    rank = tmp_path / ".code/content/package/hpc_train/launchers/slurm/rank.py"
    rank.write_text(PREEMPTED_ONCE)
    (batch.submission / "last").write_text(str(code))
    job = submit(cluster, batch)
    cluster.wait(lambda: ranks(batch) == ["0 0"], "a rank", LIMIT_S)
    with high_job(cluster, NODES):
        cluster.wait(lambda: field(cluster, job, "Restarts") == "1", "the requeue", LIMIT_S)
    cluster.wait(lambda: len(ranks(batch)) == 2, "the second start", LIMIT_S)
    on_its_nodes = {"RUNNING", "COMPLETING"}
    cluster.wait(lambda: field(cluster, job, "JobState") not in on_its_nodes, "its end", LIMIT_S)
    assert (field(cluster, job, "JobState"), field(cluster, job, "Restarts")) in {
        ("COMPLETED" if code == 0 else "FAILED", "1"),
        ("PREEMPTED", "1"),
    }
    assert ranks(batch) == ["0 0", "0 1"]


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


def test_a_set_up_line_that_fails_starts_no_rank(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lines print is read from the file that Slurm writes its output to."""
    profile = Profile(setup=["source /not/there.sh"])
    monkeypatch.setattr("hpc_train.launchers.slurm.profiles.find", lambda *_: profile)
    batch = fake_batch(tmp_path)
    job = submit(cluster, batch)
    wait_for_the_end(cluster)
    assert field(cluster, job, "ExitCode") == "1:0"
    (output,) = batch.submission.glob("*_log.out")
    assert "setup: `source /not/there.sh` ended with exit code 1" in output.read_text()
    assert ranks(batch) == []


def test_an_array_waits_until_it_is_released(cluster: Cluster, tmp_path: Path) -> None:
    batch = fake_batch(tmp_path / "ru ns", held=True)
    job = sbatch.sbatch(batch, 2)
    assert "JobHeldUser" in cluster.run("squeue", "--noheader", "--format=%r")
    cluster.run("scontrol", "release", job)
    wait_for_the_end(cluster)
    assert ranks(batch) == ["0 0", "0 0"]
