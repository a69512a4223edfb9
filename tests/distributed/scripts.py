"""Ranks of tests as processes of their own, each running the same small script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import warm
from tests.waiting import HANG_LIMIT_S

REPOSITORY = Path(__file__).parents[2]


def run_script(
    script: str, world_size: int, *arguments: str, **variables: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``script`` on every rank; return how each ended. What they started is gone by then."""
    ranks = [_start(script, rank, world_size, arguments, variables) for rank in range(world_size)]
    try:
        return [
            subprocess.CompletedProcess(rank.args, rank.wait(), out, err)
            for rank in ranks
            for out, err in [rank.communicate(timeout=HANG_LIMIT_S)]
        ]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _start(
    script: str, rank: int, world_size: int, arguments: tuple[str, ...], variables: dict[str, str]
) -> subprocess.Popen[str]:
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    return warm.start_script(
        script,
        *arguments,
        cwd=REPOSITORY,
        env=os.environ | own | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
