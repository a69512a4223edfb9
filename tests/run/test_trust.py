"""What another user could have written is not run; a runs folder that users share stays usable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.trust import UntrustedError, check_run
from tests.run.runs import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return small_run(tmp_path / "runs")


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``path`` belong to another user: without root, this process is the other one."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_a_new_run_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "runs").mkdir(mode=0o775)
        run = small_run(tmp_path / "runs")
    finally:
        os.umask(before)
    (tmp_path / "runs").chmod(0o775)
    check_run(run)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
@pytest.mark.parametrize("which", [".", "..", "../.slurm"])
def test_a_folder_that_others_may_write_is_refused(run: RunPaths, which: str, mode: int) -> None:
    run.siblings.submissions.mkdir(mode=0o700)
    folder = Path(os.path.normpath(run.folder / which))
    folder.chmod(mode)
    with pytest.raises(UntrustedError, match=f"others may write it.*`chmod go-w {folder}`"):
        check_run(run)
    folder.chmod(mode & 0o755)
    check_run(run)


@pytest.mark.parametrize("which", [".", "..", "../.slurm"])
def test_a_folder_of_others_is_refused(run: RunPaths, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run.siblings.submissions.mkdir(mode=0o700)
    _give_away(Path(os.path.normpath(run.folder / which)), monkeypatch)
    with pytest.raises(UntrustedError, match="belongs to another user"):
        check_run(run)


@pytest.mark.parametrize(
    "name", ["experiment.yaml", "resolved.json", "attempts", "attempts/1/attempt.json", "cache/x.so"]
)
def test_where_others_may_enter_a_run_they_may_write_nothing_in_it(run: RunPaths, name: str) -> None:
    path = run.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    path.chmod(0o777)
    check_run(run)  # out of reach in a private folder
    run.folder.chmod(0o750)
    with pytest.raises(UntrustedError, match=f"{name}: group or others may write it"):
        check_run(run)


@pytest.mark.parametrize("mode", [0o2775, 0o1777, 0o755])
def test_a_shared_runs_folder_is_usable(run: RunPaths, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run.folder.parent.parent
    runs.chmod(mode)
    if os.geteuid() == 0:
        _give_away(runs, monkeypatch)
    check_run(run)


def test_a_runs_folder_that_everyone_may_write_needs_the_sticky_bit(run: RunPaths) -> None:
    runs = run.folder.parent.parent
    runs.chmod(0o777)
    with pytest.raises(UntrustedError, match=rf"`chmod \+t {runs}`"):
        check_run(run)


def test_an_experiment_folder_with_the_sticky_bit_is_accepted(run: RunPaths) -> None:
    run.folder.parent.chmod(0o1770)
    check_run(run)


def test_a_linked_run_is_checked_where_it_is(run: RunPaths, tmp_path: Path) -> None:
    """A run that was moved to another disk."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    run.folder.rename(other / "abc")
    run.folder.symlink_to(other / "abc")
    check_run(run)
    other.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"{other}: group or others may write it"):
        check_run(run)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder away")
def test_each_user_of_a_shared_runs_folder_has_snapshots_of_their_own(run: RunPaths) -> None:
    code = run.folder.parent.parent / ".code"
    assert run.siblings.snapshots == code
    code.mkdir(mode=0o700)
    assert run.siblings.snapshots == code
    os.chown(code, 12345, -1)
    assert run.siblings.snapshots == code.with_name(".code-0")
