from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from tests.cli.commands import hpc_train
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, write_checkpoint


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Two checkpoints that count."""
    paths = small_run(tmp_path / "runs")
    begin_attempt(paths, 1)
    for step in (5, 10):
        write_checkpoint(paths, step, attempt=1)
    return paths


def _lines(*arguments: str) -> tuple[int, list[str]]:
    done = hpc_train("verify", *arguments)
    return done.code, [line.partition("step-000000")[2] for line in done.out.splitlines()]


def test_whole_checkpoints_and_the_one_that_would_load_are_named(run: RunPaths) -> None:
    assert _lines("abc") == (0, ["10  whole, would load", "05  whole"])


def test_a_damaged_checkpoint_fails_and_the_next_would_load(run: RunPaths) -> None:
    shard = run.checkpoint(10).shard(1)
    content = shard.read_bytes()
    shard.write_bytes(content[:3] + b"?" + content[4:])
    done = hpc_train("verify", "abc")
    assert str(shard) in done.err
    assert _lines("abc") == (1, ["10  damaged", "05  whole, would load"])
    shard.write_bytes(content)
    run.checkpoint(10).manifest.unlink()
    assert _lines("abc") == (1, ["10  damaged", "05  whole, would load"])


def test_a_checkpoint_of_an_attempt_that_lost_the_run_does_not_count(run: RunPaths) -> None:
    begin_attempt(run, 2, ["step-00000005"])
    code, (ten, five) = _lines("abc")
    assert code == 0
    assert "does not count" in ten
    assert five == "05  whole, would load"


def test_a_run_without_checkpoints_says_so(tmp_path: Path) -> None:
    small_run(tmp_path / "runs")
    done = hpc_train("verify", "abc")
    assert (done.code, done.out) == (0, "")
    assert "no checkpoint yet" in done.err


@pytest.mark.slow
def test_export_passes_the_exit_code_of_its_child_on(tmp_path: Path) -> None:
    small_run(tmp_path / "runs")
    assert hpc_train("export", "abc", "-o", tmp_path / "out.safetensors").code == 2


@pytest.mark.parametrize("options", ["--best --step 3", "--last --best", "--last --step 3"])
def test_options_that_select_different_checkpoints_are_refused(run: RunPaths, options: str) -> None:
    for command in (("export", "abc", "-o", "w.safetensors"), ("evaluate", "abc")):
        done = hpc_train(*command, *options.split())
        assert done.code == 2 and "exclude each other; use one of them" in done.err


def test_export_to_an_unknown_suffix_is_reported(run: RunPaths) -> None:
    done = hpc_train("export", "abc", "-o", "w.xyz", "--best")
    assert "-o w.xyz: written as safetensors" in done.err
