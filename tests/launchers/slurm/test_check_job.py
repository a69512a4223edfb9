"""What the nodes' measurements of their pairs say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import UsageError
from hpc_train.launchers.base import Finding, Level
from hpc_train.launchers.slurm import check_job
from hpc_train.launchers.slurm.check_job import CheckJob

RATES: dict[str, dict[str, float]] = {"n1": {"n2": 20.0, "n3": 22.0}, "n2": {"n3": 21.0}, "n3": {}}


def judged(folder: Path, rates: dict[str, dict[str, float]]) -> Finding:
    for rank, (node, pairs) in enumerate(rates.items()):
        result = {"node": node, "backend": "nccl", "pairs": pairs}
        (folder / f"pair-{rank}.json").write_text(json.dumps(result))
    job = CheckJob("n1,n2,n3", folder / "pairs", 3, "7", state="FAILED", exit_code="46:0")
    return check_job._bandwidth(job)


def test_equal_pairs_are_all_named(tmp_path: Path) -> None:
    found = judged(tmp_path, RATES)
    assert (found.level, found.source) == (Level.OK, "job 7")
    assert "nccl" in found.what and "n1-n2 20, n1-n3 22, n2-n3 21; median 21" in found.what


def test_a_slow_pair_is_named_alone(tmp_path: Path) -> None:
    found = judged(tmp_path, RATES | {"n2": {"n3": 3.0}})
    assert found.level is Level.WARNING
    assert found.what.endswith("GB/s: n2-n3 3; median 20")


def test_nodes_that_can_not_reach_each_other_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "pairs.err").write_text("Traceback …\nDistNetworkError: timed out\n")
    found = judged(tmp_path, {"n1": RATES["n1"]})
    assert found.level is Level.ERROR
    assert found.what.endswith("DistNetworkError: timed out")


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="--nodes: 65 nodes; write at most 64"):
        check_job.check_nodes(None, ["65"], 1.0)
