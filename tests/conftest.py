"""What all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests import compilers, durations, warm
from tests.slurm.host import SLURM_VARIABLES

#: The test clusters, and runs to compare with.
pytest_plugins = ["tests.slurm.fixtures", "tests.quiet"]
#: What timm and torchvision know, asked once (seconds) for all tests.
_NAMES = Path(__file__).parents[1] / ".pytest_cache" / "hpc-train"
#: A rank's own, and what inductor writes into the environment of a process that compiles.
_LEFT_BEHIND = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
}  # fmt: skip

#: Tests write some 400,000 files, most of them synced, 3 GB at most: into memory where there is enough,
#: except in ``make test-full``.
_MEMORY, _ENOUGH_BYTES = Path("/dev/shm"), 6 << 30


def _has_room_in_memory() -> bool:
    free = psutil.virtual_memory().available // 2
    return os.access(_MEMORY, os.W_OK) and min(free, shutil.disk_usage(_MEMORY).free) > _ENOUGH_BYTES


if warm.FRESH not in os.environ and _has_room_in_memory():
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# By default an example that takes over 200 ms fails, as any may on a busy machine.
hypothesis.settings.register_profile("hpc-train", deadline=None)
hypothesis.settings.load_profile("hpc-train")

#: A plan without the prediction of memory, which starts a process that imports torch; its own tests ask for
#: it.
os.environ.setdefault("HPC_TRAIN_NO_MEMORY", "1")


@pytest.hookimpl(trylast=True)  # once tests/slurm has its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that all workers of pytest-xdist are busy to the end."""
    groups: dict[tuple[str, bool], list[pytest.Item]] = defaultdict(list)
    quick = []
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            needs_slurm = item.get_closest_marker("slurm") is not None
            name = item.nodeid if needs_slurm else item.nodeid.partition("::")[0]
            groups[name, needs_slurm].append(item)
        else:
            quick.append(item)
    items[:] = durations.in_order(groups, quick, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Let pytest-xdist fork its workers, except under coverage, which has to see modules being imported;
    fork the children of commands that tests call.
    """
    with warm.forking_workers() if _forks_workers(session.config) else nullcontext():
        result = yield
    warm.fork_children()
    return result


def _forks_workers(config: pytest.Config) -> bool:
    return config.getoption("dist", "no") != "no" and not config.getoption("cov_source", None)


def pytest_collection_finish() -> None:
    """Give torch one thread in this process, as each rank of a test has; freeze what was imported, which
    garbage collections would look through.

    Threads that wait for each other spin, on cores that ranks and the other workers need: with two, tests on
    small tensors took twice the CPU time, and a run of one rank ten times. ``_own_places`` tells what tests
    start the same.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.freeze()


def pytest_sessionfinish() -> None:
    warm.close()


@pytest.fixture
def fresh_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how ranks start, or of what happens meanwhile: none is forked from a warm process."""
    monkeypatch.setenv(warm.FRESH, "1")


@pytest.fixture
def fresh_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``fresh_ranks``, for a job of Slurm until it is requeued."""
    monkeypatch.setenv(warm.FRESH_FIRST_ATTEMPT, "1")


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the forking itself, in ``make test-full`` too."""
    monkeypatch.delenv(warm.FRESH, raising=False)


@pytest.fixture(scope="session")
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The C++ compiler of all workers of pytest-xdist; the machine's own in ``make test-full``."""
    own = tmp_path_factory.getbasetemp()
    of_all = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    is_chosen = warm.FRESH in os.environ or "CXX" in os.environ
    return None if is_chosen else compilers.make(of_all / "compiler")


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _compiler: Path | None) -> None:
    """No test writes runs or caches outside its own folder, or inherits what a rank or Slurm was told."""
    monkeypatch.setenv("HPC_TRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(_NAMES))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for what the test starts
    # An import of Lightning or Accelerate sets it; with it no rank is forked.
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if _compiler is not None:
        monkeypatch.setenv("CXX", str(_compiler))
    for name in list(os.environ):
        if name.startswith(SLURM_VARIABLES) or name in _LEFT_BEHIND:
            monkeypatch.delenv(name)
