"""An experiment file, and no memory of earlier tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import launchers
from tests.plan.files import EXPERIMENT


@pytest.fixture(autouse=True)
def _no_requests() -> None:
    launchers.requests.clear()
    launchers.queued.clear()
    launchers.refusals.clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT)
    return path
