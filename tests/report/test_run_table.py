from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.console import fitted
from hpc_train.report.run_files import short_duration
from hpc_train.run.run_status import RunStatus, write_status
from tests.run.runs import small_run
from tests.terminals import on_terminal

_HEADS = ["run", "experiment", "state", "step", "job", "elapsed", "ETA", "last metric or reason"]
_ROW = [
    "0123456789", "imagenet-vit-base", "running", "12345/500000", "12345678_90", "1h02m", "3d04h",
    "accuracy 0.7512",
]  # fmt: skip
_LONG = "crash 1 of 3: rank 0: " + "x" * 200


@pytest.mark.parametrize("width", [60, 80, 100, 300])
@pytest.mark.parametrize("reason", ["accuracy 0.75", _LONG])
def test_a_line_fits_the_terminal(width: int, reason: str) -> None:
    lines = fitted([_HEADS, [*_ROW[:-1], reason], _ROW], width)
    assert len(lines) == 3 and max(map(len, lines)) <= width
    assert all(line.startswith("0123456789  ") for line in lines[1:])


def test_reasons_are_cut_before_names_and_nothing_is_cut_without_need() -> None:
    lines = fitted([_HEADS, ["abc", "small", "failed", "4/10", "12", "5s", "", _LONG]], 80)
    assert lines[1].startswith("abc  small       failed  4/10  12   5s            crash 1 of 3")
    assert lines[1].endswith("…") and len(lines[1]) == 80
    assert "…" not in "".join(fitted([_HEADS, _ROW], 110))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (0.4, "0s"), (59, "59s"), (750, "12m30s"), (3725, "1h02m"), (273_900, "3d04h")],
)
def test_durations_are_short(seconds: float | None, words: str) -> None:
    assert short_duration(seconds) == words


@pytest.mark.slow
def test_states_are_coloured_on_a_terminal_unless_no_color_is_set(tmp_path: Path) -> None:
    write_status(small_run(tmp_path / "runs"), RunStatus(state="failed", reason="completed nothing"))
    shown = on_terminal("status", columns=80)
    assert "\x1b[31mfailed\x1b[0m" in shown and "completed nothing" in shown
    plain = on_terminal("status", columns=80, NO_COLOR="1")
    assert "failed" in plain and "\x1b" not in plain
