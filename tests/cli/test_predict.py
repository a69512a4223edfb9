"""Requests that ``predict`` and ``evaluate`` refuse before any rank starts, and the files of ``predict``."""

from __future__ import annotations

import io
import json
import os
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import evaluate
from hpc_train.cli.evaluate import say_skipped, write_rows
from hpc_train.paths import RunPaths
from hpc_train.run.bad_samples import BadSample
from tests.cli.commands import hpc_train, stderr_of
from tests.run.runs import small_run

ROWS = [
    {"index": 0, "file": "a,b.png", "class": "cat", "probability": 0.5, "top": [{"class": "cat"}]},
    {"index": 1, "file": "c.png", "class": 3, "probability": 0.25, "top": []},
]
#: Nothing is known of them before the ranks start.
OWN_PARTS = {"model": {"name": "mine:model"}, "data": {"name": "mine:data"}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(evaluate, "LocalLauncher", None)
    return small_run(tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict abc -o runs/small/abc/out.csv", "is inside run folder"),
        ("predict abc -o link.csv --force", "exists and is not a plain file"),
        ("predict abc -o out.txt", "-o: out.txt must end in .jsonl or .csv"),
        ("predict abc -o no/out.csv", "there is no folder no; make the folder first"),
        ("predict abc -o there.csv", "-o: there.csv exists; add --force"),
        ("predict abc -o there.csv --force", "has no checkpoint yet"),
        ("predict abc -o out.csv --data nowhere", "--data: there is no file or folder nowhere"),
        ("predict data.root=x -o out.csv", "predict: names no run"),
        ("predict abc model.name=gpt -o out.csv", "model.name: can't be changed"),
        ("evaluate data.root=x", "evaluate: names no run; give a run id"),
        ("evaluate nosuch", "no run or experiment of this name"),
        ("evaluate abc", "has no checkpoint yet; try again once it has saved one"),
        ("evaluate abc model.name=gpt", "model.name: can't be changed in an evaluation, since the"),
        ("evaluate abc optimization.steps=3", "optimization.steps: can't be changed in an evaluation"),
        ("evaluate abc data.rot=3", "did you mean root?"),
        ("evaluate abc --code old", "--code: unknown value 'old'"),
    ],
)
def test_mistakes_are_named_before_any_rank_starts(
    run: RunPaths, words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.csv").touch()
    Path("link.csv").symlink_to("there.csv")
    done = hpc_train(*words.split())
    assert done.code != 0 and said in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "4"], "there is no checkpoint of step 4; there are 10, 5"),
        (["--best"], "has no best checkpoint; omit --best, or train with checkpoint.best"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(saved: RunPaths, options: list[str], said: str) -> None:
    assert said in stderr_of(2, "evaluate", saved.folder, *options)


@pytest.mark.parametrize("task", ["segmentation", "causal_lm"])
def test_a_task_that_cant_predict_is_refused(task: str, tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs", task=task, **OWN_PARTS)
    error = stderr_of(2, "predict", run.folder, "-o", tmp_path / "out.csv")
    assert f"task: {task} can't predict; classification, regression, detection and your own tasks" in error


def test_boxes_are_refused_as_a_table(tmp_path: Path) -> None:
    run = small_run(tmp_path / "runs", task="detection", **OWN_PARTS)
    error = stderr_of(2, "predict", run.folder, "-o", tmp_path / "out.csv")
    assert "-o: predictions of detection can't be written as .csv; name a .jsonl" in error
    assert "has no checkpoint yet" in hpc_train("predict", run.folder, "-o", tmp_path / "out.jsonl").err


def written(rows: list[dict[str, Any]], suffix: str) -> str:
    """Return what ``write_rows`` writes of the rows."""
    file = io.BytesIO()
    assert write_rows(file, lambda: rows, suffix) == len(rows)
    return file.getvalue().decode()


def test_a_table_has_a_head_and_no_lists_of_dicts() -> None:
    assert written(ROWS, ".csv").splitlines() == [
        "index,file,class,probability",
        '0,"a,b.png",cat,0.5',
        "1,c.png,3,0.25",
    ]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (
            [{"prediction": [0.5, 2.0]}, {"prediction": [1, -3]}],
            ["prediction_0,prediction_1", "0.5,2.0", "1,-3"],
        ),
        (
            [{"labels": [], "probabilities": [0.1, 0.2]}, {"labels": ["a", 7], "probabilities": [0.6, 0.9]}],
            ["labels,probability_0,probability_1", ",0.1,0.2", "a;7,0.6,0.9"],
        ),
        ([{"probabilities": {"cat": 0.25, "dog": 1}}], ["probability_cat,probability_dog", "0.25,1"]),
        ([{"points": [1]}, {"points": [2, 3]}, {"points": []}], ["points_0,points_1", "1,", "2,3", ","]),
        ([{"index": 0, "points": [[1, 2]]}], ["index", "0"]),
    ],
)
def test_a_table_has_a_column_for_each_number_of_a_list(rows: list[dict[str, Any]], lines: list[str]) -> None:
    assert written(rows, ".csv").splitlines() == lines


def test_lines_are_the_rows() -> None:
    assert [json.loads(line) for line in written(ROWS, ".jsonl").splitlines()] == ROWS


def test_json_has_null_for_numbers_that_are_not_finite() -> None:
    row = {"prediction": [nan, 1.0], "top": [{"class": "cat", "probability": -inf}], "loss": inf}
    (line,) = written([row], ".jsonl").splitlines()
    assert line == '{"prediction": [null, 1.0], "top": [{"class": "cat", "probability": null}], "loss": null}'
    assert written([row], ".csv").splitlines()[1] == "nan,1.0,inf"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_name_that_is_not_utf_8_is_escaped_alike_in_both_formats(suffix: str) -> None:
    name = os.fsdecode(b"\xff-" + "ä.png".encode())
    text = written([{"index": 0, "file": name}], suffix)
    assert r"\udcff-" in text
    if suffix == ".jsonl":
        assert os.fsencode(json.loads(text)["file"]) == os.fsencode(name)
    else:
        assert text.endswith("0,\\udcff-ä.png\n")


def test_skipped_samples_are_named_up_to_five(capsys: pytest.CaptureFixture[str]) -> None:
    say_skipped([BadSample("val", index, f"{index}.png", "OSError: no") for index in range(7)])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "predict: skipped, since it can't be read: 0.png: OSError: no"
    assert [line.split(": ")[2] for line in said[:5]] == [f"{index}.png" for index in range(5)]
    assert said[5:] == ["predict: … and 2 more; the file has no line for them"]
