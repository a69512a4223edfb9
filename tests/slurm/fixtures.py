"""Fixtures: a real Slurm of four nodes, started at its first use, one a worker of pytest-xdist.

A plugin that tests/conftest.py loads, so that the tests of all folders share one: a session's fixture is made
anew for each conftest.py that imports it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.slurm.cluster import Cluster, running
from tests.slurm.configuration import Settings
from tests.slurm.host import why_not
from tests.slurm.ordinary_user import OrdinaryUser, make

#: Set where a missing Slurm must fail the tests rather than skip them.
REQUIRED = "HPC_TRAIN_REQUIRE_SLURM"


def _running(settings: Settings) -> Iterator[Cluster]:
    if why := why_not(settings.accounting):
        leave_out(f"no Slurm to test with: {why}")
    with running(settings) as cluster:
        yield cluster


def leave_out(why: str) -> None:
    """Skip this test, or fail it where Slurm's tests may not be skipped."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{why} (and {REQUIRED} is set)")
    pytest.skip(why)


@pytest.fixture(scope="session")
def _with_accounting() -> Iterator[Cluster]:
    yield from _running(Settings())


@pytest.fixture(scope="session")
def _without_accounting() -> Iterator[Cluster]:
    yield from _running(Settings(accounting=False))


def _for_one_test(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name, value in (cluster.environment | warm.for_jobs()).items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.clear()


@pytest.fixture
def cluster(_with_accounting: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster with accounting, in SLURM_CONF; after each test its jobs are gone and its nodes idle."""
    yield from _for_one_test(_with_accounting, monkeypatch)


@pytest.fixture
def cluster_without_accounting(
    _without_accounting: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """The same without slurmdbd."""
    yield from _for_one_test(_without_accounting, monkeypatch)


@pytest.fixture(params=["accounting", "no accounting"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """Both, one after the other."""
    name = "cluster" if request.param == "accounting" else "cluster_without_accounting"
    found: Cluster = request.getfixturevalue(name)
    return found


@pytest.fixture
def ordinary_user(cluster: Cluster) -> Iterator[OrdinaryUser]:
    """Somebody who may submit to ``cluster`` and is not root."""
    # Beside, not below, pytest's own folders, which only root may enter.
    home = Path(tempfile.mkdtemp(prefix="hpc-train-home-"))
    try:
        user = make(home)
        cluster.add_user(user.name)
        yield user
    finally:
        cluster.clear()
        shutil.rmtree(home, ignore_errors=True)
