"""Seeded faults on runs of this machine and on a real Slurm: each ends as the run that nothing happened to.

``HPC_TRAIN_FAULT_SEEDS=1-20`` takes other seeds than the sample that ``make test`` does.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import assert_equal_to_the_bit, hpc_train, write_experiment
from tests.faults.driver import assert_whole, complete, strike, survive
from tests.faults.faults import Kill
from tests.faults.on_slurm import SlurmRun, submitted
from tests.faults.runs import LocalRun
from tests.faults.schedule import Frame, Schedule, chosen_seeds
from tests.faults.shim import Shim, Touch
from tests.faults.soak import soak
from tests.quiet import QuietRuns
from tests.slurm.cluster import Cluster
from tests.slurm.experiments import ENVIRONMENT
from tests.slurm.fixtures import leave_out
from tests.slurm.host import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Steps of a tenth of a second: a run that is struck late on a busy machine is not over by then.
PACE_S = 0.04
EXPERIMENT = """\
name: digits
seed: 3
task: classification
model: {name: "tests.end_to_end.paced:net"}
data: {name: digits, augment: {hflip: 0.5, crop_padding: 2}}
optimization:
  steps: 40
  global_batch_size: 48
  micro_batch_size: 12
  optimizer: {name: adamw, lr: 0.003}
  schedule: {name: cosine, warmup_steps: 20}
  clip_grad_norm: 1.0
evaluation: {every_steps: 20}
checkpoint: {every_steps: 4}
recovery: {max_crashes: 100, max_without_progress: 100, exclude_nodes_for_h: 0}
logging: {every_steps: 1}
"""
LOCAL = Frame(ranks=2, nodes=1, first=3, last=22)
seeds = pytest.mark.parametrize("seed", chosen_seeds("1"))


def survive_here(kind: str, seed: int, quiet_runs: QuietRuns, folder: Path, *overrides: str) -> None:
    expected = quiet_runs.of(text=EXPERIMENT, ranks=LOCAL.ranks, environment=ENVIRONMENT)
    run = LocalRun(folder, EXPERIMENT, *overrides, pace_s=PACE_S)
    survive(run, Schedule.of(seed, kind, LOCAL).faults, expected)


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


@pytest.mark.fault(6, 13)
@seeds
def test_kills_while_a_checkpoint_is_written(
    seed: int, quiet_runs: QuietRuns, tmp_path: Path, shimmed: None
) -> None:
    survive_here("writes", seed, quiet_runs, tmp_path)


@pytest.mark.fault(7, 8)
@seeds
def test_no_room_and_no_quota(seed: int, quiet_runs: QuietRuns, tmp_path: Path, shimmed: None) -> None:
    survive_here("no room", seed, quiet_runs, tmp_path)


@pytest.mark.fault(9)
@seeds
def test_input_output_errors(seed: int, quiet_runs: QuietRuns, tmp_path: Path, shimmed: None) -> None:
    survive_here("input/output error", seed, quiet_runs, tmp_path)


@pytest.mark.fault(9)
def test_input_output_errors_beside_checkpoints(quiet_runs: QuietRuns, tmp_path: Path, shimmed: None) -> None:
    """A file server that is away for a moment while rows, log and status are written ends no attempt."""
    expected = quiet_runs.of(text=EXPERIMENT, ranks=LOCAL.ranks, environment=ENVIRONMENT)
    shim = Shim(tmp_path / "orders", ("status.json", "metrics.jsonl", "rank-0.log"))
    shim.order(0, 60, errno.ESTALE, 2, Touch.WRITE | Touch.SYNC | Touch.CREATE | Touch.RENAME)
    run = LocalRun(tmp_path, EXPERIMENT, shim=shim)
    complete(run)
    assert shim.has_struck(0) and run.attempt() == 1, run.account()
    assert_whole(run, expected)


@pytest.mark.fault(7)
@seeds
def test_a_full_disk(seed: int, quiet_runs: QuietRuns, tmp_path: Path, small_disk: Path) -> None:
    survive_here("full disk", seed, quiet_runs, tmp_path)


@pytest.mark.fault(17)
@seeds
def test_a_rank_that_hangs(seed: int, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    survive_here("hang", seed, quiet_runs, tmp_path, "recovery.hang_after_min=0.15")


@pytest.mark.fault(42)
def test_clocks_that_disagree(quiet_runs: QuietRuns, tmp_path: Path, shimmed: None) -> None:
    """Two hours between ranks, and the next attempt begins two hours before the one before."""
    expected = quiet_runs.of(text=EXPERIMENT, ranks=LOCAL.ranks, environment=ENVIRONMENT)
    run = LocalRun(tmp_path, EXPERIMENT, pace_s=PACE_S, FAULTS_CLOCK_S="7200,0")
    strike(run, Kill(step=11, ranks=(0, 1)), FAULTS_CLOCK_S="-7200,0")
    complete(run)
    assert_whole(run, expected)
    times = [json.loads(line)["time"] for line in run.paths.metrics.read_text().splitlines()]
    assert float(times[0]) > float(times[-1]) + 7200, "the ranks' clocks were right"


@pytest.mark.fault(43)
def test_a_full_home(quiet_runs: QuietRuns, tmp_path: Path, small_disk: Path) -> None:
    """Caches lie elsewhere, that of compiled code too, and what else wants a home does without."""
    short = EXPERIMENT.replace("steps: 40", "steps: 8").replace("warmup_steps: 20", "warmup_steps: 2")
    text = short + "compile: true\n"
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HPC_TRAIN_CACHE")
    environment = {name: str(small_disk) for name in homes} | ENVIRONMENT
    environment["HPC_TRAIN_RUNS"] = str(tmp_path / "elsewhere")
    experiment = write_experiment(tmp_path, text)
    done = hpc_train("submit", experiment, "--local", "--devices", "1", "--json", **environment)
    assert done.code == 0, done.err
    run = submitted(done)
    assert list((run.cache / "inductor").rglob("*.cpp")), "nothing was compiled"
    assert_equal_to_the_bit(quiet_runs.of(text=text, ranks=1, environment=ENVIRONMENT), run)
    assert list(small_disk.iterdir()) == [ballast]


# --- on a real Slurm


SLURM = "slurm: {partition: low, nodes: 2, ranks_per_node: 2, time_limit: 30min}\n"
ON_SLURM = Frame(ranks=4, nodes=2, first=3, last=22)


def survive_on(
    cluster: Cluster,
    kind: str,
    seed: int,
    quiet_runs: QuietRuns,
    folder: Path,
    *,
    pace_s: float,
    strategy: str,
) -> None:
    text = EXPERIMENT + f"parallel: {{strategy: {strategy}}}\n" + SLURM
    expected = quiet_runs.of(text=text, ranks=ON_SLURM.ranks, environment=ENVIRONMENT)
    run = SlurmRun(cluster, folder, text, pace_s=pace_s)
    survive(run, Schedule.of(seed, kind, ON_SLURM).faults, expected)


@pytest.mark.slurm
@pytest.mark.fault(1, 16)
@seeds
def test_preemption_and_signals(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    survive_on(
        cluster_without_accounting, "preemption", seed, quiet_runs, tmp_path, pace_s=0.1, strategy="fsdp"
    )


@pytest.mark.slurm
@pytest.mark.fault(16)
@seeds
def test_a_requeue_by_hand_and_ranks_of_a_node(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    cluster = cluster_without_accounting
    survive_on(cluster, "requeue", seed, quiet_runs, tmp_path, pace_s=0.1, strategy="ddp")


@pytest.mark.slurm
@pytest.mark.fault(16, 33)
@seeds
def test_a_controller_that_dies(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    cluster = cluster_without_accounting
    survive_on(cluster, "daemons", seed, quiet_runs, tmp_path, pace_s=0.2, strategy="ddp")


@pytest.mark.slurm
@pytest.mark.soak
@pytest.mark.fault(14, 15)
@seeds
def test_a_node_that_dies(
    seed: int, cluster_without_accounting: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """Its ranks may outlive it: they may not be done before Slurm has given it up."""
    cluster = cluster_without_accounting
    survive_on(cluster, "node", seed, quiet_runs, tmp_path, pace_s=1.0, strategy="ddp")


@pytest.mark.slurm
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.fault(1, 4, 5, 6, 14, 16, 36)
def test_soak() -> None:
    """As `make soak` does, with a few seeds more than nothing."""
    if why := why_not(accounting=False):
        leave_out(f"no Slurm to test with: {why}")
    assert soak(chosen_seeds("1-3"), parallel=3) == []
