"""The run of most tests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.checkpoint.checkpoint_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A run whose first attempt has begun, without checkpoints."""
    return make_run(tmp_path / "run")
