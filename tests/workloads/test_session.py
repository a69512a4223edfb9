"""``hpc_train.session``: alone, as a plain script sees it, and under the launcher."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hpc_train import session
from hpc_train.api import Run
from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import read_record
from hpc_train.run.metric_rows import iter_rows
from hpc_train.session.positions import PositionedSampler
from hpc_train.session.process_state import SAVE, STOP
from hpc_train.session.storage import Saving
from hpc_train.training.distributed.shared_flags import SharedFlags
from tests import warm
from tests.end_to_end.runs import ONE_THREAD, status
from tests.waiting import HANG_LIMIT_S
from tests.workloads.programs import (
    END_STEP_SCRIPT,
    END_STEP_TEXT,
    HELD,
    SESSION_SCRIPT,
    SESSION_TEXT,
    final_weights,
    forked,
    resumed_and_quiet,
    write_program,
)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder without a launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_session", session.SessionState())
    return tmp_path


def save(step: int) -> None:
    with session.checkpoint(step) as folder:
        (folder / "model").mkdir()
        (folder / "model" / ".metadata").write_text(f"step {step}")
        (folder / "rank-0.pt").write_bytes(bytes(step))


def test_checkpoints_are_complete_folders_and_three_are_kept(alone: Path) -> None:
    assert session.latest() is None
    for step in (1, 2, 3, 4):
        save(step)
    assert sorted(path.name for path in (alone / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (2, 3, 4)
    ]
    newest = session.latest()
    assert newest is not None and (newest / "model" / ".metadata").read_text() == "step 4"


def test_a_damaged_checkpoint_is_set_aside(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(1)
    save(2)
    (alone / "checkpoints" / "step-00000002" / "model" / ".metadata").write_text("step 9")
    newest = session.latest()
    assert newest is not None and newest.name == "step-00000001"
    assert "step-00000002 is set aside" in capsys.readouterr().err
    assert (alone / "checkpoints" / "step-00000002.bad").is_dir()


def test_all_ranks_resume_at_the_checkpoint_that_rank_0_chose(alone: Path) -> None:
    save(1)
    waits = threading.Event()
    first, second = (Saving(alone, 1, rank, 2, None, waits.set, lambda: None) for rank in (0, 1))
    for step in (1, 2):  # called again later, too
        save(step)
        waits.clear()
        chosen: list[Path | None] = []
        thread = threading.Thread(target=lambda chosen=chosen: chosen.append(second.latest()))
        thread.start()
        while thread.is_alive() and not waits.wait(0.01):
            pass
        chosen.append(first.latest())
        thread.join(HANG_LIMIT_S)
        assert [path and path.name for path in chosen] == [f"step-{step:08d}"] * 2


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "weights (1).pt", "link.pt"])
def test_a_file_that_no_resume_could_read_is_refused_at_the_save(alone: Path, name: str) -> None:
    (alone / "own.pt").touch()
    with pytest.raises(BadFileError, match=re.escape(name)), session.checkpoint(1) as folder:
        (folder / "good.pt").touch()
        if name == "link.pt":
            (folder / name).symlink_to(alone / "own.pt")
        else:
            (folder / name).touch()
    assert session.latest() is None


def test_the_same_step_is_saved_again_by_two_ranks(alone: Path) -> None:
    """Whoever comes back from it finds the second version, with the files of both."""
    seen: list[str] = []

    def save_twice(rank: int) -> None:
        saving = Saving(alone, 1, rank, 2, None, *[lambda: None] * 2)
        for version in ("old", "new"):
            folder = saving.begin(7)
            (folder / f"rank-{rank}").write_text(version)
            saving.commit(7, {})
            committed_folder = alone / "checkpoints" / "step-00000007"
            seen.extend((committed_folder / f"rank-{other}").read_text() for other in (0, 1))
            both.wait()

    both = threading.Barrier(2)
    threads = [threading.Thread(target=save_twice, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert seen == ["old"] * 4 + ["new"] * 4
    assert [path.name for path in (alone / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_stop_is_seen_at_the_same_step_if_each_step_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process share the memory of their flags."""
    best = {"metric": "accuracy", "mode": "max"}
    monkeypatch.setenv("HPC_TRAIN_SESSION", json.dumps({"best": best, "every_s": 0.0}))
    memory, stops, saves = mmap.mmap(-1, mmap.PAGESIZE), dict[int, int](), list[tuple[int, int]]()

    def run(rank: int) -> None:
        state = session.SessionState()
        state.rank, state.ranks, state._group = rank, 2, object()
        state._shared = SharedFlags(rank, 2, -1, memory, HANG_LIMIT_S)
        for step in range(1, 7):
            state.is_stopping |= (rank, step) == (1, 2)
            state.decide(step, {"accuracy": 0.5})
            flags = state.all_flags(may_save=True)
            if flags & SAVE:
                saves.append((rank, step))
            if flags & STOP:
                stops[rank] = step
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert stops == {0: 3, 1: 3}
    assert sorted(saves) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_ranks_that_the_environment_does_not_have_are_refused(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for call in (lambda: session.should_stop(1), session.latest):
        with pytest.raises(RuntimeError, match=r"torch\.distributed has 2 ranks, but WORLD_SIZE was 1"):
            call()


def test_nothing_is_committed_if_the_script_raises(alone: Path) -> None:
    with pytest.raises(KeyError), session.checkpoint(1) as folder:
        (folder / "half").touch()
        raise KeyError
    assert session.latest() is None


def test_should_stop_is_true_after_sigterm_and_the_scripts_own_handler_is_called(alone: Path) -> None:
    called: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
        assert not session.should_stop(1)
        signal.raise_signal(signal.SIGTERM)
        assert session.should_stop(2) and called == [signal.SIGTERM]
        session._session.is_stopping = False
        signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))  # replaces ours
        assert not session.should_stop(3)
        signal.raise_signal(signal.SIGUSR2)
        assert session.should_stop(4) and called == [signal.SIGTERM, signal.SIGUSR2]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


LOADER_SCRIPT = """
import os, signal, time
from torch.utils.data import DataLoader
from hpc_train import session

batches = iter(DataLoader(range(20), num_workers=1))
next(batches)
(worker,) = batches._workers
os.kill(worker.pid, signal.SIGTERM)
time.sleep(0.3)
assert len(list(batches)) == 19
"""


@pytest.mark.slow
def test_a_signal_to_all_processes_ends_no_data_loader(tmp_path: Path) -> None:
    environment = os.environ | {"HPC_TRAIN_RUN": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = warm.start_script(LOADER_SCRIPT, env=environment, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, err


def test_a_heartbeat_needs_no_earlier_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_RUN", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(session, "_session", session.SessionState())
    (tmp_path / "attempts" / "1").mkdir(parents=True)
    session.heartbeat()
    session._session._messages.close()
    assert RunPaths(tmp_path).attempt(1).session(3).exists()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_samples_of_a_step_are_the_same_on_any_number_of_ranks_and_from_any_start(ranks: int) -> None:
    def step_samples(start: int, epoch: int) -> list[list[int]]:
        samplers = [PositionedSampler(50, 8, rank, ranks, step=start, seed=3) for rank in range(ranks)]
        for each in samplers:
            each.set_epoch(epoch)
        shares = [torch.tensor(list(each)).split(8 // ranks) for each in samplers]
        return [sorted(torch.cat(parts).tolist()) for parts in zip(*shares, strict=True)]

    whole = [
        sorted(batch.tolist())
        for batch in torch.tensor(list(PositionedSampler(50, 8, 0, 1, seed=3))).split(8)
    ]
    assert step_samples(0, 0) == whole and len(whole) == 6
    assert step_samples(4, 0) == whole[4:]
    later = step_samples(9, 1)
    assert len(later) == 3 and later == step_samples(0, 1)[3:] and later != whole[3:]


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="8 is not a multiple of 3 ranks"):
        PositionedSampler(50, 8, 0, 3)


def test_importing_it_imports_no_torch() -> None:
    program = "import sys; from hpc_train import session; print(*({'torch', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_script_with_five_lines_resumes_to_the_same_bits(tmp_path: Path) -> None:
    code = write_program(tmp_path, SESSION_TEXT, SESSION_SCRIPT).parent
    words = ("exp.yaml", *forked(code), "--devices", "2")
    plain = warm.task(HELD.name, "train.py", "--output", "plain.pt")
    environment = os.environ | ONE_THREAD | warm.for_jobs()
    subprocess.run(plain, cwd=code, env=environment, check=True, timeout=HANG_LIMIT_S)
    assert (code / "plain.pt").exists()
    step, paths, quiet = resumed_and_quiet(12, tmp_path, *words, code=code, pace="program.args.sleep=0.2")
    record = read_record(paths.attempt(2))
    assert record is not None and record.checkpoints[0] == f"step-{step:08d}"
    assert f"starts at {step}" in paths.attempt(2).log(0).read_text()
    assert [row["step"] for row in iter_rows(paths.metrics)] == list(range(1, 31))
    assert final_weights(paths) == final_weights(quiet) and status(paths)["total_steps"] == 30


@pytest.mark.slow
def test_early_stopping_is_at_the_same_step_with_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    """With dropout and shuffled data on two ranks, and metrics that have the names of messages."""
    code = write_program(tmp_path, END_STEP_TEXT, END_STEP_SCRIPT).parent
    words = ("exp.yaml", *forked(code), "--devices", "2")
    step, paths, quiet = resumed_and_quiet(11, tmp_path, *words, code=code, pace="program.args.sleep=0.2")
    assert step < 30 and f"starts at {step}" in paths.attempt(2).log(0).read_text()
    assert final_weights(paths) == final_weights(quiet)
    for run in (paths, quiet):
        ended = status(run)
        assert (ended["state"], ended["step"], ended["total_steps"]) == ("completed", 30, 100)
        assert ended["reason"].startswith("stopped early: no better distance in 2 evaluations")
        assert ended["best"] == {"metric": "distance", "value": 0.0, "step": 20, "mode": "min"}
        assert Run(run).checkpoint(best=True).step == 20
        assert [row["step"] for row in iter_rows(run.metrics) if row["split"] == "train"] == [*range(1, 31)]
        assert len((run.csv / "train.csv").read_text().splitlines()) == 31
