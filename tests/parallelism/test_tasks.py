"""Each task, with models and data sources of every kind, trains as plain PyTorch does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.parallelism import task_data, task_training
from tests.parallelism.groups import Groups
from tests.parallelism.task_cases import CASES, DETECTOR, Cell, TaskCase
from tests.parallelism.task_training import Trained, difference

_LIBRARIES = {"hf/": "transformers", "detection": "pycocotools"}


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with closing(Groups()) as started:
        yield started


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tasks")
        patch.setenv("HPC_TRAIN_CACHE", str(folder / "cache"))
        return task_data.write(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", (*CASES, DETECTOR), ids=lambda case: case.title)
def test_twenty_steps_and_evaluations_equal_plain_pytorch(case: TaskCase, groups: Groups, root: Path) -> None:
    """Training on one and two ranks, evaluation on one, two and three. The report has all strategies."""
    for start, library in _LIBRARIES.items():
        if start in (case.task, str(case.model["name"])[:3]) and not importlib.util.find_spec(library):
            pytest.skip(f"needs {library}")
    precision = "fp32" if case.is_large else "fp64"
    (expected,) = groups.run(1, task_training.plain, case.title, precision, root)
    for strategy, ranks in (("ddp", 1), ("ddp", 2), *([("fsdp", 2)] if case is DETECTOR else [])):
        cell = Cell(case, strategy, precision, ranks)
        trained: list[Trained] = groups.run(ranks, task_training.train, case.title, strategy, precision, root)
        apart = difference(cell, trained, expected)
        assert apart.is_within, f"{cell}: {apart}"
    (alone,) = groups.run(1, task_training.evaluated, case.title, precision, root)
    for ranks in (2, 3):
        assert groups.run(ranks, task_training.evaluated, case.title, precision, root) == [alone] * ranks
