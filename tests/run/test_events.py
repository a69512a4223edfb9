"""When an attempt did what."""

from __future__ import annotations

from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import EventLog, noted_signal
from hpc_train.run.files import read_json


def test_who_agrees_before_its_own_signal_was_asked_by_the_others(tmp_path: Path) -> None:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    log = EventLog(attempt)
    log.note("agreed", "2026-11-21T15:46:39.782+00:00")
    log.signalled("SIGTERM", "2026-11-21T15:46:40.118+00:00")
    told = (read_json(attempt.events) or {})["events"]
    assert list(told) == ["signal", "agreed"]
    assert told["signal"] <= told["agreed"]
    assert noted_signal(attempt) == "SIGTERM"


def test_a_signal_of_its_own_counts_where_it_came_first(tmp_path: Path) -> None:
    attempt = RunPaths(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    log = EventLog(attempt)
    log.signalled("USR2", "2026-11-21T15:46:39.500+00:00")
    log.note("agreed", "2026-11-21T15:46:39.782+00:00")
    assert (read_json(attempt.events) or {})["events"]["signal"] == "2026-11-21T15:46:39.500+00:00"
