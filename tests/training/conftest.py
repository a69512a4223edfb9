from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from hpc_train.paths import RunPaths
from tests.checkpoint.checkpoint_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "run")


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
