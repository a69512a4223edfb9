"""Reading ``metrics.jsonl`` of a long run costs what is looked for, not what the file holds."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.paths import RunPaths, runs_root
from hpc_train.report.changed_keys import _comparable, _differ
from hpc_train.report.metrics_reader import (
    Metric,
    MetricsReader,
    Row,
    find_metric,
    last_metric,
    newest_judged,
    newest_rows,
    rows_in,
    sampled_rows,
    spread_rows,
    validation_rows,
)
from hpc_train.report.usage import goodput
from hpc_train.run import metric_rows
from hpc_train.run.files import read_tail
from hpc_train.run.run_status import RunStatus
from tests.calls import work_of
from tests.cli.commands import hpc_train
from tests.report.made_runs import made_sweep
from tests.run.runs import write_rows


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
    really = metric_rows._decode

    def count(text: str) -> tuple[Any, int]:
        nonlocal parsed
        parsed += 1
        return really(text)

    monkeypatch.setattr(metric_rows, "_decode", count)
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
        ("val/loss", "min"),
        ("token.wer", "min"),
        ("step_s", "min"),
        ("samples_per_s", "max"),
        ("images/s", "max"),
    ],
)
def test_less_of_a_loss_or_an_error_is_better(name: str, goal: str) -> None:
    assert Metric("val", name).goal == goal


def test_detectors_are_compared_by_average_precision() -> None:
    found = [Metric("train", "loss"), Metric("val", "map"), Metric("val", "map50")]
    assert find_metric(found, None) == Metric("val", "map")


# Commands read and parse only what they show; what they show is what the whole files say.


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(["val"]),
    st.just("val"),
)  # fmt: skip
_ROWS = st.fixed_dictionaries(
    {
        "split": st.sampled_from(["train", "val", "test", 'a "val" b', None]),
        "step": st.one_of(st.integers(), st.integers(0, 9), _VALUES),
    },
    optional={"loss": _VALUES, "accuracy": _VALUES, "note": st.sampled_from(["\r", "é", "ab\\"])},
)
#: A row as we write it, and in other ways in which JSON may be written.
_LINES = st.one_of(
    _ROWS.map(json.dumps),
    _ROWS.map(lambda row: json.dumps(row, ensure_ascii=False)),
    _ROWS.map(lambda row: json.dumps(row).replace("val", "v\\u0061l")),
    _ROWS.map(lambda row: "\r" + json.dumps(row, separators=(",\r", ":\t")) + " "),
    _ROWS.map(lambda row: json.dumps(row)[:-3]),
    _ROWS.map(lambda row: json.dumps([row])),
    st.just('{"split": "train", "split": "val", "loss": 1}'),
    st.text(max_size=9),
).map(lambda line: line.encode("utf-8", "surrogatepass"))
_CONTENTS = st.builds(
    lambda lines, end, others: others + b"\n".join(lines) + end,
    st.lists(st.one_of(_LINES, _LINES, st.binary(max_size=9)), max_size=9),
    st.sampled_from([b"\n", b"\n", b"", b'\n{"split": "val", "loss": 3}']),
    st.sampled_from([b"", b"", b"\xff\xfe", b'"val"\n', b"\\\n"]),
)


_OF_A_RUN = ("status.json", "metrics.jsonl", "attempt.json")


def _all_rows(content: bytes) -> list[Row]:
    """Return the rows of a file: every complete line that is an object with a step and a split."""
    rows = []
    for line in content.split(b"\n")[:-1]:
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            continue
        is_row = line.startswith(b"{") and isinstance(row.get("step"), int)
        rows += [row] if is_row and isinstance(row.get("split"), str) else []
    return rows


def _text(found: Any) -> str:
    """Return ``found`` so that NaN is equal to NaN."""
    return repr(found)


@pytest.mark.slow
@settings(max_examples=150)
@given(content=_CONTENTS, tail=st.integers(1, 200))
def test_all_readers_agree_with_one_that_parses_each_line(content: bytes, tail: int) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder, "metrics.jsonl")
        file.write_bytes(content)
        rows = _all_rows(content)
        assert _text(list(rows_in(file))) == _text(rows)
        assert _text(sampled_rows(file, 100)) == _text((rows, False))
        assert _text(spread_rows(file, 1 << 20)) == _text((rows, 1.0))
        assert _text(newest_rows(file)) == _text(rows)
        assert _text(validation_rows(file)) == _text([row for row in rows if row.get("split") == "val"])
        assert _text(last_metric(newest_judged(file))) == _text(last_metric(rows))
        cut = content[-tail:]
        cut = cut if len(content) <= tail else cut.partition(b"\n")[2]
        assert _text(newest_rows(file, tail)) == _text(_all_rows(cut))
        assert read_tail(file, tail) == (content[-tail:], len(content) <= tail)


@given(values=st.lists(st.one_of(_VALUES, st.just({}), st.just(0.0), st.just(0)), min_size=1, max_size=5))
def test_values_differ_that_are_not_written_alike(values: list[Any]) -> None:
    assert _differ(values) == any(_comparable(value) != _comparable(values[0]) for value in values)


@pytest.mark.parametrize("content", ['{"x": "%s"}\n' % ("x" * (1 << 20)), ""])
def test_goodput_is_of_all_rows(tmp_path: Path, content: str) -> None:
    """A line that is longer than any of ours is skipped where few rows are kept, and told."""
    (paths,) = made_sweep(tmp_path, 1, steps=60)
    with paths.metrics.open("a") as file:
        file.write(content)
    rows, is_part = sampled_rows(paths.metrics, 100)
    assert is_part is bool(content) and len(rows) == 13
    now = RunStatus("completed", 60, 60)
    found = goodput(paths, now, 1000.0)
    assert found is not None and 0 < found < 1
    assert goodput(paths, now, 1000.0, rows) == found
    assert goodput(paths, now, None) is None


def test_a_large_file_is_read_in_evenly_spaced_blocks(tmp_path: Path) -> None:
    """Times that are estimated from them are those of all rows, and no more than the limit is read."""
    (paths,) = made_sweep(tmp_path, 1, steps=1)
    times = {"step_s": 0.5, "data_wait_s": 0.125, "attempt": 1}
    rows = [{"split": "train", "step": step, "time": step * 0.5} | times for step in range(1, 20_001)]
    write_rows(paths, rows)
    size, limit = paths.metrics.stat().st_size, 1 << 18
    some, share = spread_rows(paths.metrics, limit)
    assert share == limit / size < 0.2
    assert len(some) == pytest.approx(share * len(rows), rel=0.1)
    assert (some[0], some[-1]) == (rows[0], rows[-1])
    assert [row["step"] for row in some] == sorted({row["step"] for row in some})
    now = RunStatus("completed", 20_000, 20_000)
    assert goodput(paths, now, 20_000.0, some) == goodput(paths, now, 20_000.0) == 0.375
    assert spread_rows(tmp_path, limit) == ([], 1.0)


@pytest.fixture
def runs() -> list[RunPaths]:
    found = made_sweep(runs_root(), 6, steps=60)
    for paths in found:
        paths.attempt(1).events.write_text('{"version": 1, "events": {}}')
    return found


def _opened(monkeypatch: pytest.MonkeyPatch, *command: str) -> list[str]:
    """Return the run files that a command opened: the run's number and the file's name."""
    work = work_of(lambda: hpc_train(*command), monkeypatch)
    root = str(runs_root() / "sweep")
    return [path.removeprefix(root).lstrip("/0") for path in work.opened if path.startswith(root)]


def test_a_table_of_runs_reads_three_files(runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    names = {Path(each).name for each in _opened(monkeypatch, "status")}
    assert names == {"run.json", *_OF_A_RUN}
    names = {Path(each).name for each in _opened(monkeypatch, "compare", "sweep")}
    assert names == {"resolved.json", *_OF_A_RUN}, "run.json is as it was a moment ago"


def test_runs_without_failure_read_status_only(runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    names = _opened(monkeypatch, "status", "--failed")
    assert "5/metrics.jsonl" in names
    assert {Path(each).name for each in names if not each.startswith("5/")} == {"run.json", "status.json"}


def test_json_reads_only_metrics_twice(runs: list[RunPaths], monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, and the newest ones."""
    names = _opened(monkeypatch, "status", "--json")
    assert names.count("1/metrics.jsonl") == 2
    assert {names.count(f"1/{name}") for name in ("run.json", "status.json", "resolved.json")} == {1}
