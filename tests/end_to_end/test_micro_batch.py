"""``micro_batch_size: auto`` on ranks with the stand-in for GPUs, one of which has less memory."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_train.paths import RunPaths
from hpc_train.run.found_micro_batch import Found, kept
from tests import fake_cuda
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    only_run,
    start,
    submit,
    wait_for,
    write_experiment,
)
from tests.fake_cuda.test_fake_cuda import with_stand_in
from tests.waiting import HANG_LIMIT_S

EXPERIMENT = """\
name: hungry
seed: 3
task: classification
device: cuda
model: {name: "tests.gpu.parts:hungry", args: {sample_bytes: 100663296, dropout: 0.2}}
data: {name: digits, augment: {hflip: 0.5, crop_padding: 2}}
optimization:
  steps: 8
  global_batch_size: 48
  micro_batch_size: auto
  optimizer: {name: adamw, lr: 0.003}
  clip_grad_norm: 1.0
evaluation: {every_steps: 8}
checkpoint: {every_steps: 4}
logging: {every_steps: 1}
"""
SCARCE = ("--local", "--launcher", "tests.gpu.scarce:ScarceLauncher")


@pytest.fixture(autouse=True, scope="module")
def _forked() -> Iterator[None]:
    with fake_cuda.forking():
        yield


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_cuda.environment(2).items():
        monkeypatch.setenv(name, value)


@with_stand_in
def test_all_ranks_take_what_fits_on_each_and_keep_it(tmp_path: Path) -> None:
    """Stopped, and resumed where there is more memory, the run is bitwise that of the number."""
    folder = tmp_path / "auto"
    experiment, runs = write_experiment(folder, EXPERIMENT), {"HPC_TRAIN_RUNS": str(folder / "runs")}
    with Hold(folder, 5) as hold:
        process = start("submit", experiment, hold.override, *SCARCE, "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(folder)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_LIMIT_S)
        assert process.returncode == 130, err
    assert kept(paths) == Found(size=8, too_large=12, ranks=2, attempt=1)
    done = hpc_train("resume", paths.folder, "--local", "--devices", "2", **runs)
    assert done.code == 0, done.err
    assert "auto is 8 in this run" in paths.attempt(2).log(0).read_text()
    assert not paths.attempt(2).trial_rendezvous.exists()
    shown = json.loads(hpc_train("status", "--json", **runs).out)["runs"][0]
    assert shown["micro_batch_size"] == 8

    written = submit(tmp_path / "written", "optimization.micro_batch_size=8", text=EXPERIMENT)
    assert_equal_to_the_bit(paths, written)


@with_stand_in
def test_where_nothing_fits_the_run_ends_with_an_explanation(tmp_path: Path) -> None:
    experiment, runs = write_experiment(tmp_path, EXPERIMENT), {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    done = hpc_train(
        "submit", experiment, "model.args.sample_bytes=1600000000", *SCARCE, "--devices", "1", **runs
    )
    assert done.code == 65
    assert "optimization.micro_batch_size: auto finds nothing that fits, not even 1 at a time" in done.err
    assert "rank 0: " in done.err and "Traceback" not in done.err
    assert kept(only_run(tmp_path)) is None


def processes_of(paths: RunPaths) -> list[str]:
    """Return the command lines that name the run's folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found.append(file.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if str(paths.folder) in line]


@with_stand_in
def test_a_stop_while_sizes_are_tried_ends_ranks_and_trials(tmp_path: Path) -> None:
    experiment, runs = write_experiment(tmp_path, EXPERIMENT), {"HPC_TRAIN_RUNS": str(tmp_path / "runs")}
    devices = ("--local", "--devices", "2")
    process = start("submit", experiment, "model.args.pause_s=5", *devices, **runs)
    wait_for(lambda: bool(found_runs(tmp_path)), "the run's folder")
    paths = only_run(tmp_path)
    wait_for(lambda: paths.attempt(1).trial_rendezvous.exists() or process.poll() is not None, "a trial")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 130, err
    wait_for(lambda: not processes_of(paths), "the end of all", limit_s=HANG_LIMIT_S)
    assert kept(paths) is None
