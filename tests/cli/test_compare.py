from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli import compare_diff
from hpc_train.paths import RunPaths, runs_root
from hpc_train.run.attempts import claim_attempt
from hpc_train.run.code import snapshot
from hpc_train.run.create import create_run
from hpc_train.run.files import read_json, write_json
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import hpc_train, stderr_of, succeeded
from tests.run.code.trees import take, work_tree
from tests.run.runs import change_facts, small_experiment, small_run

_HISTORY = {
    "aaa": [(5, 0.5, 0.7), (10, 0.6, 0.9)],
    "bbb": [(5, 0.2, 0.95), (10, float("nan"), 0.8)],
    "ccc": [],
}


@pytest.fixture
def runs(tmp_path: Path) -> list[RunPaths]:
    """Three runs of other seeds and weight decays; the last one has no metrics."""
    found = []
    for seed, (run_id, history) in enumerate(_HISTORY.items()):
        paths = small_run(tmp_path / "runs", run_id, seed=seed)
        rows: list[dict[str, Any]] = [
            {"split": "val", "step": step, "attempt": 1, "loss": loss, "accuracy": accuracy}
            for step, loss, accuracy in history
        ]
        rows += [{"split": "train", "step": step, "loss": 3.0 - step / 10} for step, _, _ in history]
        paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"split": "val", "st')
        write_status(paths, RunStatus(state="completed", step=10))
        found.append(paths)
    return found


def _json(*options: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(hpc_train("compare", "small", "--json", *options).out)
    return data


def test_the_best_run_is_first_with_last_and_best_values(runs: list[RunPaths]) -> None:
    data = _json()
    summary = [data[key] for key in ("version", "metric", "goal", "keys")]
    assert summary == [1, "val/accuracy", "max", ["seed"]]
    assert [run["id"] for run in data["runs"]] == ["bbb", "aaa", "ccc"]
    best, second, none = data["runs"]
    assert (best["best"], best["last"]) == ({"value": 0.95, "step": 5}, {"value": 0.8, "step": 10})
    assert (best["values"], best["state"], best["duration_s"]) == ({"seed": 1}, "completed", None)
    assert second["best"] == second["last"] == {"value": 0.9, "step": 10}
    assert none["best"] is None is none["last"]


def test_of_a_loss_less_is_better_and_nan_is_never_best(runs: list[RunPaths]) -> None:
    data = _json("--metric", "loss")
    assert (data["metric"], data["goal"]) == ("val/loss", "min")
    assert [run["id"] for run in data["runs"]] == ["bbb", "aaa", "ccc"]
    assert data["runs"][0]["best"] == {"value": 0.2, "step": 5}
    assert data["runs"][0]["last"] == {"value": None, "step": 10}
    assert _json("--metric", "train/loss")["runs"][0]["last"] == {"value": 2.0, "step": 10}


@pytest.mark.parametrize(
    ("best", "options", "metric", "goal", "first"),
    [
        ({"metric": "loss", "mode": "min"}, (), "val/loss", "min", "bbb"),
        ({"metric": "accuracy", "mode": "min"}, (), "val/accuracy", "min", "aaa"),
        ({"metric": "accuracy", "mode": "min"}, ("--metric", "accuracy"), "val/accuracy", "min", "aaa"),
        ({"metric": "accuracy", "mode": "min"}, ("--metric", "loss"), "val/loss", "min", "bbb"),
        ({"metric": "accuracy", "mode": "min"}, ("--metric", "train/loss"), "train/loss", "min", "aaa"),
        ({"metric": "missing", "mode": "min"}, (), "val/accuracy", "max", "bbb"),
    ],
)
def test_the_metric_of_the_best_checkpoint_decides_with_its_mode(
    runs: list[RunPaths], best: dict[str, str], options: tuple[str, ...], metric: str, goal: str, first: str
) -> None:
    for paths in runs:
        status = RunStatus(state="completed", step=10, best={"value": 0.5, "step": 5, **best})
        write_status(paths, status)
    data = _json(*options)
    assert (data["metric"], data["goal"], data["runs"][0]["id"]) == (metric, goal, first)


def test_runs_with_different_decisive_metrics_are_compared_by_the_default_one(runs: list[RunPaths]) -> None:
    for paths, name in zip(runs, ("loss", "accuracy", "loss"), strict=True):
        best = {"metric": name, "mode": "min", "value": 0.5, "step": 5}
        write_status(paths, RunStatus(state="completed", step=10, best=best))
    assert _json()["goal"] == "max"


def test_the_newest_value_of_a_run_that_diverged_at_its_end_is_nan(runs: list[RunPaths]) -> None:
    """Rows have null for NaN."""
    _append(runs[1], {"split": "val", "step": 15, "loss": None, "accuracy": 0.1})
    (run,) = (run for run in _json("--metric", "loss")["runs"] if run["id"] == "bbb")
    assert (run["last"], run["best"]) == ({"value": None, "step": 15}, {"value": 0.2, "step": 5})
    lines = [line.split() for line in hpc_train("compare", "small", "--metric", "loss").out.splitlines()]
    assert ["bbb", "1", "completed", "nan", "15", "0.2", "5"] in lines


def _append(paths: RunPaths, row: dict[str, Any]) -> None:
    whole = paths.metrics.read_text().rpartition("\n")[0]
    paths.metrics.write_text(f"{whole}\n{json.dumps(row)}\n")


def test_the_table_has_a_line_per_run(runs: list[RunPaths]) -> None:
    heads, *lines = hpc_train("compare", "small").out.splitlines()
    assert heads.split() == ["run", "seed", "state", "last", "val/accuracy", "step", "best", "(max)", "step"]
    assert [line.split() for line in lines] == [
        ["bbb", "1", "completed", "0.8", "10", "0.95", "5"],
        ["aaa", "0", "completed", "0.9", "10", "0.9", "10"],
        ["ccc", "2", "completed", "-", "-", "-", "-"],
    ]


def test_csv_has_whole_keys_and_numbers(runs: list[RunPaths]) -> None:
    rows = list(csv.reader(io.StringIO(hpc_train("compare", "small", "--csv").out)))
    assert rows[0] == [
        "run", "experiment", "seed", "state", "last val/accuracy", "last step", "best val/accuracy",
        "best step", "duration_s",
    ]  # fmt: skip
    assert rows[1] == ["bbb", "small", "1", "completed", "0.8", "10", "0.95", "5", ""]
    assert rows[3] == ["ccc", "small", "2", "completed", "", "", "", "", ""]


def test_other_ranks_other_code_and_changes_of_a_resume_are_shown(runs: list[RunPaths]) -> None:
    for number, paths in enumerate(runs, start=1):
        claim_attempt(paths, ranks=number)
        facts = read_json(paths.run) or {}
        changes = {"changes": {"1": [f"optimization.optimizer.lr=0.{number}"]}}
        write_json(paths.run, facts | changes | {"code": {"snapshot": f"{number}" * 20}})
    data = _json()
    assert sorted(data["keys"]) == ["code", "optimization.optimizer.lr", "ranks", "seed"]
    values = {"optimization.optimizer.lr": 0.2, "seed": 1, "ranks": 2, "code": "2" * 12}
    assert data["runs"][0]["values"] == values


def test_a_frozen_file_that_cannot_be_read_hides_no_other_run(runs: list[RunPaths]) -> None:
    runs[0].resolved.write_text("{")
    data = _json()
    assert {run["id"]: run["values"]["seed"] for run in data["runs"]} == {"aaa": None, "bbb": 1, "ccc": 2}


@pytest.fixture
def seeds(tmp_path: Path) -> None:
    """Two learning rates with two seeds each, and a third rate with one seed that has no value."""
    for number, (lr, seed, accuracy) in enumerate(
        [(0.1, 0, 0.8), (0.1, 1, 0.9), (0.2, 0, 0.95), (0.2, 1, 0.95), (0.3, 0, None)]
    ):
        optimizer = {"name": "adamw", "lr": lr}
        optimization = {"optimizer": optimizer}
        paths = small_run(tmp_path / "runs", f"{number:03d}", seed=seed, optimization=optimization)
        row = {"split": "val", "step": 10, "attempt": 1, "accuracy": accuracy}
        paths.metrics.write_text("" if accuracy is None else json.dumps(row) + "\n")
        write_status(paths, RunStatus(state="completed", step=10))


@pytest.mark.usefixtures("seeds")
def test_runs_that_differ_in_their_seed_only_are_averaged() -> None:
    data = _json("--over", "seed")
    lr = "optimization.optimizer.lr"
    assert (data["keys"], data["over"]) == ([lr], ["seed"])
    assert [(group["values"][lr], group["ids"]) for group in data["groups"]] == [
        (0.2, ["002", "003"]),
        (0.1, ["001", "000"]),
        (0.3, ["004"]),
    ]
    same, other, none = (group["best"] for group in data["groups"])
    assert same == {"mean": 0.95, "std": 0.0, "count": 2} and none is None
    assert other == {"mean": pytest.approx(0.85), "std": pytest.approx(0.05 * 2**0.5), "count": 2}
    heads, _, second, last = hpc_train("compare", "small", "--over", "seed").out.splitlines()
    assert heads.split() == ["runs", "lr", "last", "val/accuracy", "best", "(max)"]
    assert second.split() == ["2", "0.1", "0.85", "±", "0.071", "0.85", "±", "0.071"]
    assert last.split() == ["1", "0.3", "-", "-"]
    table = list(csv.reader(io.StringIO(hpc_train("compare", "small", "--over", "seed", "--csv").out)))
    assert table[0][:3] == ["runs", lr, "last val/accuracy mean"]
    assert table[1][1:] == ["0.2", "0.95", "0.0", "2", "0.95", "0.0", "2", ""]
    assert table[3][1:] == ["0.3", "", "", "0", "", "", "0", ""]


def test_a_key_that_ends_like_another_is_averaged_on_its_own(tmp_path: Path) -> None:
    """``seed`` is the experiment's, not the data set's, whose last part is the same."""
    for number, (seed, of_data) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        data = {"name": "digits", "args": {"seed": of_data}}
        small_run(tmp_path / "runs", f"{number:03d}", seed=seed, data=data)
    found = _json("--over", "seed")
    assert (found["keys"], found["over"]) == (["data.args.seed"], ["seed"])
    assert sorted(sorted(group["ids"]) for group in found["groups"]) == [["000", "002"], ["001", "003"]]
    assert _json("--over", "args.seed")["over"] == ["data.args.seed"]
    assert hpc_train("compare", "small").out.split()[1:3] == ["seed", "args.seed"]


@pytest.mark.usefixtures("seeds")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--metric f1", "--metric: f1 is in no run's metrics.jsonl; there are val/accuracy"),
        ("--over precision", "--over: these runs do not differ in precision; they differ in seed, opt"),
        ("--group-by precision", "--group-by: these runs do not differ in precision; they differ in"),
        ("--group-by lr --over seed", "--over and --group-by exclude each other; use one of them"),
        ("--csv --json", "exclude each other"),
    ],
)
def test_what_can_not_be_compared_is_refused(options: str, message: str) -> None:
    assert message in stderr_of(2, "compare", "small", *options.split())


@pytest.mark.usefixtures("seeds")
def test_grouping_by_a_key_averages_over_all_others() -> None:
    grouped, averaged = _json("--group-by", "lr"), _json("--over", "seed")
    assert grouped == averaged
    text = hpc_train("compare", "small", "--group-by", "seed").out.splitlines()
    assert [line.split()[:4] for line in text[1:]] == [["2", "1", "0.925", "±"], ["3", "0", "0.875", "±"]]
    both = _json("--over", "seed", "--over", "lr")
    assert [len(group["ids"]) for group in both["groups"]] == [5]


# ``compare A B --diff``: keys, versions and code in which two runs differ.


_OLD = "import torch\nWIDTH = 16\n"


def _made(run_id: str, folder: Path | None, **changes: Any) -> RunPaths:
    paths = RunPaths(runs_root() / "small" / run_id)
    taken = None if folder is None else take(runs_root() / ".code", folder)
    assert create_run(paths, small_experiment(**changes), run_id, 10, snapshot=taken)
    return paths


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunPaths, RunPaths]:
    """Two runs of other seeds, versions and code."""
    tree = work_tree(tmp_path / "work", "same.py", "gone.py")
    (tree / "model.py").write_text(_OLD)
    first = _made("aaa", tree)
    (tree / "model.py").write_text(_OLD.replace("16", "32 \x1b[31m"))
    (tree / "gone.py").unlink()
    (tree / "new.py").write_text("NEW = 1\n")
    (tree / "table.bin").write_bytes(b"\0\1")
    second = _made("bbb", tree, seed=3, early_stopping={"metric": "loss", "mode": "min", "patience": 2})
    versions = (read_json(second.run) or {})["versions"]
    change_facts(second, versions=versions | {"torch": "1.0"})
    return first, second


def test_keys_versions_and_code_are_shown_as_diffs(pair: tuple[RunPaths, RunPaths]) -> None:
    versions = (read_json(pair[0].run) or {})["versions"]
    done = succeeded("compare", "aaa", "bbb", "--diff")
    assert done.out.splitlines() == [
        "--- aaa",
        "+++ bbb",
        "experiment: 5 keys differ",
        "- seed: 0",
        "+ seed: 3",
        "+ early_stopping.metric: loss",
        "+ early_stopping.mode: min",
        "+ early_stopping.patience: 2",
        "+ early_stopping.min_delta: 0.0",
        "versions: 1 package differs",
        f"- torch: {versions['torch']}",
        "+ torch: 1.0",
        "code: 4 files differ",
        "A new.py",
        "A table.bin",
        "M model.py",
        "D gone.py",
        "--- aaa/gone.py",
        "+++ bbb/gone.py",
        "@@ -1 +0,0 @@",
        "-gone.py",
        "--- aaa/model.py",
        "+++ bbb/model.py",
        "@@ -1,2 +1,2 @@",
        " import torch",
        "-WIDTH = 16",
        "+WIDTH = 32 \\x1b[31m",
        "--- aaa/new.py",
        "+++ bbb/new.py",
        "@@ -0,0 +1 @@",
        "+NEW = 1",
        "table.bin: not compared: too long, not text, or not readable",
    ]


def test_json_has_the_same(pair: tuple[RunPaths, RunPaths]) -> None:
    found = json.loads(hpc_train("compare", *(paths.folder for paths in pair), "--diff", "--json").out)
    assert [run["id"] for run in found["runs"]] == ["aaa", "bbb"]
    assert found["settings"]["seed"] == [0, 3]
    assert found["versions"]["torch"][1] == "1.0"
    assert found["code"]["changed"] == ["tree/model.py"]
    assert found["code"]["added"] == ["tree/new.py", "tree/table.bin"]
    assert "+WIDTH = 32 \x1b[31m" in found["code"]["diff"]


def test_a_long_diff_is_truncated(pair: tuple[RunPaths, RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_diff, "_MAX_LINES", 5)
    lines = hpc_train("compare", "aaa", "bbb", "--diff").out.splitlines()
    assert lines[-1] == "… cut after 5 lines"
    assert lines[-2] == "--- aaa/model.py"


def test_equal_runs_and_runs_without_code_are_said_to_be(tmp_path: Path) -> None:
    _made("aaa", None)
    _made("bbb", None)
    assert hpc_train("compare", "aaa", "bbb", "--diff").out.splitlines()[2:] == [
        "experiment: no key differs",
        "versions: no package differs",
        "code: unknown: aaa has no snapshot of its code",
    ]


def test_a_snapshot_that_is_gone_hides_nothing_else(pair: tuple[RunPaths, RunPaths]) -> None:
    folder = snapshot.linked(pair[1])
    assert folder is not None
    shutil.rmtree(folder)
    done = succeeded("compare", "aaa", "bbb", "--diff")
    assert "+ seed: 3" in done.out and "the code that this run uses is gone" in done.out


def test_a_file_outside_of_the_snapshot_is_not_read(pair: tuple[RunPaths, RunPaths], tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret\n")
    folder = snapshot.linked(pair[1])
    assert folder is not None
    (folder / "tree" / "new.py").unlink()
    (folder / "tree" / "new.py").symlink_to(tmp_path / "secret.txt")
    done = hpc_train("compare", "aaa", "bbb", "--diff")
    assert "secret" not in done.out and "new.py: not compared" in done.out


def test_two_runs_are_needed(pair: tuple[RunPaths, RunPaths]) -> None:
    assert "--diff: compares two runs, and these are 1; name two" in stderr_of(2, "compare", "aaa", "--diff")
    for options in (["--csv"], ["--over", "seed"], ["--metric", "loss"]):
        assert hpc_train("compare", "small", "--diff", *options).code == 2


def test_only_diffs_read_snapshots(pair: tuple[RunPaths, RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise AssertionError("a snapshot was read")

    monkeypatch.setattr(snapshot, "linked", refused)
    assert hpc_train("compare", "small").code == 0
