"""``bisect`` of runs whose records decide, without a replay; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import bisect as module
from hpc_train.cli.replay import Stretch
from hpc_train.cli.replayed_run import ReplayedRun
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.digests import DigestsFile
from tests.cli.commands import hpc_train, succeeded
from tests.cli.json_checks import checked
from tests.run.runs import small_run
from tests.run.test_checkpoints import save
from tests.run.test_digests import digest


def run(run_id: str, steps: range = range(0), **changes: Any) -> RunPaths:
    paths = small_run(runs_root(), run_id, **changes)
    if steps:
        file = DigestsFile(paths.digests, steps[0] - 1)
        file.append([digest(step) for step in steps])
        file.close()
    return paths


@pytest.fixture(autouse=True)
def _no_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "run_stretch", None)


def test_equal_records_need_no_replay() -> None:
    save(run("aaa", range(1, 9)), 5)
    save(run("bbb", range(3, 20), seed=4), 5)
    done = succeeded("bisect", "aaa", "bbb")
    assert done.out.splitlines() == [
        "--- aaa",
        "+++ bbb",
        "experiment: 1 key differs",
        "- seed: 0",
        "+ seed: 4",
        "versions: no package differs",
        "code: unknown: aaa has no snapshot of its code",
        "machine: no fact differs",
        "digests: bitwise identical in 6 steps",
        "checkpoints: 5 is bitwise identical",
        "no difference",
    ]
    answer = checked("bisect", hpc_train("bisect", "aaa", "bbb", "--json", "--from", "5").out)
    assert (answer["compared"], answer["equal_checkpoint"], answer["replays"]) == (4, 5, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN is missing"),
        (["small"], "bisect: compares two runs, or one with its replay; these are 3"),
        (["aaa", "--from", "5", "--to", "4"], "--to: 4 is before --from 5; write a later step"),
        (["aaa"], "aaa: a replay can't be compared, because the run has neither digests nor checkpoints"),
        (["aaa", "bbb"], "bisect: aaa and bbb can't be compared, because they have neither digests nor"),
        (["bbb", "ccc", "--to", "4"], "bbb and ccc can't be compared"),
        (
            ["bbb", "ccc", "--python", "p"],
            "--python: is given 1 time, and there are 2 runs; give it once per",
        ),
        (["bbb", "--python", "p"], "--python: p is not a program; write a path such as venv/bin/python"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(words: list[str], message: str) -> None:
    run("aaa")
    run("bbb", range(1, 5))
    run("ccc", range(6, 9))
    done = hpc_train("bisect", *words)
    assert done.code == 2 and message in done.err.replace("\n", " "), done.err


def test_each_part_of_a_run_is_replayed_by_the_ranks_that_trained_it(
    resumed: ReplayedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 7, from which the third attempt continued, is gone; that of step 10 is not."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    replays = []

    def run_stretch(stretch: Stretch, _: Any, __: Any, num_ranks: int, **___: Any) -> Any:
        replays.append((stretch.begin, stretch.last, num_ranks))
        lines = [{"step": step, "state": "0a"} for step in range(stretch.begin, stretch.last + 1)]
        return [lines] * num_ranks

    monkeypatch.setattr(module, "run_stretch", run_stretch)
    monkeypatch.setattr(module._Search, "_compare_with_run", lambda *_: None)
    done = hpc_train("bisect", "abc", "--from", "2", "--to", "12")
    assert done.code == 0, done.err
    assert replays == [(0, 5, 2), (5, 7, 1), (10, 12, 2)]
    assert "abc: steps 8 to 10 can't be compared on the ranks that trained" in done.err.replace("\n", " ")
