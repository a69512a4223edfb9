from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_train.cli.parallel_runs import Slots, slot_environment
from hpc_train.cli.preflight import devices_per_run
from hpc_train.errors import UsageError
from hpc_train.rank.env import THREADS_BY_SHARE
from hpc_train.run.find import find_runs
from hpc_train.run.run_status import read_status
from tests.cli.commands import hpc_train, ready_runs, submitted
from tests.cli.launchers import COMPLETING
from tests.end_to_end.runs import wait_for
from tests.waiting import HANG_LIMIT_S

_GRID = "sweep.grid={seed: [1, 2, 3]}"


def test_runs_of_a_sweep_are_counted_and_told_apart(file: Path) -> None:
    done = hpc_train("submit", file, "--local", "--launcher", COMPLETING, _GRID)
    numbered = [line for line in done.err.splitlines() if line.startswith("run ")]
    ids = [line.split()[4] for line in numbered]
    assert numbered == [f"run {n} of 3: {ids[n - 1]}  seed={n}" for n in (1, 2, 3)]
    assert sorted(ids) == sorted(paths.folder.name for paths in find_runs([]))


def test_each_slot_has_its_own_gpus_and_its_part_of_the_cores() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    found = [slot_environment(environ, slot, 2, 2, "auto") for slot in (0, 1)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"]
    cores = len(os.sched_getaffinity(0))
    assert found[0]["OMP_NUM_THREADS"] == str(max(1, cores // 4))
    assert THREADS_BY_SHARE in found[0], "a resumed run may compute with its checkpoint's number instead"
    theirs = slot_environment({"OMP_NUM_THREADS": "7"}, 0, 2, 1, "cpu")
    assert theirs["OMP_NUM_THREADS"] == "7" and THREADS_BY_SHARE not in theirs


def test_gpus_are_divided_among_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert (devices_per_run(None, 2, "auto"), devices_per_run(1, 4, "auto")) == (2, 1)
    assert (devices_per_run(None, 8, "cpu"), devices_per_run(3, 8, "cpu")) == (1, 3)
    with pytest.raises(UsageError, match=r"3 runs of 2 ranks need 6 GPUs, .* shows 4; write --jobs 2"):
        devices_per_run(2, 3, "cuda")


def test_runs_under_nohup_outlive_their_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Slots([{}, {}], "local", 1).taking_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_so_many_runs_train_at_a_time_and_the_next_follows(file: Path) -> None:
    with submitted(file, "--local", "--jobs", "2", _GRID) as process:
        wait_for(lambda: len(ready_runs()) == 2, "two runs at once", HANG_LIMIT_S)
        assert len(find_runs([])) == 2, "the third waits for a slot"
        (ready_runs()[0].folder / "go").touch()
        wait_for(lambda: len(ready_runs()) == 3, "the third run", HANG_LIMIT_S)
        for paths in ready_runs():
            (paths.folder / "go").touch()
        out, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, err
    assert out.count("completed") == 3 and "run 3 of 3: " in err
    assert [read_status(paths).state for paths in find_runs([])] == ["completed"] * 3


@pytest.mark.slow
def test_ctrl_c_saves_all_that_train_and_starts_no_more(file: Path) -> None:
    with submitted(file, "--local", "--jobs", "2", _GRID) as process:
        wait_for(lambda: len(ready_runs()) == 2, "two runs at once", HANG_LIMIT_S)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 130, err
    assert "1 more runs were not started" in err
    assert all((paths.folder / "saved").exists() for paths in find_runs([])) and len(find_runs([])) == 2
