"""What ``evaluate`` refuses before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli import evaluate as module
from hpc_train.paths import RunPaths
from tests.cli.commands import hpc_train
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = small_run(tmp_path / "runs")
    begin_attempt(paths, 1)
    return paths


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LocalLauncher", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.root=x"], "evaluate: names no run; give a run id"),
        (["nosuch"], "no run or experiment of this name"),
        (["abc"], "has no checkpoint yet; try again once it has saved one"),
        (["abc", "--best", "--step", "3"], "--best and --step exclude each other"),
        (
            ["abc", "model.name=gpt"],
            "model.name: can't be changed in an evaluation, since the checkpoint was",
        ),
        (["abc", "optimization.steps=3"], "optimization.steps: can't be changed in an evaluation"),
        (["abc", "data.rot=3"], "did you mean root?"),
        (["abc", "--code", "old"], "--code: unknown value 'old'"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(run: RunPaths, words: list[str], said: str) -> None:
    done = hpc_train("evaluate", *words)
    assert done.code != 0 and said in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "4"], "there is no checkpoint of step 4; there are 10, 5"),
        (["--best"], "has no best checkpoint; omit --best, or train with checkpoint.best"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(run: RunPaths, options: list[str], said: str) -> None:
    for step in (5, 10):
        write_checkpoint(run, step, attempt=1)
    done = hpc_train("evaluate", "abc", *options)
    assert done.code == 2 and said in done.err
