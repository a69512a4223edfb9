"""What srun executes: signals wait, output goes to the rank's log, and no rank is lost."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import HANG_LIMIT_S

RANK = Path(__file__).parents[3] / "hpc_train" / "launchers" / "slurm" / "rank.py"
STARTER = [sys.executable, "-I", "-S", str(RANK)]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "attempts" / "3").mkdir(parents=True)
    own = {"SLURM_PROCID": "5", "HPC_TRAIN_RUN_FOLDER": str(tmp_path), "HPC_TRAIN_ATTEMPT": "3"}
    return dict(os.environ) | own


def run(environ: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STARTER, *command],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
        input="x",
    )


def log_of(environ: dict[str, str]) -> Path:
    return Path(environ["HPC_TRAIN_RUN_FOLDER"]) / "attempts" / "3" / "rank-5.log"


def test_output_goes_to_the_ranks_own_log(environ: dict[str, str]) -> None:
    log_of(environ).write_text("before\n")
    log_of(environ).chmod(0o600)
    script = (
        "import sys; print('out', flush=True); print('err', file=sys.stderr); print(len(sys.stdin.read()))"
    )
    done = run(environ, sys.executable, "-c", script)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert log_of(environ).read_text() == "before\nout\nerr\n0\n"


def test_a_new_log_is_its_owners_alone(environ: dict[str, str]) -> None:
    run(environ, "true")
    assert stat.S_IMODE(log_of(environ).stat().st_mode) == 0o600


def test_a_rank_without_a_log_writes_to_srun_s_output(environ: dict[str, str]) -> None:
    log_of(environ).parent.rmdir()
    done = run(environ, "echo", "out")
    assert done.stdout == "out\n"
    assert "no log of its own" in done.stderr
    done = run({name: value for name, value in environ.items() if name != "SLURM_PROCID"}, "echo", "out")
    assert done.stdout == "out\n"


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_pipe_in_the_logs_place_is_not_waited_for(has_reader: bool, environ: dict[str, str]) -> None:
    os.mkfifo(log_of(environ))
    reader = os.open(log_of(environ), os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    done = run(environ, "echo", "out")
    assert done.stdout == "out\n" and "no log of its own" in done.stderr
    if reader is not None:
        os.close(reader)


def test_a_program_that_is_not_there_is_told_in_the_log(environ: dict[str, str]) -> None:
    assert run(environ, "/no/such/python", "-m", "x").returncode == 127
    assert "/no/such/python -m x: can't be started" in log_of(environ).read_text()


@pytest.mark.fault(3)
def test_signals_wait_until_python_can_note_them(environ: dict[str, str], tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "started").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
from hpc_train.rank import signals
flag = signals.install()
print(flag.count, flag.first_at is not None)
"""
    with subprocess.Popen([*STARTER, sys.executable, "-c", script, str(tmp_path)], env=environ) as popen:
        deadline = time.monotonic() + HANG_LIMIT_S
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            popen.send_signal(number)
        (tmp_path / "go").touch()
        assert popen.wait(HANG_LIMIT_S) == 0, log_of(environ).read_text()
    assert log_of(environ).read_text() == "3 True\n"


def test_it_tells_when_it_began_and_forgets_an_outer_launcher(environ: dict[str, str]) -> None:
    before = time.time()
    run(
        environ | {"RANK": "0", "WORLD_SIZE": "1"},
        "sh",
        "-c",
        "echo ${RANK-none} ${WORLD_SIZE-none} $HPC_TRAIN_RANK_START",
    )
    rank, world_size, started = log_of(environ).read_text().split()
    assert (rank, world_size) == ("none", "none")
    assert before - 1 <= float(started) <= time.time() + 1


def test_it_imports_the_standard_library_alone() -> None:
    """It is installed before the first signal can come, whatever the environment is like."""
    script = (
        f"import runpy, sys; runpy.run_path({str(RANK)!r}); print([n for n in sys.modules if 'hpc' in n])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    )
    assert done.stdout == "[]\n"
