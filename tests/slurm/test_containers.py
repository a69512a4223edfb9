"""``environment.container`` on a real Slurm: podman, and pyxis by a plug-in that stands in for it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from filelock import FileLock

from hpc_train.paths import RunPaths
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import assert_equal_to_the_bit, installed, only_run, status, wait_for
from tests.quiet import QuietRuns
from tests.slurm import containers
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.experiments import (
    ENVIRONMENT,
    LIMIT_S,
    TWO_RANKS,
    account,
    job_of,
    ranks_of,
    records,
    see_it_preempted,
    start_now,
    submit,
    submit_one,
    wait_for_attempt,
    wait_for_attempt_end,
    wait_for_completion,
    wait_for_first_step,
    wait_for_state,
    wait_for_step,
)
from tests.slurm.fixtures import leave_out
from tests.slurm.host import why_not
from tests.slurm.runs import high_job
from tests.slurm.runs import wait_for_state as wait_for_job
from tests.slurm.test_shared_jobs import SHARED, by_seed, reference
from tests.slurm.test_spare_nodes import wait_until_held
from tests.slurm.test_standby import STANDBY, wait_for_ranks, wait_for_standby

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYXIS = Path(__file__).with_name("pyxis.c")
#: A variable of the submission, whose value no command line may show.
SECRET = f"secret-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def _cluster_with_pyxis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := why_not(accounting=False):
        leave_out(f"no Slurm to test with: {why}")
    containers.install("gcc", packages=("libslurm-dev",))
    folder = tmp_path_factory.mktemp("containers")
    containers.put_podman(folder / "bin")
    plug_in = folder / "pyxis.so"
    subprocess.run(["gcc", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", plug_in, PYXIS], check=True)
    with (
        running(Settings(accounting=False, plug_in=str(plug_in))) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        yield cluster


@pytest.fixture
def cluster(_cluster_with_pyxis: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One test at a time on this machine, since podman lists the containers of all.

    Ranks are not forked: the jobs are not told of a fork server.
    """
    for name, value in _cluster_with_pyxis.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    with FileLock(Path(tempfile.gettempdir()) / "hpc-train-test-containers.lock"):
        yield _cluster_with_pyxis
        _cluster_with_pyxis.clear()


@pytest.fixture(scope="module")
def built(_cluster_with_pyxis: Cluster) -> str:
    """The image of ``envs/``, built by the podman that is in PATH next to the cluster."""
    return containers.build()


def podman_containers() -> list[str]:
    listed = ("podman", "ps", "--all", "--filter=name=hpc-train-", "--format={{.Names}}")
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()


def ranks_inside(paths: RunPaths, attempt: int, rank: int | None = None) -> list[int]:
    """Return the ranks' processes in the image, without those around them that have the same arguments."""
    inside = []
    for process in ranks_of(paths, rank, attempt):
        with suppress(OSError):  # it may end meanwhile
            executable = Path(f"/proc/{process}/exe").readlink().name
            inside += [process] if containers.is_inside(process) and "python" in executable else []
    return inside


def assert_inside(paths: RunPaths, attempt: int, ranks: int = 2) -> None:
    """The ranks are in the image, with the variables of the submission; no command line shows the secret."""
    # Ranks on standby for this attempt that were not used may not have ended yet.
    wait_for(lambda: len(ranks_inside(paths, attempt)) == ranks, f"the ranks\n{account(paths)}", LIMIT_S)
    for process in ranks_inside(paths, attempt):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        assert f"MY_TOKEN={SECRET}".encode() in variables
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(SECRET.encode() in line for line in lines)


@pytest.mark.soak
@pytest.mark.parametrize("runtime", ["podman", "apptainer"])
def test_ranks_in_a_container_restart_in_place_and_resume_after_a_preemption(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path, runtime: str
) -> None:
    if shutil.which(runtime) is None:  # Debian 12 has no package of Apptainer
        pytest.skip(f"there is no program {runtime}")
    with Hold(tmp_path, 12) as hold:
        container = containers.override(runtime, tmp_path, installed())
        settings = ("recovery.restart=in_place", "checkpoint.every_steps=5", hold.override)
        paths = submit_one(tmp_path, container, *settings, text=TWO_RANKS)
        wait_until_held(hold, paths)
        assert_inside(paths, 1)
        hold.at(14, since_attempt=2)
        (process,) = ranks_inside(paths, 1, rank=1)
        os.kill(process, signal.SIGKILL)
        wait_until_held(hold, paths)
        assert_inside(paths, 2)
        see_it_preempted(cluster, paths)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    first, second, third = records(paths)
    assert (first.cause, "rank 1 on n2: killed by SIGKILL" in str(first.reason)) == ("crash", True), first
    assert [record.in_place for record in (first, second, third)] == [False, True, False], account(paths)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)
    wait_for(lambda: not ranks_of(paths) and not podman_containers(), "the end of all containers", LIMIT_S)


def test_containers_on_standby_and_on_a_spare_node(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    """A killed rank is followed by ranks on standby, a lost node by ranks on the spare one."""
    with Hold(tmp_path, 12) as hold:
        container = containers.override("podman", tmp_path, installed())
        paths = submit_one(
            tmp_path, container, "slurm.spare_nodes=1", *STANDBY, hold.override, text=TWO_RANKS
        )
        wait_until_held(hold, paths)
        waiting = wait_for_standby(paths, 2, ranks_inside)
        hold.at(14, since_attempt=2)
        (process,) = ranks_inside(paths, 1, rank=1)
        os.kill(process, signal.SIGKILL)
        wait_until_held(hold, paths)
        wait_for_ranks(paths, 2, waiting, ranks_inside)
        assert_inside(paths, 2)
        hold.at(16, since_attempt=3)
        cluster.kill_node("n2", with_jobs=True)
        wait_until_held(hold, paths)
        assert_inside(paths, 3)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    wait_for_attempt_end(paths, 3)
    assert [(record.in_place, record.hosts) for record in records(paths)] == [
        (False, ["n1", "n2"]), (True, ["n1", "n2"]), (True, ["n1", "n3"]),
    ], account(paths)  # fmt: skip
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, environment=ENVIRONMENT), paths)
    wait_for(lambda: not ranks_of(paths) and not podman_containers(), "the end of all containers", LIMIT_S)


def test_runs_in_containers_share_a_job(cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path) -> None:
    with Hold(tmp_path, 2) as hold:
        container = containers.override("podman", tmp_path, installed())
        submit(tmp_path, container, "sweep.grid={seed: [1, 2]}", hold.override, text=SHARED)
        first, second = by_seed(tmp_path)
        for run in (first, second):
            wait_for_step(run, 2)
        (process,) = ranks_inside(first, 1)
        os.kill(process, signal.SIGKILL)
        wait_for_attempt(first, 2)
        wait_for_first_step(first)
        with high_job(cluster, records(first)[-1].hosts):
            for run in (first, second):
                ended = wait_for_attempt_end(run, len(run.attempt_folders()))
                assert ended.cause == "preemption", account(run)
    start_now(cluster, first)
    wait_for_completion(first, second)
    for seed, run in enumerate((first, second), start=1):
        assert_equal_to_the_bit(reference(quiet_runs, seed), run)
    assert job_of(first) == job_of(second)
    assert "killed by SIGKILL" in str(records(first)[0].reason), account(first)
    assert [record.in_place for record in records(first)] == [False, True, False], account(first)
    assert len(records(second)) == 2, account(second)
    wait_for(lambda: not ranks_of(first) and not podman_containers(), "the end of all containers", LIMIT_S)


def test_ranks_in_pyxis_resume_after_a_preemption(
    cluster: Cluster, quiet_runs: QuietRuns, tmp_path: Path
) -> None:
    with Hold(tmp_path, 12) as hold:
        container = containers.override("pyxis", tmp_path, installed())
        paths = submit_one(tmp_path, container, "slurm.nodes=1", hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        assert_inside(paths, 1, ranks=1)
        see_it_preempted(cluster, paths)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    assert_equal_to_the_bit(quiet_runs.of(text=TWO_RANKS, ranks=1, environment=ENVIRONMENT), paths)


@pytest.mark.soak
@pytest.mark.timeout(3 * containers.BUILD_LIMIT_S)
def test_the_image_of_envs_trains_and_resumes_after_a_preemption(
    cluster: Cluster, built: str, tmp_path: Path
) -> None:
    container = containers.override("podman", tmp_path, installed(), built=built)
    undisturbed = submit_one(tmp_path / "undisturbed", container, text=TWO_RANKS)
    assert wait_for_state(undisturbed, "completed", "failed") == "completed", account(undisturbed)
    with Hold(tmp_path, 12) as hold:
        paths = submit_one(tmp_path, container, hold.override, text=TWO_RANKS)
        wait_until_held(hold, paths)
        assert_inside(paths, 1)
        for process in ranks_inside(paths, 1):
            libraries = Path(f"/proc/{process}/maps").read_text()
            assert "/opt/hpc-train/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so" in libraries
        see_it_preempted(cluster, paths)
    assert wait_for_state(paths, "completed", "failed") == "completed", account(paths)
    assert len(records(paths)) == 2, account(paths)
    assert_equal_to_the_bit(undisturbed, paths)
    wait_for(lambda: not ranks_of(paths) and not podman_containers(), "the end of all containers", LIMIT_S)


@pytest.mark.soak
@pytest.mark.timeout(3 * containers.BUILD_LIMIT_S)
def test_the_image_of_envs_trains_without_a_job_and_compiles(
    cluster: Cluster, built: str, tmp_path: Path
) -> None:
    """Its entrypoint with ``examples/digits.yaml``; its compiler and Python's headers."""
    # podman's own limits are above those of many machines.
    limits = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096", "--env=OMP_NUM_THREADS=1")
    places = (f"--volume={tmp_path}:/work", "--workdir=/work", "--network=host", "--cgroups=disabled")
    example = "/usr/src/hpc-train/examples/digits.yaml"
    code = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(8)).sum().item())"
    for command, printed in [
        ((built, "submit", example, "--local", "device=cpu", "optimization.epochs=2"), ""),
        (("--entrypoint=python3", built, "-c", code), "8.0"),
    ]:
        words = ["podman", "run", "--rm", *limits, *places, *command]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0 and printed in done.stdout, done.stdout + done.stderr
    assert status(only_run(tmp_path))["state"] == "completed"


def test_a_killed_step_leaves_no_container(cluster: Cluster, tmp_path: Path) -> None:
    with Hold(tmp_path, 3) as hold:
        container = containers.override("podman", tmp_path, installed())
        settings = ("slurm.nodes=1", "recovery.max_crashes=0", hold.override)
        paths = submit_one(tmp_path, container, *settings, text=TWO_RANKS)
        wait_until_held(hold, paths)
        assert len(podman_containers()) == 1
        cluster.run("scancel", "--signal=KILL", f"{job_of(paths)}.0")
        wait_for(
            lambda: not podman_containers() and not ranks_of(paths), "the end of all containers", LIMIT_S
        )
    assert wait_for_state(paths, "completed", "failed") == "failed", account(paths)


def test_a_node_without_the_image_ends_the_job_before_any_rank(cluster: Cluster, tmp_path: Path) -> None:
    image = "environment.container={image: /no/such/image, runtime: podman}"
    submitted = submit(tmp_path, image, text=TWO_RANKS)
    assert (
        "command line: environment.container.image: /no/such/image does not exist on this machine"
        in submitted.err
    )
    paths = only_run(tmp_path)
    assert wait_for_job(cluster, job_of(paths), "FAILED", "COMPLETED") == "FAILED"
    message = "hpc-train: environment.container.image: there is no /no/such/image on n1; correct the path"
    assert message in account(paths) and not paths.attempt_folders()
