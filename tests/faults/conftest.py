"""Fixtures: a shim and a small disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.disks import small_disk
from tests.faults import shim
from tests.slurm.fixtures import leave_out


@pytest.fixture(scope="module")
def shimmed() -> None:
    """Skip the test, or fail it in CI, where no shim can be built."""
    if why := shim.why_not():
        leave_out(why)


@pytest.fixture(scope="module")
def preloaded(shimmed: None) -> Iterator[None]:
    """Fork ranks from a process that was started with the shim."""
    with warm.server_with(LD_PRELOAD=str(shim.library())):
        yield


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "runs", "24m", leave_out) as folder:
        yield folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let reports say which faults a test causes, wherever it is."""
    for item in items:
        for mark in item.iter_markers("fault"):
            item.user_properties += [("fault", str(number)) for number in mark.args]
