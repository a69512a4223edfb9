"""Which stage waits for which run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import TryAgainError
from hpc_train.paths import RunPaths
from hpc_train.run import stage_order
from hpc_train.run.run_status import RunStatus, write_status


def stage(root: Path, run_id: str, after: str | None) -> RunPaths:
    paths = RunPaths(root / "digits" / run_id)
    paths.folder.mkdir(parents=True)
    facts = {"id": run_id, "stage": {"number": 1, "of": 3, "after": after, "weights": None}}
    paths.run.write_text(json.dumps(facts))
    paths.experiment.write_text("name: digits\n")
    write_status(paths, RunStatus())
    return paths


def test_a_stage_waits_until_the_one_before_has_completed(tmp_path: Path) -> None:
    first = stage(tmp_path, "aa", None)
    second, third = stage(tmp_path, "bb", "digits/aa"), stage(tmp_path, "cc", "digits/bb")
    assert stage_order.later(first) == [second, third]
    assert stage_order.waiting_words(first) is None
    for state in ("running", "failed", "cancelled", "requeued"):
        write_status(first, RunStatus(state=state))
        with pytest.raises(TryAgainError, match="waits for"):
            stage_order.check_may_begin(second)
    write_status(first, RunStatus(state="completed"))
    stage_order.check_may_begin(second)
    assert "waits for" in str(stage_order.waiting_words(third))
