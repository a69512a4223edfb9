"""Fixtures: a shim and a small disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
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
    with pytest.MonkeyPatch.context() as patch:
        warm.close()
        patch.setenv("LD_PRELOAD", str(shim.library()))
        yield
        warm.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB for runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        leave_out("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let reports say which faults a test causes, wherever it is."""
    for item in items:
        for mark in item.iter_markers("fault"):
            item.user_properties += [("fault", str(number)) for number in mark.args]
