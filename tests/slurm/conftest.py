"""What the tests of this folder have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder: each needs a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")
            item.add_marker("slow")
