"""The command line, in this process or as one of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from hpc_train.cli.app import app
from hpc_train.paths import RunPaths, runs_root
from tests.waiting import HANG_LIMIT_S

REPOSITORY = Path(__file__).parents[2]
#: Built once: an app that is called builds it again each time.
_COMMAND = get_command(app)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def hpc_train(*arguments: str | Path) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        _COMMAND(args=[str(argument) for argument in arguments], prog_name="hpc-train")
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def python(
    *arguments: str | Path, cwd: Path | None = None, limit_s: float | None = HANG_LIMIT_S, **environment: str
) -> Done:
    """Run Python to its end, this checkout importable."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_train", *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def submitted(file: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Submit runs of one scripted rank each, in a process that ends with the context."""
    process = start("submit", file, "--launcher", "tests.cli.launchers:Scripted", *arguments)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_runs() -> list[RunPaths]:
    """Return the runs whose scripted ranks are ready."""
    return [RunPaths(path.parent) for path in runs_root().glob("*/[!.]*/ready")]


def succeeded(*arguments: str | Path) -> Done:
    """Run a command in this process that must exit 0."""
    done = hpc_train(*arguments)
    assert done.code == 0, done.err
    return done


def stderr_of(code: int, *arguments: str | Path) -> str:
    """Run a command in this process that exits with ``code``; return what it wrote to stderr."""
    done = hpc_train(*arguments)
    assert done.code == code, done.err
    return done.err
