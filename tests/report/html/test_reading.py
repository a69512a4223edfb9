"""What the page reads: curves without losing peaks, files of the run's own folder only, time by part."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hpc_train.paths import RunPaths
from hpc_train.report.html import limits
from hpc_train.report.html.collecting import DATA_WAIT, Curve, collect, curves_of, non_finite_ends
from hpc_train.report.html.evaluation_files import newest_evaluation
from hpc_train.report.html.line_charts import Scale, line_charts, short
from hpc_train.report.html.page import _table, render
from hpc_train.report.metrics_reader import Metric, Point, sampled_rows
from hpc_train.report.usage import PARTS
from hpc_train.training.evaluation_outputs import png as sheet_png
from hpc_train.training.tasks.drawing import DESCRIPTION
from tests.report.made_experiments import made_experiments
from tests.report.made_runs import made_sweep, png
from tests.run.runs import change_facts, write_rows

_FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(values=st.lists(_FINITE, min_size=1, max_size=200), max_points=st.integers(4, 50))
def test_a_thinned_curve_keeps_its_ends_and_extremes(values: list[float], max_points: int) -> None:
    curve = Curve(array("q", range(len(values))), array("d", values))
    thinned = curve.thinned(max_points)
    assert len(thinned) <= max(max_points, 4)
    assert (thinned.values[0], thinned.values[-1]) == (values[0], values[-1])
    assert (min(thinned.values), max(thinned.values)) == (min(values), max(values))
    assert list(thinned.steps) == sorted(set(thinned.steps))


@given(values=st.lists(_FINITE, min_size=1, max_size=9), value=_FINITE)
def test_every_finite_value_has_a_place_and_ticks(values: list[float], value: float) -> None:
    scale = Scale.over(values)
    assert 0 <= scale.place(value) <= 1
    assert scale.ticks() == sorted(scale.ticks()) and len(scale.ticks()) < 12
    assert all(map(short, scale.ticks()))


def test_only_finite_numbers_of_rising_steps_are_in_a_curve() -> None:
    losses: list[Any] = [2.0, math.nan, "3", True, None, 10**400, 1, 0.5]
    rows = [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    rows += [{"split": "train", "step": step, "loss": 9.0} for step in (3, -1)]
    rows += [{"loss": 1.0}, {"split": "train", "step": 9, "step_s": 2.0, "data_wait_s": 0.5}]
    curves = curves_of(rows, 100)
    loss = curves[Metric("train", "loss")]
    assert (list(loss.steps), list(loss.values)) == ([0, 6, 7], [2.0, 1.0, 0.5])
    assert list(curves[DATA_WAIT].values) == [25.0]


@pytest.mark.parametrize(
    ("losses", "curve", "end"),
    [
        ([(1, 2.0), (2, 1.0), (2, 9.0), (3, 0.5)], [(1, 2.0), (2, 1.0), (3, 0.5)], None),
        ([(3, 2.0), (1, 9.0), (4, 1.0)], [(3, 2.0), (4, 1.0)], None),
        ([(1, 2.0), (2, math.nan)], [(1, 2.0)], 2),
        ([(1, None), (2, 1.0)], [(2, 1.0)], None),
        ([(2, math.inf), (1, 1.0)], [(1, 1.0)], 2),
        ([(1, None), (2, 10**400)], None, 1),
    ],
)
def test_rows_of_equal_names_are_read_like_others(
    losses: list[tuple[int, Any]], curve: list[tuple[int, float]] | None, end: int | None
) -> None:
    loss = Metric("train", "loss")
    rows = [{"split": "train", "step": step, "loss": value} for step, value in losses]
    for number, between in enumerate(({}, {"lr": 1.0})):
        rows = [row | (between if place % 2 else {}) for place, row in enumerate(rows)]
        curves = curves_of(rows, 100)
        read = curves.get(loss)
        assert (read and list(zip(read.steps, read.values, strict=True))) == curve, number
        assert non_finite_ends(rows, curves).get(loss) == end, number


def test_a_run_with_too_many_metrics_keeps_the_first_ones() -> None:
    row = {"split": "val", "step": 1} | {f"m{number}": 1.0 for number in range(2 * limits.METRICS)}
    assert len(curves_of([row | {"x" * 1000: 1.0}], 10)) == limits.METRICS


def test_of_many_rows_every_kth_is_read_and_evaluations_and_the_last_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [{"split": "train", "step": step} for step in range(1, 1001)]
    rows[500:500] = [{"split": "val", "step": 500}]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(content + '{"long": "' + "x" * (2 << 20) + '"}\n{"split": "train", "step": 10')
    found, is_sampled = sampled_rows(file, 100)
    assert is_sampled and {"split": "val", "step": 500} in found
    assert 50 <= len(found) <= 103 and found[0]["step"] == 1
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)
    file.write_text(content)
    assert sampled_rows(file, 100)[0][-1]["step"] == 1000
    assert sampled_rows(file, 2000) == (rows, False)
    assert sampled_rows(tmp_path, 10) == ([], False)


def test_first_and_last_row_of_each_attempt_are_read_of_however_many_rows(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [
        {"split": "train", "attempt": attempt, "step": step}
        for attempt, steps in enumerate([range(1, 334), range(334, 338), range(338, 1001)], start=1)
        for step in steps
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = sampled_rows(file, 4)
    assert {row["step"] for row in found} >= {1, 333, 334, 337, 338, 1000}
    assert len(found) < 12
    # A damaged file in which each row is of another attempt is not read whole.
    file.write_text("".join(json.dumps(row | {"attempt": row["step"]}) + "\n" for row in rows))
    assert len(sampled_rows(file, 4)[0]) < 20


def test_only_the_best_runs_are_read_in_detail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of many runs reads few training rows of each; what it shows in detail has all."""
    runs = made_sweep(tmp_path, limits.DETAILED + 2, steps=600)
    monkeypatch.setattr(limits, "ALL_ROWS", len(runs) * 20)
    loss = Metric("train", "loss")
    best = collect(runs, "train/loss").runs
    monkeypatch.undo()
    whole = {run.paths: run for run in collect(runs, "train/loss").runs}
    losses = [point.value for run in best if (point := run.best(loss))]
    assert losses[: limits.DETAILED] == sorted(losses[: limits.DETAILED])
    for run in best[: limits.DETAILED]:
        assert run.curves[loss] == whole[run.paths].curves[loss]
    for run in best[limits.DETAILED :]:
        assert run.is_sampled and len(run.curves[loss]) < len(whole[run.paths].curves[loss])
        assert run.attempts == whole[run.paths].attempts
        validation = Metric("val", "accuracy")
        assert run.curves[validation] == whole[run.paths].curves[validation]


def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    (paths,) = made_sweep(tmp_path, 1, steps=100)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (paths.evaluation(100) / "secret.txt").symlink_to(secret)
    found = newest_evaluation(paths)
    assert found is not None and found.texts == [] and len(found.tables) == 1
    paths.evaluation(200).symlink_to(tmp_path)
    found = newest_evaluation(paths)
    assert found is not None and (found.step, found.texts) == (100, [])


def test_pictures_are_png_files_of_bounded_size_and_number(tmp_path: Path) -> None:
    (paths,) = made_sweep(tmp_path, 1, steps=100)
    folder = paths.evaluation(100)
    (folder / "a.png").write_text("<svg onload=alert(1)>")
    (folder / "b.png").write_bytes(png(1, 1) + b"x" * limits.PICTURE_BYTES)
    (folder / "c.png").mkdir()
    found = newest_evaluation(paths)
    assert found is not None
    assert [picture.title for picture in found.pictures] == ["prediction-0", "prediction-1"]
    for number in range(20):
        (folder / f"d{number}.png").write_bytes(png(1, 1))
    found = newest_evaluation(paths)
    assert found is not None and len(found.pictures) == limits.PICTURES


def test_samples_of_a_sheet_are_sorted_by_their_error_and_damaged_ones_omitted(tmp_path: Path) -> None:
    (paths,) = made_sweep(tmp_path, 1, steps=100)
    sheet = Image.new("RGB", (4, 4))
    part = ["", 0, 0, 4, 4]
    samples: list[dict[str, Any]] = [
        {"title": "right", "parts": [part], "classes": ["cat"], "error": 0},
        {"title": "worst", "parts": [part], "classes": ["dog", "cat"], "legend": [["a", "red"]], "error": 2},
        {"title": "wrong", "parts": [part], "error": 0.5, "lines": ["x"]},
    ]
    damaged: list[Any] = [{"title": "x", "parts": [part[:4]]}, {"title": "x"}, 3, {"title": "", "parts": [3]}]
    for last in damaged:
        sheet.info[DESCRIPTION] = [*samples, last]
        (paths.evaluation(100) / "predictions.png").write_bytes(sheet_png(sheet))
        found = newest_evaluation(paths)
        assert found is not None
        picture = next(picture for picture in found.pictures if picture.title == "predictions")
        assert [sample["title"] for sample in picture.samples] == ["worst", "wrong", "right"]
        assert picture.classes == [("cat", 2), ("dog", 1)]
        assert [picture.numbers(sample) for sample in picture.samples] == ["0 1", "", "0"]
        assert picture.samples[0]["legend"] == [], "no color"


def test_a_damaged_or_empty_table_is_not_shown(tmp_path: Path) -> None:
    (paths,) = made_sweep(tmp_path, 1, steps=100)
    table = paths.evaluation(100) / "confusion.csv"
    for content, expected in (("class,a\na,1,2\n", [["a", "1", "2"]]), ("class", []), ("\n", None)):
        table.write_text(content)
        found = newest_evaluation(paths)
        assert found is not None
        assert [each.rows for each in found.tables] == ([] if expected is None else [expected])


def test_times_by_part_add_up_to_the_time_of_all_attempts(tmp_path: Path) -> None:
    runs = made_sweep(tmp_path, 6)
    collected = collect(runs)
    for run in collected.runs:
        assert tuple(run.time_use) == PARTS
        assert sum(run.time_use.values()) == pytest.approx(run.elapsed_s)
        assert min(run.time_use.values()) >= 0
    by_name = {run.paths: run for run in collected.runs}
    preempted, crashed = by_name[runs[0]], by_name[runs[1]]
    assert preempted.time_use["stopping"] == pytest.approx(11.0)
    assert preempted.time_use["starting"] == pytest.approx(52.0)
    assert crashed.time_use["lost"] == pytest.approx(12.0, abs=0.1)
    assert preempted.time_use["training"] == pytest.approx(600 * 0.9, abs=1)


def test_the_best_run_and_its_metric_are_first(tmp_path: Path) -> None:
    collected = collect(made_sweep(tmp_path, 12))
    bests = [run.best(collected.metric).value for run in collected.runs]  # type: ignore[arg-type, union-attr]
    assert bests == sorted(bests, reverse=True)
    assert [str(chart.metric) for chart in line_charts(collected)][:2] == ["val/accuracy", "val/loss"]


def test_runs_of_each_task_are_compared_by_their_own_metric(tmp_path: Path) -> None:
    runs = made_experiments(tmp_path, 30)
    collected = collect(runs)
    assert [(each.task, str(each.metric), len(each.runs)) for each in collected.rankings] == [
        ("classification", "val/accuracy", 21),
        ("segmentation", "val/accuracy", 6),
        ("causal_lm", "val/loss", 3),
    ]
    assert collected.runs[:3] == [ranking.runs[0] for ranking in collected.rankings]
    (by_loss,) = collect(runs, "train/loss").rankings
    assert len(by_loss.runs) == 30 and str(by_loss.metric) == "train/loss"


def test_a_label_names_the_swept_values_and_what_else_distinguishes_runs(tmp_path: Path) -> None:
    runs = made_experiments(tmp_path, 9)
    every = collect(runs)
    labels = {run.paths: label for run, label in zip(every.runs, every.labels, strict=True)}
    assert labels[runs[0]] == "cifar-resnet lr=0.01 seed=1"
    assert labels[runs[-1]] == "shakespeare seed=1"
    alone = collect(runs[:2])
    assert sorted(alone.labels) == ["seed=1", "seed=2"], "the learning rates are equal"
    resolved = json.loads(runs[1].resolved.read_text()) | {"seed": 1}
    runs[1].resolved.write_text(json.dumps(resolved))
    change_facts(runs[1], values={"seed": 1})
    names = [f"seed=1 {run.folder.name}" for run in runs[:2]]
    assert sorted(collect(runs[:3]).labels) == sorted([*names, "seed=3"])


def test_a_run_outside_of_the_runs_folder_is_called_by_the_shortest_unique_end(tmp_path: Path) -> None:
    first, second, third = (made_sweep(tmp_path / name, 2)[:2] for name in ("a", "b", "c"))
    assert sorted(run.name for run in collect(first).runs) == ["0" * 10, "0" * 9 + "1"]
    third[0].folder.parent.rename(third[0].folder.parent.with_name("other"))
    moved = RunPaths(tmp_path / "c" / "other" / third[0].folder.name)
    names = {run.paths: run.name for run in collect([first[0], second[0], moved]).runs}
    expected = {run: str(run.folder) for run in (first[0], second[0])}
    assert names == expected | {moved: "other/" + "0" * 10}


def test_columns_are_in_the_order_of_their_importance(tmp_path: Path) -> None:
    collected = collect(made_experiments(tmp_path, 9))
    columns = [title for title, *_ in _table(collected.rankings[0], collected)["columns"]]
    assert columns[:6] == ["run", "state", "best val/accuracy", "experiment", "lr", "seed"]
    alone = collect(made_sweep(tmp_path, 2))
    columns = [title for title, *_ in _table(alone.rankings[0], alone)["columns"]]
    assert columns == [
        "run", "state", "best val/accuracy", "lr", "seed", "step", "time", "last val/accuracy",
        "best at step", "goodput", "attempts", "reason",
    ]  # fmt: skip


def test_the_newest_value_of_a_run_that_diverged_at_its_end_is_nan(tmp_path: Path) -> None:
    first, second = made_sweep(tmp_path, 2)
    rows = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    nan = {"attempt": 1, "split": "val", "step": 700, "accuracy": None, "loss": None}
    recovered = nan | {"step": 701, "loss": 0.25}
    write_rows(first, [*rows, nan, recovered])
    collected = collect([first, second])
    metric, loss = collected.metric, Metric("val", "loss")
    assert metric == Metric("val", "accuracy")
    diverged, other = sorted(collected.runs, key=lambda run: run.paths != first)
    last = diverged.last(metric)
    assert last is not None and math.isnan(last.value) and last.step == 701
    assert diverged.last(loss) == Point(0.25, 701)
    best, of_other = diverged.best(metric), other.last(metric)
    assert best is not None and best.step <= 600 and of_other is not None and of_other.step <= 600
    assert '<td class="number" data-key="">NaN</td>' in render(collected)
    assert [line_charts(collect(runs))[0].summary for runs in ([first], [second, first])] == [
        "val/accuracy over steps; last value NaN",
        f"val/accuracy over steps of 2 runs; last values {(end := short(of_other.value))} to {end}, NaN in 1",
    ]
