"""Reading ``metrics.jsonl`` of a long run costs what is looked for, not what the file holds."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hpc_train.report.metrics_reader import Metric, MetricsReader, find_metric, rows_in, validation_rows


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """20,000 rows of training and 20 of evaluations, 2 MB."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"split": "train", "step": step, "note": "x" * 60}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"split": "val", "step": step, "accuracy": 0.5}) + "\n")
    return path


def test_last_and_best_parse_only_evaluation_rows(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    really = json.loads

    def count(text: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return really(text)

    monkeypatch.setattr(json, "loads", count)
    tracemalloc.start()
    rows = validation_rows(large)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row["step"] for row in rows] == list(range(1000, 20_001, 1000))
    assert parsed == 20
    assert peak < large.stat().st_size / 8


def test_a_large_file_is_read_row_by_row(large: Path) -> None:
    tracemalloc.start()
    count = sum(1 for _ in MetricsReader(large).new_rows())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 20_020
    assert peak < large.stat().st_size / 8


def test_a_line_without_an_integer_step_is_not_a_row(tmp_path: Path) -> None:
    steps = ("Infinity", "1e999", '"4"', "null")
    lines = [f'{{"split": "train", "step": {step}, "loss": 1.0}}\n' for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) * 2)
    assert list(rows_in(tmp_path / "metrics.jsonl")) == []


@pytest.mark.parametrize("ends_with_line", [True, False])
def test_rows_longer_than_a_block_or_across_blocks(tmp_path: Path, *, ends_with_line: bool) -> None:
    written = [
        {"split": "val" if step % 7 == 0 else "train", "step": step, "text": "x" * (step * 37 % 3000)}
        for step in range(300)
    ]
    written.insert(150, {"split": "val", "step": -1, "text": "val" * 100_000})
    lines = [json.dumps(row) for row in written]
    lines[10] = lines[10].replace("train", "v\\u0061l")
    lines[11] = '{"split": "val", no JSON'
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + "\n" * ends_with_line)
    complete = lines if ends_with_line else lines[:-1]
    expected = [json.loads(line) for line in complete if not line.endswith("no JSON")]
    assert list(rows_in(path)) == expected
    assert validation_rows(path) == [row for row in expected if row["split"] == "val"]


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("loss", "min"),
        ("ema_loss", "min"),
        ("rmse", "min"),
        ("accuracy", "max"),
        ("map_50", "max"),
        ("iou_time", "max"),
        ("ema_iou_error", "max"),
    ],
)
def test_less_of_a_loss_or_an_error_is_better(name: str, goal: str) -> None:
    assert Metric("val", name).goal == goal


def test_detectors_are_compared_by_average_precision() -> None:
    found = [Metric("train", "loss"), Metric("val", "map"), Metric("val", "map50")]
    assert find_metric(found, None) == Metric("val", "map")
