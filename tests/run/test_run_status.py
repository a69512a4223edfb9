"""``status.json`` always has every key."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.run_status import RunStatus, read_status, write_status
from tests.run.runs import small_run

RUNNING = RunStatus("running", 5, 10, 0.5, 1)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return small_run(tmp_path)


def test_a_status_comes_back_as_it_was_written(run: RunPaths) -> None:
    write_status(run, RUNNING)
    assert read_status(run) == RUNNING
    assert json.loads(run.status.read_text()).keys() == {
        "version", "state", "step", "total_steps", "epoch", "attempt", "reason",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"state": "flying"}', json.dumps(RUNNING.to_json() | {"step": "5"})]
)
def test_a_missing_or_invalid_status_is_unknown(run: RunPaths, text: str | None) -> None:
    run.status.unlink() if text is None else run.status.write_text(text)
    assert read_status(run).state == "unknown"


def test_a_run_that_compiles_says_so_until_it_trains_or_ends(run: RunPaths) -> None:
    since = (datetime.now(UTC) - timedelta(seconds=40)).isoformat(timespec="seconds")
    compiling = replace(RUNNING, compiling={"graph": 3, "since": since})
    write_status(run, compiling)
    assert read_status(run) == compiling
    assert re.fullmatch(r"compiling graph 3, [4-9]\d s so far", read_status(run).activity)
    assert RUNNING.activity == replace(compiling, state="requeued").activity == ""
    assert replace(RUNNING, compiling={"graph": 3, "since": "?"}).activity == "compiling graph 3"
    run.status.write_text(json.dumps(compiling.to_json() | {"compiling": 3}))
    assert read_status(run).state == "unknown"


def test_slow_ranks_are_named_with_the_number_up_to_four(run: RunPaths) -> None:
    slow = {str(rank): {"forward": 1.25} for rank in range(6)} | {"0": {"data_wait": 0.3}}
    status = replace(RUNNING, slow_ranks=slow)
    write_status(run, status)
    assert read_status(run) == status
    words = status.slow_words.split("; ")
    assert words[:2] == ["rank 0: waits 30% of a step longer for data", "rank 1: forward 1.25 × the median"]
    assert len(words) == 5 and words[-1] == "…"
    assert replace(RUNNING, slow_ranks={"1": {"forward": "fast"}}).slow_words == ""  # type: ignore[dict-item]
