from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from hpc_train.cli import clean as clean_module
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import claim_attempt, newest_number, no_claims
from hpc_train.run.run_status import RunStatus, write_status
from tests.cli.commands import Done, hpc_train, stderr_of, succeeded
from tests.end_to_end.runs import wait_for
from tests.report.test_progress_display import Terminal
from tests.run.runs import small_run
from tests.run.test_checkpoints import begin_attempt, change_manifest, write_checkpoint
from tests.waiting import HANG_LIMIT_S


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """A failed run with everything that can be left over."""
    paths = small_run(tmp_path / "runs")
    begin_attempt(paths, 1)
    for step in (5, 10, 15):
        write_checkpoint(paths, step, attempt=1)
    for name in ("step-00000020.tmp-1", "step-00000003.bad", "mine"):
        (paths.checkpoints / name).mkdir()
    paths.cache.mkdir()
    (paths.cache / "compiled").touch()
    write_status(paths, RunStatus(state="failed", step=15, attempt=1))
    return paths


def _names(run: RunPaths) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()}


def answer(monkeypatch: pytest.MonkeyPatch, text: str, command: str = "clean", *options: str) -> Done:
    monkeypatch.setattr("sys.stdin", Terminal(text))
    return hpc_train(command, "abc", *options)


def test_the_newest_whole_checkpoint_and_what_is_not_ours_stay(run: RunPaths) -> None:
    done = succeeded("clean", "abc", "--yes")
    assert _names(run) == {"step-00000015", "mine"}
    assert not run.cache.exists()
    assert run.metrics.parent.exists() and run.experiment.exists()
    for name in ("step-00000005", "step-00000010", "tmp-1", ".bad", "cache"):
        assert name in done.err


def test_the_best_checkpoint_stays(run: RunPaths) -> None:
    best = {"metric": "accuracy", "value": 0.75, "step": 5}
    change_manifest(run.checkpoint(15), best=best)
    assert hpc_train("clean", "abc", "--yes").code == 0
    assert _names(run) == {"step-00000005", "step-00000015", "mine"}


def test_nobody_can_start_a_run_while_it_is_cleaned(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume would list a checkpoint that is gone a moment later."""
    refused = []

    def try_to_claim(path: Path) -> None:
        with run.claim_lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(path)

    monkeypatch.setattr(clean_module, "_remove", try_to_claim)
    assert hpc_train("clean", "abc", "--yes").code == 0
    assert refused


def test_a_claim_waits_for_who_cleans(run: RunPaths) -> None:
    claimed: list[int] = []
    thread = threading.Thread(target=lambda: claimed.append(claim_attempt(run)))
    with no_claims(run):
        thread.start()
        wait_for(lambda: _waits_for_a_lock(thread), "the claim at the lock", HANG_LIMIT_S)
        assert not claimed and newest_number(run) == 1
    thread.join(HANG_LIMIT_S)
    assert claimed == [2]


def _waits_for_a_lock(thread: threading.Thread) -> bool:
    """Return True if the thread is inside flock(2), whose number is 73 on x86-64 and 32 on arm64."""
    state = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
    return state in {"73", "32"}


def test_a_damaged_newest_one_is_not_what_is_kept(run: RunPaths) -> None:
    run.checkpoint(15).shard(0).write_bytes(b"")
    done = hpc_train("clean", "abc", "--yes")
    assert _names(run) == {"step-00000010", "mine"}
    reasons = {
        line.split()[0][-8:]: line.split("MB  ")[1] for line in done.err.splitlines() if "MB  " in line
    }
    assert reasons["00000015"] == "damaged"
    assert reasons["00000005"] == "older than step-00000010"


def test_where_none_is_whole_all_are_kept(run: RunPaths) -> None:
    for step in (5, 10, 15):
        run.checkpoint(step).shard(0).write_bytes(b"")
    hpc_train("clean", "abc", "--yes")
    # What was set aside, too: a resume would start from step 0 if none of them were there.
    assert _names(run) == {"step-00000005", "step-00000010", "step-00000015", "step-00000003.bad", "mine"}


def test_nothing_goes_without_an_answer(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _names(run)
    assert hpc_train("clean", "abc").code == 2  # nobody to ask
    assert answer(monkeypatch, "\n").code == 0
    assert _names(run) == before
    assert answer(monkeypatch, "y\n").code == 0
    assert _names(run) != before


@pytest.mark.parametrize(("state", "message"), [("running", "is running"), ("failed", "was resumed")])
def test_a_resumed_run_stays(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, state: str, message: str
) -> None:
    """Another attempt may need a checkpoint that was surplus when the question was asked."""

    def resume(command: str, question: str) -> bool:
        begin_attempt(run, 2)
        write_status(run, RunStatus(state=state, step=15, attempt=2))
        return True

    before = _names(run)
    monkeypatch.setattr(clean_module, "_confirmed", resume)
    assert message in stderr_of(1, "clean", "abc")
    assert _names(run) == before


def test_a_living_run_is_left_alone(run: RunPaths, tmp_path: Path) -> None:
    paths = small_run(tmp_path / "runs" / "other")  # pending, made by this living process
    paths.cache.mkdir()
    assert "is pending" in stderr_of(1, "clean", paths.folder, "--yes")
    assert paths.cache.exists()


def test_links_go_without_what_they_lead_to(run: RunPaths, tmp_path: Path) -> None:
    cache = run.cache.rename(tmp_path / "cache")
    run.cache.symlink_to(cache)
    checkpoints = run.checkpoints.rename(tmp_path / "elsewhere")
    run.checkpoints.symlink_to(checkpoints)
    before = sorted(checkpoints.rglob("*"))
    hpc_train("clean", "abc", "--yes")
    assert not run.cache.is_symlink() and (cache / "compiled").exists()
    assert run.checkpoints.is_symlink() and sorted(checkpoints.rglob("*")) == before


def _snapshot(root: Path, name: str, *, age_s: float = 7200.0) -> Path:
    """Place a snapshot that a submit took so long ago."""
    folder = root / ".code" / name
    (folder / "tree").mkdir(parents=True)
    (folder / "tree" / "model.py").write_text("x")
    (folder / "tree" / "model.py").chmod(0o400)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_code_that_no_run_uses_goes(run: RunPaths, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    of_run, of_another, of_one_being_made, unused, unfinished, new = (
        _snapshot(root, name, age_s=60 if name == "new" else 7200)
        for name in ("run", "another", "being_made", "unused", ".unused.1234", "new")
    )
    other = root / "other"
    for folder, snapshot in (
        (run.folder, of_run),
        (other / "def", of_another),
        (other / ".def.1234", of_one_being_made),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "code").symlink_to(os.path.relpath(snapshot, folder))
    (other / "loop").mkdir()
    (other / "loop" / "code").symlink_to("code")  # leads to itself
    done = succeeded("clean", "abc", "--yes")
    assert set((root / ".code").iterdir()) == {of_run, of_another, of_one_being_made, new}
    for gone in (unused, unfinished):
        assert f"{gone}  0.0 MB  code that no run uses" in done.err


def test_code_of_a_new_submit_stays(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _snapshot(tmp_path / "runs", "taken")
    unused = _snapshot(tmp_path / "runs", "unused")

    def agree(command: str, question: str) -> bool:
        os.utime(taken)
        return True

    monkeypatch.setattr(clean_module, "_confirmed", agree)
    assert str(taken) in stderr_of(0, "clean", "abc")
    assert (taken.exists(), unused.exists()) == (True, False)


def test_an_unreadable_run_keeps_code(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unused = _snapshot(tmp_path / "runs", "unused")

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("hpc_train.run.code.snapshot._folders", refuse)
    done = hpc_train("clean", "abc", "--yes")
    assert f"kept, since {tmp_path / 'runs'} can't be read: Permission denied" in done.err
    assert unused.exists()
    assert not run.cache.exists(), "the rest is cleaned"


def test_only_names_that_hpc_train_writes_are_removed(run: RunPaths, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folders = {"step-00000005-best", "step-best", "step-00000006.bad-mine"}
    for name in folders:
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-00000005.tar").touch()
    (run.checkpoints / "step-00000007").symlink_to(kept)
    (run.checkpoints / "step-00000008.bad").symlink_to(kept)
    others = {"step-00000005.tar", "step-00000007", "step-00000008.bad", "mine"}
    assert hpc_train("clean", "abc", "--yes").code == 0
    assert _names(run) == {"step-00000015", *folders, *others}
    assert (kept / "file").exists()
