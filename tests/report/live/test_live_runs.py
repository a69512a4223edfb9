"""What the screen shows of runs, and that little is read for it."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest

from hpc_train.launchers.following import FollowingLauncher
from hpc_train.paths import RunPaths, runs_root
from hpc_train.report.live import live_runs as reading_module
from hpc_train.report.live.details import MIN_LINES, DetailsReader, LogTail, charts
from hpc_train.report.live.live_runs import (
    COLUMNS,
    ENDED_EVERY_S,
    LiveRun,
    RunsReader,
    bar,
    cells,
    columns_for,
    counts,
    newest,
    next_sort,
    selected,
    short_number,
    sparkline,
)
from hpc_train.run.files import remove_folder
from hpc_train.run.run_status import RunStatus, write_status
from hpc_train.run.spikes import Spike, SpikesFile
from tests.calls import work_of
from tests.launchers.slurm.programs import put_programs_first
from tests.launchers.slurm.queued import queued_run
from tests.report.live.runs import add_rows, made_run, three_runs
from tests.report.test_progress_display import Clock
from tests.run.runs import change_facts, change_record


def test_a_run_is_shown_as_its_files_say() -> None:
    paths = made_run(runs_root())
    (run,) = RunsReader([]).read()
    assert (run.name, run.experiment, run.state, run.nodes) == ("abc", "small", "running", ("n1",))
    assert (run.share, run.rate, run.data_wait, run.mfu) == (0.3, (1234.5, "samples/s"), 0.25, 0.41)
    assert run.losses == tuple(2.0 / step for step in range(1, 31))
    assert run.metric == ("accuracy", 0.3)
    assert run.eta_s == pytest.approx(70, abs=2)
    write_status(paths, RunStatus("failed", 30, 100, 1.0, 1, "rank 0: no"))
    reader = DetailsReader(paths)
    assert "spikes" not in dict(reader.read(run, is_full=True).lines)
    spikes = SpikesFile(paths.spikes, 0)
    spikes.append(Spike(7, 9.0, 2.0), [4], "skip")
    spikes.close()
    change_record(paths.attempt(1), in_place=True)
    details = dict(reader.read(run, is_full=True).lines)
    assert details["spikes"].startswith("1 spike: step 7: loss 9 above 2, update skipped (samples 4); ")
    assert details["best"] == "accuracy 0.3 at step 30"
    assert details["speed"] == "1.23k samples/s, 1 s per step, 25.0% data wait, MFU 41.0%"
    assert details["folder"] == str(paths.folder)
    assert " on n1 in place: " in details["attempts"]


def test_an_extended_run_names_the_other_in_the_table_and_the_pane() -> None:
    old, new = made_run(runs_root(), "old", "completed"), made_run(runs_root(), "new", values={"seed": 3})
    for paths, facts in ((new, {"extends": {"run": "old", "step": 80}}), (old, {"extended_by": ["new"]})):
        change_facts(paths, **facts)
    runs = {run.name: run for run in RunsReader([]).read()}
    expected = {"new": "seed=3, extends old from step 80", "old": "extended by new"}
    assert {name: run.values for name, run in runs.items()} == expected
    for name, words in expected.items():
        assert any(column.head == "values" for column in columns_for([runs[name]], 200))
        details = dict(DetailsReader(runs[name].paths).read(runs[name], is_full=False).lines)
        assert f", {words}, " in details["run"]


def test_new_rows_runs_and_removed_runs_are_seen() -> None:
    paths, reader = made_run(runs_root()), RunsReader([])
    reader.read()
    add_rows(paths, 31, since=31)
    other = made_run(runs_root(), "def", "completed")
    by_name = {run.name: run for run in reader.read()}
    assert by_name["abc"].train["step"] == 31 and by_name["def"].state == "completed"
    remove_folder(other.folder)
    assert [run.name for run in reader.read()] == ["abc"]


def test_words_choose_runs_and_a_removed_one_leaves_the_others() -> None:
    made_run(runs_root())
    paths = made_run(runs_root(), "def")
    made_run(runs_root(), "ghi")
    reader = RunsReader(["abc", "def"])
    assert [run.name for run in reader.read()] == ["abc", "def"]
    remove_folder(paths.folder)
    assert [run.name for run in reader.read()] == ["abc"]


def test_rows_that_a_resume_withdrew_are_gone() -> None:
    paths, reader = made_run(runs_root()), RunsReader([])
    reader.read()
    shorter = paths.folder / "new"
    shorter.write_text("".join(paths.metrics.read_text().splitlines(keepends=True)[:5]))
    shorter.rename(paths.metrics)
    (run,) = reader.read()
    assert len(run.losses) == 5 and run.evaluation == {}


def test_files_that_have_not_changed_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        made_run(runs_root(), f"run{number}", "completed")
    reader = RunsReader([])
    reader.read()
    opened = work_of(reader.read, monkeypatch).opened
    assert not [path for path in opened if str(runs_root()) in path]


def test_of_a_long_file_only_the_end_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = made_run(runs_root())
    add_rows(paths, 2000, since=31)
    (run,) = RunsReader([]).read()
    assert len(run.losses) == reading_module.HISTORY and run.train["step"] == 2000


def test_ended_runs_are_asked_about_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(reading_module, "time", clock)
    asked: list[list[RunPaths]] = []
    real = FollowingLauncher.status

    def status(self: FollowingLauncher, runs: list[RunPaths], **kwargs: bool) -> list[RunStatus]:
        asked.append(runs)
        return real(self, runs, **kwargs)

    monkeypatch.setattr(FollowingLauncher, "status", status)
    made_run(runs_root(), "abc", "completed")
    running = made_run(runs_root(), "def")
    reader = RunsReader([])
    for _ in range(3):
        reader.read()
    assert [len(runs) for runs in asked] == [2, 1, 1], "one question for all runs of a launcher"
    assert asked[-1] == [running]
    clock.now_s += ENDED_EVERY_S
    reader.read()
    assert len(asked[-1]) == 2


def test_a_scheduler_is_asked_once_for_all_runs_and_its_error_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = put_programs_first(tmp_path, monkeypatch)
    programs.put("squeue", "echo no answer >&2; exit 1")
    for number in range(5):
        queued_run(runs_root(), str(number + 1), f"run{number}")
    reader = RunsReader([])
    for _ in range(3):
        assert [run.state for run in reader.read()] == ["pending"] * 5
    assert len(programs.calls("squeue")) == 1, "the others take its answer of the last 10 s"
    assert "what follows is what the run folders say" in capsys.readouterr().err


def test_a_log_is_followed_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    tail = LogTail(path, tail_bytes=32)
    assert tail.new_lines() == []
    path.write_text("".join(f"line {number}\n" for number in range(20)) + "unfini")
    assert tail.new_lines() == ["line 17", "line 18", "line 19"]
    with path.open("a") as file:
        file.write("shed\na\x1b[31mb\rc\n")
    assert tail.new_lines() == ["unfinished", "a\\x1b[31mb", "c"]
    path.write_text("new\n")
    assert tail.new_lines() == ["new"]
    path.unlink()
    os.mkfifo(path)
    assert tail.new_lines() == []


def _runs() -> list[LiveRun]:
    three_runs()
    return RunsReader([]).read()


def test_runs_are_filtered_by_words_and_states_and_sorted() -> None:
    runs = _runs()
    assert [run.name for run in selected(runs, "", "name")] == ["a1", "b2", "c3"]
    assert [run.name for run in selected(runs, "FAILED", "name")] == ["b2"]
    assert [run.name for run in selected(runs, "small valueerror", "name")] == ["b2"]
    assert selected(runs, "small nothing", "name") == []
    orders = {"state": "b2 a1 c3", "progress": "c3 a1 b2", "ETA": "a1 b2 c3", "loss": "c3 a1 b2"}
    sort = "name"
    for _ in orders:
        sort = next_sort(sort)
        assert " ".join(run.name for run in selected(runs, "", sort)) == orders[sort]
    assert next_sort(sort) == "name"
    assert counts(runs) == "3 runs: 1 failed, 1 running, 1 completed"


def test_the_newest_run_that_runs_is_preferred() -> None:
    def run(name: str, state: str, since: str) -> LiveRun:
        return LiveRun(RunPaths(Path(name)), name, "small", RunStatus(state), since=since)

    states = [("a", "running", "1"), ("b", "running", "3"), ("c", "pending", "4"), ("d", "failed", "2")]
    runs = [run(*facts) for facts in states]
    assert newest(runs) is runs[1]
    assert newest([runs[3], runs[2]]) is runs[2]
    assert newest([]) is None


def test_swept_values_are_a_column_and_filter_runs() -> None:
    for run_id, lr in (("a1", 0.1), ("b2", 0.2000000000000001)):
        made_run(runs_root(), run_id, values={"optimization.optimizer.lr": lr, "seed": 3})
    runs = RunsReader([]).read()
    assert [run.values for run in runs] == ["lr=0.1 seed=3", "lr=0.2 seed=3"]
    assert [run.name for run in selected(runs, "lr=0.2", "name")] == ["b2"]
    assert "values" in [column.head for column in columns_for(runs, 78)]


@pytest.mark.parametrize("width", [40, 60, 78, 100, 118, 158, 198, 300])
def test_the_columns_fit_the_screen(width: int) -> None:
    runs = _runs()
    columns = columns_for(runs, width)
    heads = [column.head for column in columns]
    assert sum(columns.values()) + len(columns) - 1 <= max(width, 60)
    assert heads[0] == "run" and {"state", "step", "ETA", "loss"} <= set(heads)
    if width >= 78:
        assert heads[-1] == COLUMNS[-1].head
    if width >= 158:
        assert {"progress", "trend", "rate", "wait", "MFU", "nodes", "tries", "experiment"} <= set(heads)
    for run in runs:
        line = cells(run, columns)
        assert all(len(text) <= place for text, place in zip(line, columns.values(), strict=True))
        assert run.state in line


def test_a_file_replaced_while_read_loses_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    row = '{"split": "train", "step": %d, "loss": 0.5}\n'
    path.write_text(row % 1 + row % 2)
    tail, real = reading_module.MetricsTail(path), reading_module.stamp
    tail.update()

    def stamp_and_replace(seen: Path) -> object:
        found = real(seen)
        other.write_text(row % 1)
        other.replace(path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(reading_module, "stamp", stamp_and_replace)
        path.write_text(row % 1 + row % 2 + row % 3)
        tail.update()
    for _ in range(2):
        assert [each["step"] for each in tail.training] == [1]
        tail.update()


def test_a_loss_that_is_nan_is_shown() -> None:
    """Rows have null for NaN and infinity."""
    paths = made_run(runs_root(), step=9)
    add_rows(paths, 10, since=10, loss=None)
    (run,) = RunsReader([]).read()
    assert math.isnan(run.losses[-1]) and len(run.losses) == 10
    columns = columns_for([run], 200)
    shown = dict(zip((column.head for column in columns), cells(run, columns), strict=True))
    assert (shown["trend"], shown["loss"]) == ("█▄▃▂▁▁▁▁▁×", "nan")
    assert "loss nan" in dict(DetailsReader(paths).read(run, is_full=False).lines)["training"]


def test_a_sparkline_shows_trend_and_non_finite_values() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0], 10) == "█▆▃▁"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁×█"
    assert sparkline([1e308, -1e308], 2) == "█▁"
    assert sparkline([5.0] * 100, 4) == "▁▁▁▁"
    assert sparkline([], 4) == ""
    assert sparkline([0.0, 5e-324], 10) == "▁▁"
    assert (bar(0.5, 8), bar(1.0, 3)) == ("████░░░░", "███")
    assert [short_number(value) for value in (3.14159, 1234.5, 2.5e7, math.inf)] == [
        "3.14", "1.23k", "25M", "inf",
    ]  # fmt: skip


def test_a_line_goes_from_one_corner_to_the_other() -> None:
    titles, *rows = charts({"loss": [(10.0 * x, 1.0 - x / 10) for x in range(11)]}, 20, 6)
    assert titles == ("loss: 0 at step 100 ", "")
    assert [line for _, line in rows] == [
        "        1 ⠑⠢⡀⠀⠀⠀⠀⠀⠀⠀",
        "          ⠀⠀⠈⠒⢄⠀⠀⠀⠀⠀",
        "          ⠀⠀⠀⠀⠀⠑⠤⡀⠀⠀",
        "        0 ⠀⠀⠀⠀⠀⠀⠀⠈⠢⢄",
        "     step 0      100",
    ]


def test_as_many_curves_as_fit_stand_side_by_side() -> None:
    curves = {name: [(1.0, 1.0), (2.0, value)] for name, value in (("a", 2.0), ("b", 3.0), ("c", 4.0))}
    for width, names in ((30, "a"), (79, "ab"), (160, "abc")):
        (titles, _), *rows = charts(curves, width, 8)
        assert [name for name in "abc" if f"{name}: " in titles] == list(names)
        assert len(rows) == 7 and all(len(line) <= width for _, line in rows)


@pytest.mark.parametrize(
    "values",
    [[1.0], [math.nan, 1.0], [], [math.inf, -math.inf, 1.0]],
    ids=["one point", "one finite", "none", "one finite of three"],
)
def test_without_two_finite_points_nothing_is_drawn(values: list[float]) -> None:
    assert charts({"loss": list(enumerate(values))}, 80, 10) == []
    assert charts({"loss": [(1.0, 1.0), (2.0, 2.0)]}, 80, MIN_LINES - 1) == []


@pytest.mark.parametrize(
    "values",
    [
        [5.0] * 100, [sys.float_info.max, -sys.float_info.max], [5e-324, 0.0], [math.nan, 1.0, math.inf, 2.0],
        [float(value) for value in range(10_000)],
    ],
    ids=["constant", "huge", "tiny", "with gaps", "many"],
)  # fmt: skip
def test_any_values_are_drawn(values: list[float]) -> None:
    drawn = charts({"loss": list(enumerate(values))}, 80, 8)
    assert len(drawn) == 8
    dots = "".join(line for _, line in drawn)
    assert any("⠀" < character <= "⣿" for character in dots)


def test_values_over_decades_have_a_logarithmic_scale() -> None:
    (title, _), *_ = charts({"loss": [(1.0, 100.0), (2.0, 0.01)]}, 60, 8)
    assert title.startswith("loss, logarithmic: 0.01 at step 2")
