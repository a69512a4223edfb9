"""Seeded faults on runs of this machine and on a real Slurm: each ends as the uninterrupted run.

``HPC_TRAIN_FAULT_SEEDS=1-20`` takes other seeds than the sample that ``make test`` does.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import COMPILED, assert_equal_to_the_bit, hpc_train, write_experiment
from tests.faults.driver import survive
from tests.faults.local import EXPERIMENT, seeds, survive_here
from tests.faults.on_slurm import SlurmRun, submitted
from tests.faults.schedule import Frame, Schedule, chosen_seeds
from tests.faults.soak import soak
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import ENVIRONMENT
from tests.slurm.fixtures import leave_out
from tests.slurm.host import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.fault(1, 47)
@seeds
def test_signals(seed: int, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    survive_here("signals", seed, quiet_runs, tmp_path)


@pytest.mark.fault(5)
@seeds
def test_two_signals(seed: int, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    survive_here("two signals", seed, quiet_runs, tmp_path)


@pytest.mark.fault(16, 48)
@seeds
def test_kills(seed: int, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    survive_here("kills", seed, quiet_runs, tmp_path)


@pytest.mark.fault(7)
@seeds
def test_a_full_disk(seed: int, quiet_runs: QuietRuns, tmp_path: Path, small_disk: Path) -> None:
    survive_here("full disk", seed, quiet_runs, tmp_path)


@pytest.mark.fault(17)
@seeds
def test_a_rank_that_hangs(seed: int, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    survive_here("hang", seed, quiet_runs, tmp_path, "recovery.hang_after_min=0.15")


@pytest.mark.fault(43)
def test_a_full_home(quiet_runs: QuietRuns, tmp_path: Path, small_disk: Path) -> None:
    """Caches, also that of compiled code, are elsewhere; whatever else needs a home works without it."""
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HPC_TRAIN_CACHE")
    environment = {name: str(small_disk) for name in homes} | ENVIRONMENT
    environment["HPC_TRAIN_RUNS"] = str(tmp_path / "elsewhere")
    experiment = write_experiment(tmp_path)
    done = hpc_train("submit", experiment, *COMPILED, "--local", "--devices", "1", "--json", **environment)
    assert done.code == 0, done.err
    run = submitted(done)
    assert list((run.cache / "inductor").rglob("*.cpp")), "nothing was compiled"
    assert_equal_to_the_bit(quiet_runs.of(*COMPILED, ranks=1), run)
    assert list(small_disk.iterdir()) == [ballast]


# --- on a real Slurm


SLURM = "slurm: {{partition: low, nodes: 2, ranks_per_node: {}, time_limit: 30min}}\n"


def survive_on(
    cluster: Cluster,
    kind: str,
    seed: int,
    quiet_runs: QuietRuns,
    folder: Path,
    *,
    strategy: str,
    pace_s: float = 0.0,
    ranks_per_node: int = 1,
) -> None:
    """Let the faults of a seed strike a run on two nodes: of one rank each where more make no difference.

    Each rank takes seconds of two cores to start.
    """
    frame = Frame(ranks=2 * ranks_per_node, nodes=2, first=3, last=22)
    text = EXPERIMENT + f"parallel: {{strategy: {strategy}}}\n" + SLURM.format(ranks_per_node)
    expected = quiet_runs.of(text=text, ranks=frame.ranks, environment=ENVIRONMENT)
    run = SlurmRun(cluster, folder, text, pace_s=pace_s)
    survive(run, Schedule.of(seed, kind, frame).faults, expected)


@pytest.mark.slurm
@pytest.mark.fault(1, 16)
@seeds
def test_preemption_and_signals(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    cluster = cluster_without_accounting
    survive_on(cluster, "preemption", seed, quiet_runs, tmp_path, strategy="fsdp")


@pytest.mark.slurm
@pytest.mark.fault(16)
@seeds
def test_a_requeue_by_hand_and_ranks_of_a_node(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    cluster = cluster_without_accounting
    survive_on(cluster, "requeue", seed, quiet_runs, tmp_path, strategy="ddp", ranks_per_node=2)


@pytest.mark.slurm
@pytest.mark.fault(16, 33)
# As slow as a user's: a slurmctld that is killed seconds after the job started has not saved that it runs.
@pytest.mark.usefixtures("fresh_ranks")
@seeds
def test_a_controller_that_dies(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    cluster = cluster_without_accounting
    survive_on(cluster, "daemons", seed, quiet_runs, tmp_path, pace_s=0.1, strategy="ddp")


@pytest.mark.slurm
@pytest.mark.soak
@pytest.mark.fault(14, 15)
@seeds
def test_a_node_that_dies(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Its ranks may outlive it: they may not be done before Slurm has given it up."""
    cluster = cluster_without_accounting
    survive_on(cluster, "node", seed, quiet_runs, tmp_path, strategy="ddp")


@pytest.mark.slurm
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.fault(1, 4, 5, 6, 14, 16, 36)
def test_soak() -> None:
    """As `make soak` does, with a few seeds more than nothing."""
    if why := why_not():
        leave_out(f"no Slurm to test with: {why}")
    assert soak(chosen_seeds("1-3"), parallel=3) == []
