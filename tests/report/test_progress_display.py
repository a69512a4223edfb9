from __future__ import annotations

import io
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hpc_train.console import say
from hpc_train.paths import RunPaths
from hpc_train.report import progress_display as progress_module
from hpc_train.report.metrics_reader import MetricsReader
from hpc_train.report.progress_display import (
    LINE_EVERY_S,
    READ_EVERY_S,
    Progress,
    ProgressText,
    _Bar,
    duration,
    fit,
)
from hpc_train.run.files import write_json
from hpc_train.run.run_status import RunStatus, write_status


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "runs" / "small" / "abc")
    paths.folder.mkdir(parents=True)
    return paths


def _at(run: RunPaths, step: int, attempt: int = 2) -> None:
    write_status(run, RunStatus(state="running", step=step, total_steps=100, attempt=attempt))


def _row(run: RunPaths, **row: Any) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps({"attempt": 2, "split": "train", "step": 1} | row) + "\n")


def test_a_line_every_ten_seconds(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(run, attempt=2)
    _row(run, loss=0.5)
    for step in range(0, 31, 2):  # two steps a second
        _at(run, step)
        progress.update()
        clock.now_s += 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"{run.folder.name}: step 20/100 2 steps/s, 0:40 left, loss 0.5"]


def test_a_loss_that_is_nan_is_shown(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have null for NaN."""
    progress = Progress(run, attempt=2)
    _row(run, loss=0.5)
    _row(run, loss=None, step=2)
    _row(run, split="val", loss=None, accuracy=0.1, step=2)
    _at(run, 2)
    progress.update()
    progress.close()
    shown = capsys.readouterr().err
    assert "loss nan" in shown and "val loss nan accuracy 0.1" in shown and "0.5" not in shown


def test_notices_are_shown_once(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, words in ((1, "earlier"), (2, "pretrained weights: 3 of 5 tensors")):
        run.attempt(attempt).folder.mkdir(parents=True)
        write_json(run.attempt(attempt).notices, {"lines": [words]})
    progress = Progress(run, attempt=2)
    for step in (1, 2):
        _at(run, step)
        progress.update()
        clock.now_s += 1
    progress.close()
    shown = f"{run.folder.name}: pretrained weights: 3 of 5 tensors"
    assert [line for line in capsys.readouterr().err.splitlines() if "step" not in line] == [shown]


def test_an_evaluation_is_shown_now(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(run, attempt=2)
    _row(run, split="val", step=7, epoch=1.5, loss=0.25, accuracy=0.9)
    progress.update()
    assert capsys.readouterr().err == f"{run.folder.name}: step 7: val loss 0.25 accuracy 0.9\n"


def test_after_a_rollback_only_new_evaluations_are_shown(
    run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(run, attempt=2)
    kept = {"split": "val", "step": 2, "time": 20.5, "loss": 0.5}
    _row(run, **kept)
    _row(run, split="val", step=4, time=40.5, loss=0.75)
    progress.update()
    run.metrics.rename(run.metrics.with_suffix(".old"))  # so that the new file has another inode
    _row(run, **kept)
    _row(run, split="val", step=4, time=60.5, loss=0.25)
    progress.close()
    lines = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["step 2: val loss 0.5", "step 4: val loss 0.75", "step 4: val loss 0.25"]


def test_earlier_attempts_are_hidden(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    _row(run, split="val", attempt=1, loss=0.25)
    progress = Progress(run, attempt=2)
    _at(run, 50, attempt=1)
    progress.update()
    clock.now_s += 2 * LINE_EVERY_S
    progress.update()
    assert capsys.readouterr().err == ""


def test_the_last_rows_are_shown_at_the_end(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(run, attempt=2)
    progress.update()
    _row(run, split="val", step=100, accuracy=1.0)
    progress.close()
    assert "step 100: val accuracy 1" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Somebody watches it."""

    def isatty(self) -> bool:
        return True


def test_no_bar_is_drawn_after_the_end(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(run, attempt=2)
    _at(run, 20)
    progress.update()
    say("interrupted")
    progress.close()
    before, _, after = terminal.getvalue().partition("interrupted")
    assert "20/100" in before
    assert "20/100" not in after.rpartition("\x1b[2K")[2], "it is erased last"


def test_files_are_read_at_most_at_4_hz(run: RunPaths, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[float] = []
    monkeypatch.setattr(MetricsReader, "new_rows", lambda _: reads.append(clock.now_s) or [])
    progress = Progress(run, attempt=2)
    for _ in range(100):
        progress.update()
        clock.now_s += READ_EVERY_S / 10
    assert len(reads) == 10


def test_a_damaged_or_unfinished_row_is_skipped_until_it_is_whole(run: RunPaths) -> None:
    reader = MetricsReader(run.metrics)
    assert list(reader.new_rows()) == []
    run.metrics.write_text('nonsense\n[1]\n{"split": "val", "step": 1}\n{"split": "val", "st')
    assert list(reader.new_rows()) == [{"split": "val", "step": 1}]
    with run.metrics.open("a") as file:
        file.write('ep": 2}\n')
    assert list(reader.new_rows()) == [{"split": "val", "step": 2}]


def test_a_file_that_a_resume_rewrote_is_read_from_its_start(run: RunPaths, tmp_path: Path) -> None:
    run.metrics.write_text('{"split": "val", "step": 1}\n{"split": "val", "step": 2}\n')
    reader = MetricsReader(run.metrics)
    list(reader.new_rows())
    shorter = tmp_path / "new"
    shorter.write_text('{"split": "val", "step": 1}\n')
    shorter.rename(run.metrics)
    assert list(reader.new_rows()) == [{"split": "val", "step": 1}]


def test_a_compiling_run_has_a_line(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(run, attempt=2)
    clock.now_s += 11
    since = datetime.now(UTC).isoformat()
    write_status(run, RunStatus("running", attempt=2, compiling={"graph": 2, "since": since}))
    progress.update()
    assert "abc: compiling graph 2, " in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations_read_as_clocks_show_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


_WORDS = ProgressText(
    "12.3 steps/s",
    "1:02:03 left",
    "loss 0.1234",
    "val loss 0.5678 accuracy 0.9876 top5 0.9999",
    "val accuracy 0.9876",
    "data wait 23%",
)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("name", ["short", "a-long-name-of-an-experiment/0123456789abcdef"])
def test_steps_time_left_and_loss_fit_the_terminal(width: int, name: str) -> None:
    shown, bar, words = fit(width, name, "123456/1234567", _WORDS)
    assert "1:02:03 left, loss 0.1234" in words
    assert len(f"{shown} {'-' * bar} 123456/1234567 {words}") <= width
    assert (width < 200) or (bar == 24 and words == _WORDS.all() and shown == name)
    assert shown[:4] == name[:4]


def test_the_bar_on_the_screen_is_not_cut_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = _Bar("a-long-name-of-an-experiment/0123456789abcdef")
    bar.show(RunStatus(state="running", step=12345, total_steps=1234567), _WORDS)
    bar.close()
    shown = capsys.readouterr().err
    assert "12345/1234567" in shown and "1:02:03 left, loss 0.1234" in shown


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, "1:02:03 left, loss 0.1234"),
        (80, "1:02:03 left, loss 0.1234, val accuracy 0.9876"),
        (100, "1:02:03 left, loss 0.1234, val accuracy 0.9876, data wait 23%"),
        (120, _WORDS.all().removeprefix("12.3 steps/s, ")),
        (140, _WORDS.all()),
    ],
)
def test_what_matters_most_stays_longest(width: int, shown: str) -> None:
    assert fit(width, "0123456789", "1234/5000", _WORDS)[2] == shown


def test_long_data_waits_are_shown(run: RunPaths, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(run, attempt=2)
    for wait_s in (0.09, 0.25):
        clock.now_s += LINE_EVERY_S
        _row(run, loss=0.5, step_s=1.0, data_wait_s=wait_s)
        _at(run, 1)
        progress.update()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("loss 0.5")[2] for line in lines] == ["", ", data wait 25%"]


def test_no_color_leaves_the_bar_without_colours(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for no_color in ("", "1"):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("NO_COLOR", no_color)
        progress = Progress(run, attempt=2)
        _at(run, 20)
        progress.update()
        progress.close()
        shown[no_color] = terminal.getvalue()
    colours = re.compile(r"\x1b\[(?:\d+;)*[34][0-8][;m]")
    assert colours.search(shown[""]) and not colours.search(shown["1"])
    assert "20/100" in shown["1"]
