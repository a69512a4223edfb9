"""A task of one's own with batches of dicts, as docs/plugins.md shows it: short, alike under ddp and fsdp.

tests/end_to_end/test_resume.py kills such a run, and tests/slurm/test_end_to_end.py has it preempted.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY, blocks
from tests.end_to_end.runs import found_runs, hpc_train, rows

PAGE = REPOSITORY / "docs" / "plugins.md"
FILES = {block.file: block.text for block in blocks(PAGE) if block.file is not None}
TASK = (
    "task=my_task:Weighted",
    "data.name=my_data:weighted_squares",
    "precision=fp64",
    "logging.every_steps=1",
)


def test_it_takes_at_most_forty_lines() -> None:
    assert len(FILES["my_task.py"].splitlines()) <= 40
    example = (REPOSITORY / "examples" / "graph_network.py").read_text()
    (task,) = (each for each in ast.parse(example).body if getattr(each, "name", "") == "TwoTargets")
    assert task.end_lineno is not None and task.end_lineno - task.lineno < 40


@pytest.mark.slow
def test_it_trains_alike_under_ddp_and_fsdp(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = []
    for strategy in ("ddp", "fsdp"):
        runs = tmp_path / strategy / "runs"
        words = (
            "submit",
            "own-data.yaml",
            *TASK,
            f"parallel.strategy={strategy}",
            "--local",
            "--devices",
            "2",
        )
        done = hpc_train(*words, cwd=tmp_path, HPC_TRAIN_RUNS=str(runs))
        assert done.code == 0, done.err
        (paths,) = found_runs(tmp_path / strategy)
        found.append(paths)
    losses = [[row["loss"] for row in rows(paths, "train")] for paths in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9) and losses[0][-1] < losses[0][0]
    last = rows(found[0], "val")[-1]
    assert last.keys() > {"accuracy", "sureness"} and last["accuracy"] > 0.9
