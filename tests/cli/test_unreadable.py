"""Runs that this user may not read are named by every command that passes them over."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli import checkpoint_commands
from hpc_train.paths import RunPaths
from hpc_train.run import find
from hpc_train.run.create import create_run
from tests.cli.commands import hpc_train
from tests.run.runs import small_experiment

_COMMANDS = (
    ["status"], ["verify"], ["logs", "--last"], ["compare"], ["export", "-o", "x.safetensors"],
    ["rm", "--yes"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of two runs; the tests' user may be root, who can read everything."""
    for seed, run_id in enumerate(("aaa", "bbb")):
        paths = RunPaths(tmp_path / "runs" / "small" / run_id)
        assert create_run(paths, small_experiment(seed=seed), run_id, 10)
    is_readable = find.is_readable
    monkeypatch.setattr(find, "is_readable", lambda run: run != paths and is_readable(run))
    monkeypatch.setattr(checkpoint_commands, "run_child", lambda *arguments: 0)
    return paths.folder


@pytest.mark.parametrize("command", _COMMANDS)
def test_what_is_skipped_is_named(command: list[str], hidden: Path) -> None:
    done = hpc_train(command[0], "small", *command[1:])
    assert f"skipped, since you may not read them: {hidden};" in done.err


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_run_that_may_not_be_read_is_not_unknown(command: list[str], hidden: Path) -> None:
    for word in ("bbb", "small/bbb", str(hidden)):
        done = hpc_train(command[0], word, *command[1:])
        assert (done.code, "exists, but you may not read it" in done.err) == (2, True), done
