"""``rollbacks.jsonl``: which rollbacks a resumed run keeps, and which data a replay of a step reads."""

from __future__ import annotations

from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run.rollbacks import Rollback, RollbacksFile, read_rollbacks, skipped_windows

ROLLBACKS = [Rollback(8, 7), Rollback(20, 20), Rollback(20, 21), Rollback(31, 33)]


def test_a_resumed_run_keeps_the_rollbacks_whose_data_it_skips(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_rollbacks(paths) == []
    file = RollbacksFile(paths.rollbacks, ())
    for rollback in ROLLBACKS:
        file.append(rollback)
    file.close()
    assert read_rollbacks(paths) == ROLLBACKS
    with paths.rollbacks.open("a") as damaged:
        damaged.write('{"step": 40, "win')
    RollbacksFile(paths.rollbacks, (7, 20)).close()
    assert read_rollbacks(paths) == ROLLBACKS[:2]


def test_a_step_that_was_rolled_back_reads_what_was_skipped_then_and_later(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    file = RollbacksFile(paths.rollbacks, ())
    for rollback in ROLLBACKS:
        file.append(rollback)
    file.close()
    assert skipped_windows(paths) == {7, 20, 21, 33}
    assert skipped_windows(paths, 20) == {7, 20}
    assert skipped_windows(paths, 8) == set()
