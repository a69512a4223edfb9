"""What the shim does to a rank's files, and that it leaves everything else alone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.shim import ALWAYS, EVERY_TOUCH, TAKES_ROOM, Shim, Touch
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.usefixtures("shimmed")

#: Touches: mkdir; for each of two files open, write, fsync; rename. Prints what it got through.
SCRIPT = """
import os, sys
from pathlib import Path
folder = Path(sys.argv[1])
def tell(name, do):
    try:
        do()
    except OSError as error:
        print(name, error.errno)
    else:
        print(name)
tell("mkdir", (folder / "new").mkdir)
for name in "ab":
    try:
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
    except OSError as error:
        print("open", error.errno)
        continue
    tell("write", lambda: os.write(file, b"x"))
    tell("fsync", lambda: os.fsync(file))
tell("rename", lambda: (folder / "a").rename(folder / "c"))
"""
WHOLE = ["mkdir", "write", "fsync", "write", "fsync", "rename"]


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    return Shim(tmp_path / "orders")


def touch(shim: Shim, folder: Path, **environment: str) -> tuple[int, list[str]]:
    """Return exit code and what a rank 1 got through in ``folder``."""
    folder.mkdir(parents=True)
    rank = {"RANK": "1", **shim.environment()}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-u", "-c", SCRIPT, str(folder)],
        env=os.environ | rank | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    return done.returncode, done.stdout.splitlines()


def test_it_kills_at_each_touch_in_turn(shim: Shim, tmp_path: Path) -> None:
    for number in range(1, 9):
        shim.order(1, number, 0, 1, EVERY_TOUCH)
        code, done = touch(shim, tmp_path / str(number) / "checkpoints" / "step")
        # Eight touches, six of which are told of.
        assert code == -signal.SIGKILL and done == WHOLE[: [0, 1, 1, 2, 3, 3, 4, 5][number - 1]], number
        assert shim.has_struck(1)
        shim.clear()


def test_an_error_comes_once_or_always(shim: Shim, tmp_path: Path) -> None:
    shim.order(1, 2, errno.EIO, 1, Touch.WRITE | Touch.SYNC)
    once = touch(shim, tmp_path / "once" / "checkpoints" / "step")
    assert once == (0, ["mkdir", "write", f"fsync {errno.EIO}", "write", "fsync", "rename"])
    shim.order(1, 2, errno.ENOSPC, ALWAYS, TAKES_ROOM)
    always = touch(shim, tmp_path / "always" / "checkpoints" / "step")
    full = errno.ENOSPC
    assert always == (0, ["mkdir", f"open {full}", f"open {full}", f"rename {errno.ENOENT}"])


def test_other_files_ranks_and_programs_are_left_alone(shim: Shim, tmp_path: Path) -> None:
    shim.order(1, 1, 0, 1, EVERY_TOUCH)
    assert touch(shim, tmp_path / "elsewhere") == (0, WHOLE)
    assert touch(shim, tmp_path / "other" / "checkpoints" / "step", RANK="0") == (0, WHOLE)
    assert not shim.has_struck(1)


def test_it_strikes_at_any_of_the_parts_of_paths(tmp_path: Path) -> None:
    for number, name in enumerate(("status", "rows")):
        shim = Shim(tmp_path / f"orders-{number}", ("/status/", "/rows/"))
        shim.order(1, 1, 0, 1, EVERY_TOUCH)
        assert touch(shim, tmp_path / "other" / str(number)) == (0, WHOLE)
        assert touch(shim, tmp_path / name / "x")[0] == -signal.SIGKILL


def test_an_order_strikes_in_one_process_only(shim: Shim, tmp_path: Path) -> None:
    shim.order(1, 1, 0, 1, EVERY_TOUCH)
    assert touch(shim, tmp_path / "1" / "checkpoints" / "step")[0] == -signal.SIGKILL
    assert touch(shim, tmp_path / "2" / "checkpoints" / "step") == (0, WHOLE)


def test_it_strikes_a_process_that_sets_the_variables_itself(shim: Shim, tmp_path: Path) -> None:
    """As a rank does that is forked from a warm process."""
    folder = tmp_path / "checkpoints" / "step"
    folder.mkdir(parents=True)
    shim.order(1, 2, errno.EIO, 1, Touch.WRITE)
    variables = {"RANK": "1", **shim.environment()}
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import os; os.environ.update({variables})\n{SCRIPT}",
            str(folder),
        ],
        env=os.environ | {"LD_PRELOAD": variables["LD_PRELOAD"]},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_LIMIT_S,
    )
    assert done.stdout.splitlines() == ["mkdir", "write", "fsync", f"write {errno.EIO}", "fsync", "rename"]
