"""``watch`` on a real terminal, beside a run that trains; and where there is none."""

from __future__ import annotations

import os
import re
import termios
from pathlib import Path

import pytest

from hpc_train.run.run_status import read_status
from tests.cli.commands import REPOSITORY, stderr_of
from tests.end_to_end import paced
from tests.end_to_end.runs import PACED, end_what_is_left, found_runs, start, write_experiment
from tests.terminals import LEAVES_ALTERNATE_SCREEN, SHOWS_CURSOR, Terminal
from tests.waiting import HANG_LIMIT_S


def test_without_a_terminal_status_is_named() -> None:
    assert "hpc-train status" in stderr_of(2, "watch")


@pytest.mark.slow
def test_a_run_is_watched_and_cancelled_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paced.TRAIN_S, "0.02")
    file = write_experiment(tmp_path, PACED)
    training = start("submit", file, "optimization.steps=5000", "device=cpu", "--local")
    try:
        plain = os.environ | {"NO_COLOR": "1"}
        with Terminal("watch", "--interval", "1", cwd=REPOSITORY, environment=plain) as watching:
            watching.until(r"running .{9}\d+/5000 +\S+ +[▁-█]{10} \d")
            assert not re.search(r"\x1b\[[0-9;]*[34]8[;:]", watching.written), "NO_COLOR"
            watching.press("l")
            watching.until(r"log; up and down scroll(?s:.*)train step \d+")
            watching.press("q")
            watching.press("c")
            watching.until("Cancel [0-9a-f]+ for good")
            watching.press("y")
            (paths,) = found_runs(tmp_path)
            watching.until("cancelled at step")
            watching.until("1 run: 1 cancelled")
            watching.press("q")
            assert watching.wait() == 0
            assert termios.tcgetattr(watching.theirs) == watching.before
            assert LEAVES_ALTERNATE_SCREEN in watching.written and SHOWS_CURSOR in watching.written
        assert read_status(paths).state == "cancelled"
        assert training.wait(HANG_LIMIT_S) != 0
    finally:
        end_what_is_left()


@pytest.mark.slow
def test_sigterm_restores_the_terminal() -> None:
    with Terminal("watch", cwd=REPOSITORY) as watching:
        watching.until("no runs yet")
        watching.process.terminate()
        watching.wait()
        assert termios.tcgetattr(watching.theirs) == watching.before
        assert LEAVES_ALTERNATE_SCREEN in watching.written
