"""How runs end: stopped, broken, killed, out of disk; and what a resume makes of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, exit_codes, read_record
from hpc_train.run.checkpoints import committed
from tests import warm
from tests.disks import small_disk, take_room
from tests.end_to_end import paced
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    EXPERIMENT,
    Done,
    assert_equal_to_the_bit,
    found_runs,
    hpc_train,
    last_step,
    only_run,
    rows,
    start,
    status,
    submit,
    wait_for,
    work_tree,
    write_experiment,
)
from tests.quiet import QuietRuns
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

STEPS = 30
PACED = EXPERIMENT.replace("parts:net", "paced:net")
#: Its losses may be compared across ranks and strategies: no BatchNorm, no division by a second moment.
PLAIN = PACED.replace(':net"}', ':net", args: {norm: false}}').replace("adamw, lr: 0.003", "sgd, lr: 0.05")
assert "norm: false" in PLAIN and "sgd" in PLAIN
LOCAL = ("--local", "--devices", "2")
#: An evaluation that a stop alone ends.
ENDLESS_EVALUATION = {paced.EVAL_S: str(HANG_LIMIT_S)}
SHORT = ("optimization.steps=6", "optimization.schedule={name: constant}", "evaluation.every_steps=6")


def begin(folder: Path, text: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    experiment = write_experiment(folder, text)
    return start("submit", experiment, *overrides, *LOCAL, HPC_TRAIN_RUNS=str(folder / "runs"), **environment)


def wait_for_run(folder: Path, process: subprocess.Popen[str]) -> RunPaths:
    wait_for(lambda: bool(found_runs(folder)) or process.poll() is not None, "the run's folder")
    assert process.poll() is None, process.communicate()[1]
    return only_run(folder)


def wait_for_step(paths: RunPaths, step: int, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: last_step(paths) >= step or process.poll() is not None, f"step {step}")
    assert process.poll() is None, process.communicate()[1]


def end_of(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=HANG_LIMIT_S)
    return Done(process.returncode, out, err)


def resume(paths: RunPaths, *words: str, **environment: str) -> Done:
    return hpc_train("resume", paths.folder, *words, **environment)


def record_of(paths: RunPaths) -> AttemptRecord:
    record = read_record(paths.attempt_folders()[-1])
    assert record is not None
    return record


def stopped(paths: RunPaths) -> tuple[str, str]:
    now = status(paths)
    return now["state"], now["reason"]


def interrupted_run(folder: Path, text: str) -> tuple[RunPaths, Done]:
    """Press Ctrl-C in the middle of training."""
    with Hold(folder, 16) as hold:
        process = begin(folder, text, hold.override)
        paths = wait_for_run(folder, process)
        hold.wait(process)
        process.send_signal(signal.SIGINT)
        return paths, end_of(process)


def copy_of(paths: RunPaths, folder: Path) -> RunPaths:
    target = folder / "runs" / paths.folder.parent.name / paths.folder.name
    shutil.copytree(paths.folder, target)
    return RunPaths(target)


@pytest.fixture(scope="module")
def quiet(quiet_runs: QuietRuns) -> RunPaths:
    return quiet_runs.of(text=PACED)


@pytest.fixture(scope="module")
def quiet_plain(quiet_runs: QuietRuns) -> RunPaths:
    return quiet_runs.of(text=PLAIN)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, Done]:
    return interrupted_run(tmp_path_factory.mktemp("interrupted"), PACED)


@pytest.fixture(scope="module")
def interrupted_plain(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return interrupted_run(tmp_path_factory.mktemp("interrupted_plain"), PLAIN)[0]


# --- stopped


@pytest.mark.fault(1, 47)
def test_ctrl_c_saves_the_step_that_it_stops_at(interrupted: tuple[RunPaths, Done]) -> None:
    paths, done = interrupted
    assert done.code == 130, done.err
    assert stopped(paths) == ("interrupted", "stopped by Ctrl-C")
    step = last_step(paths)
    assert 16 <= step < STEPS
    assert committed(paths)[0].step == step == status(paths)["step"]
    assert "Traceback" not in done.err
    assert not list(paths.attempt(1).folder.glob("*.error"))


@pytest.mark.fault(40, 47)
def test_after_ctrl_c_a_resume_is_bitwise_identical(
    interrupted: tuple[RunPaths, Done], quiet: RunPaths, tmp_path: Path
) -> None:
    paths = copy_of(interrupted[0], tmp_path)
    done = resume(paths)
    assert done.code == 0, done.err
    assert status(paths)["state"] == "completed"
    assert_equal_to_the_bit(quiet, paths)
    assert "continuing with" not in paths.attempt(2).log(0).read_text(), "the same ranks continue"


@pytest.mark.fault(2, 47)
def test_ctrl_c_in_an_evaluation_ends_it_and_a_resume_repeats_it(quiet: RunPaths, tmp_path: Path) -> None:
    process = begin(tmp_path, PACED, **ENDLESS_EVALUATION)
    paths = wait_for_run(tmp_path, process)
    wait_for_step(paths, 20, process)  # ranks agreed on the end of this step before its row was written
    process.send_signal(signal.SIGINT)
    done = end_of(process)
    assert done.code == 130, done.err
    assert rows(paths, "val") == [], "the evaluation went on to its end"
    assert last_step(paths) == committed(paths)[0].step == 20
    done = resume(paths)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)


@pytest.mark.fault(1)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGUSR2])
def test_a_signal_to_one_rank_alone_saves_and_requests_a_requeue(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Hold(tmp_path, 3) as hold:
        process = begin(tmp_path, PACED, hold.override)
        paths = wait_for_run(tmp_path, process)
        hold.wait(process)
        wait_for(lambda: len(record_of(paths).rank_processes) == 2, "the ranks' processes")
        os.kill(record_of(paths).rank_processes[1].pid, number)
    done = end_of(process)
    assert done.code == 75, done.err
    assert stopped(paths) == ("interrupted", "its ranks were asked to stop")
    assert committed(paths)[0].step == last_step(paths)
    assert record_of(paths).exit_codes == [75, 75]


# --- broken


def test_after_the_kill_of_a_rank_the_command_trains_on_and_changes_no_bit(
    quiet: RunPaths, tmp_path: Path
) -> None:
    with Hold(tmp_path, 12) as hold:
        process = begin(tmp_path, PACED, hold.override)
        paths = wait_for_run(tmp_path, process)
        hold.wait(process)
        wait_for(lambda: bool(committed(paths)), "a checkpoint")
        os.kill(record_of(paths).rank_processes[1].pid, signal.SIGKILL)
    done = end_of(process)
    assert done.code == 0, done.err
    assert "crash 1 of 3: rank 1: killed by SIGKILL" in done.err and "attempt 2 follows" in done.err
    records = [read_record(paths.attempt(number)) for number in (1, 2)]
    assert [(one.cause, one.in_place) for one in records if one] == [("crash", False), ("completed", True)]
    assert_equal_to_the_bit(quiet, paths)


@pytest.mark.fault(16)
def test_a_rank_that_raises_ends_the_run_and_is_its_reason(tmp_path: Path) -> None:
    failing = 'model={name: "tests.end_to_end.parts:failing", args: {rank: 1}}'
    process = begin(tmp_path, EXPERIMENT, failing)
    paths = wait_for_run(tmp_path, process)
    error = paths.attempt(1).error(1)
    wait_for(error.exists, "the rank's error")
    done = end_of(process)
    assert done.code == 1
    assert stopped(paths) == ("failed", "rank 1: ValueError: this rank was told to fail")
    assert "Traceback (most recent call last):" in error.read_text()
    assert "Traceback of your code (most recent call last):" in done.err
    assert "tests/end_to_end/parts.py" in done.err and "hpc_train/training" not in done.err
    assert f"the rest is in {paths.attempt(1).log(1)}" in done.err
    for text in (done.err, error.read_text()):
        assert "ValueError: this rank was told to fail" in text
    assert not paths.attempt(1).error(0).exists(), "rank 0 only lost its peer"
    assert not any(rank.is_alive() for rank in record_of(paths).rank_processes)


@pytest.mark.fault(20)
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """No log row looks at the loss before the save, which would otherwise make every resume fail."""
    explosive = "optimization.optimizer={name: sgd, lr: 1.0e+30}"
    rare = ("logging.every_steps=1000", "checkpoint.every_steps=2", *SHORT[:2], "evaluation.every_steps=1000")
    unclipped = "optimization.clip_grad_norm=null"
    done = end_of(begin(tmp_path, EXPERIMENT, explosive, unclipped, *rare))
    assert done.code == 1
    assert "is NaN or infinite" in status(only_run(tmp_path))["reason"]
    for checkpoint in committed(only_run(tmp_path)):
        shards = [load_file(path) for path in checkpoint.folder.glob("*.safetensors")]
        assert all(bool(tensor.isfinite().all()) for shard in shards for tensor in shard.values())


def test_too_few_samples_for_a_global_batch_is_the_files_mistake(tmp_path: Path) -> None:
    done = end_of(begin(tmp_path, EXPERIMENT, "optimization.global_batch_size=1440"))
    assert done.code == 65
    assert "optimization.global_batch_size: 1440" in done.err
    assert "Traceback" not in done.err


def image_folder(folder: Path) -> str:
    """Return a file that trains on images below ``folder``."""
    data = f"{{name: imagefolder, root: {folder / 'images'}, image_size: 32, "
    model = PACED.replace('"tests.end_to_end.paced:net"', "torchvision/resnet18")
    return model.replace("{name: digits, ", data)


def test_images_that_are_not_there_are_the_files_mistake(tmp_path: Path) -> None:
    done = end_of(begin(tmp_path, image_folder(tmp_path)))
    assert done.code == 65, done.err
    assert f"data.root: {tmp_path / 'images'} does not exist on this machine" in done.err
    assert not found_runs(tmp_path), "found before anything was started"
    assert "Traceback" not in done.err


@pytest.mark.fault(22)
def test_a_file_that_is_not_an_image_ends_the_run_and_is_named(tmp_path: Path) -> None:
    for split, count in (("train", 24), ("val", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
    broken = tmp_path / "images" / "train" / "cat" / "7.png"
    broken.write_bytes(broken.read_bytes()[:40])
    done = end_of(begin(tmp_path, image_folder(tmp_path), *SHORT))
    assert done.code == 65, done.err
    assert str(broken) in done.err
    assert "Traceback" not in done.err
    state, reason = stopped(only_run(tmp_path))
    assert state == "failed"
    assert str(broken) in reason


# --- killed


@pytest.mark.fault(48)
def test_ranks_die_with_a_launcher_that_was_killed(quiet: RunPaths, tmp_path: Path) -> None:
    with Hold(tmp_path, 10) as hold:
        process = begin(tmp_path, PACED, hold.override, **{warm.FRESH: "1"})
        paths = wait_for_run(tmp_path, process)
        hold.wait(process)
        wait_for(lambda: len(record_of(paths).rank_processes) == 2, "the ranks' processes")
        ranks = record_of(paths).rank_processes
        process.kill()
        wait_for(lambda: not any(rank.is_alive() for rank in ranks), "the ranks' end")
    process.communicate()
    assert status(paths)["state"] == "running", "nobody was left to write an end"
    shown = hpc_train("status", "--json", paths.folder)
    (run,) = json.loads(shown.out)["runs"]
    assert (run["state"], run["reason"]) == ("failed", "launcher died")
    assert stopped(paths) == ("failed", "launcher died")
    done = resume(paths)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)


# --- out of disk


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "runs", "24m") as folder:
        yield folder


def fill(folder: Path, leave_bytes: int) -> Path:
    """Take the disk's room but for ``leave_bytes``; return the file that takes it."""
    ballast = folder / "ballast"
    wait_for(lambda: take_room(ballast, leave_bytes), "a full disk")
    return ballast


def keep_full(folder: Path, process: subprocess.Popen[str], hold: Hold) -> Path:
    """Leave no room until the process, held until now, ends."""
    ballast = fill(folder, leave_bytes=0)
    hold.release()
    until = time.monotonic() + HANG_LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        take_room(ballast, leave_bytes=0)
        time.sleep(0.01)
    return ballast


@pytest.mark.fault(7)
@pytest.mark.parametrize("room_for", ["small files", "nothing"])
def test_a_full_disk_ends_the_run_and_with_room_again_it_continues(
    room_for: str, quiet: RunPaths, small_disk: Path, tmp_path: Path
) -> None:
    # A status that can't be written ends nothing; the next checkpoint, of step 14, does.
    with Hold(tmp_path, 10) as hold:
        process = begin(tmp_path, PACED, hold.override)
        paths = wait_for_run(tmp_path, process)
        hold.wait(process)
        wait_for(lambda: bool(committed(paths)), "a checkpoint")
        if room_for == "nothing":
            ballast = keep_full(small_disk, process, hold)
        else:
            ballast = fill(small_disk, leave_bytes=500_000)
    done = end_of(process)
    assert done.code == 74, done.err
    assert "Traceback" not in done.err
    assert "No space left on device" in done.err or "the disk is full" in done.err
    if room_for == "nothing":
        assert last_step(paths) < 21, "the run ends at the first checkpoint that has no room"
    else:
        state, reason = stopped(paths)
        assert state == "failed" and reason in done.err
        assert str(paths.checkpoints) in reason and "the disk is full" in reason
    ballast.unlink()
    (run,) = json.loads(hpc_train("status", "--json", paths.folder).out)["runs"]
    assert run["state"] == "failed"
    done = resume(paths)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)


# --- damaged


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def flip_a_bit(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(truncate, marks=pytest.mark.fault(10)),
        pytest.param(flip_a_bit, marks=pytest.mark.fault(11)),
        pytest.param(Path.unlink, marks=pytest.mark.fault(12)),
    ],
)
def test_the_checkpoint_before_a_damaged_one_is_used(
    damage: Callable[[Path], None], interrupted: tuple[RunPaths, Done], quiet: RunPaths, tmp_path: Path
) -> None:
    paths = copy_of(interrupted[0], tmp_path)
    newest, before = committed(paths)[:2]
    damage(newest.shard(1))
    done = resume(paths)
    assert done.code == 0, done.err
    log = paths.attempt(2).log(0).read_text()
    assert f"checkpoint {newest.folder.name} is damaged" in log
    assert f"from step {before.step} to {STEPS}" in log
    assert_equal_to_the_bit(quiet, paths)


@pytest.mark.fault(11)
def test_where_every_checkpoint_is_damaged_training_does_not_restart_silently(
    interrupted: tuple[RunPaths, Done], tmp_path: Path
) -> None:
    paths = copy_of(interrupted[0], tmp_path)
    for checkpoint in committed(paths):
        flip_a_bit(checkpoint.shard(0))
    before = paths.metrics.read_text()
    for attempt in (2, 3):  # the second finds them set aside
        done = resume(paths)
        assert done.code == 74, done.err
        state, reason = stopped(paths)
        assert state == "failed"
        assert "every checkpoint is damaged" in reason
        assert "--new" in reason and ".bad" in reason
        assert "Traceback" not in done.err
        assert paths.metrics.read_text() == before
        # The launcher asks the other rank to stop, which may come before its own error.
        assert exit_codes(paths.attempt(attempt)) in ({0: 74, 1: 74}, {0: 74, 1: 75})


# --- the same file again


def submit_again(paths: RunPaths, text: str, *options: str) -> Done:
    """Submit the file to where the run is already."""
    runs = paths.folder.parents[1]
    return hpc_train(
        "submit", write_experiment(runs.parent, text), *options, *LOCAL, HPC_TRAIN_RUNS=str(runs)
    )


def test_a_run_that_has_completed_is_not_started_again(quiet: RunPaths) -> None:
    done = submit_again(quiet, PACED)
    assert done.code == 0, done.err
    assert "completed already" in done.err
    assert len(quiet.attempt_folders()) == 1


@pytest.mark.fault(37)
def test_a_run_in_training_is_not_started_again(tmp_path: Path) -> None:
    with Hold(tmp_path, 1) as hold:
        process = begin(tmp_path, PACED, hold.override)
        paths = wait_for_run(tmp_path, process)
        hold.wait(process)
        done = submit_again(paths, PACED)
        assert done.code == 0, done.err
        assert "running already" in done.err
        process.send_signal(signal.SIGINT)
        assert end_of(process).code == 130
    assert len(paths.attempt_folders()) == 1


def test_a_run_that_failed_is_resumed_or_begun_beside(interrupted: tuple[RunPaths, Done]) -> None:
    paths, _ = interrupted
    done = submit_again(paths, PACED)
    assert done.code == 1
    assert f"hpc-train resume {paths.folder.name}" in done.err
    assert "--new" in done.err
    assert len(paths.attempt_folders()) == 1


def test_new_starts_a_second_run_that_equals_the_first(tmp_path: Path) -> None:
    first = submit(tmp_path, *SHORT)
    done = submit_again(first, EXPERIMENT, *SHORT, "--new")
    assert done.code == 0, done.err
    second = RunPaths(first.folder.with_name(f"{first.folder.name}-2"))
    assert_equal_to_the_bit(first, second)


@pytest.mark.fault(37)
def test_of_two_resumes_at_once_one_trains(
    interrupted: tuple[RunPaths, Done], quiet: RunPaths, tmp_path: Path
) -> None:
    paths = copy_of(interrupted[0], tmp_path)
    with Hold(tmp_path, last_step(paths) + 1) as hold:  # one may begin when the other would have completed
        both = [start("resume", paths.folder, hold.override) for _ in range(2)]
        wait_for(lambda: any(process.poll() is not None for process in both), "the end of one")
    ends = sorted((end_of(process) for process in both), key=lambda done: done.code)
    assert ends[0].code == 0, ends[0].err
    assert ends[1].code in {1, 75}, "the other refuses"
    assert "Traceback" not in ends[1].err
    assert status(paths)["state"] == "completed"
    assert_equal_to_the_bit(quiet, paths)


def test_a_sweep_trains_each_of_its_runs(tmp_path: Path) -> None:
    text = EXPERIMENT + "sweep: {grid: {optimization.optimizer.lr: [0.001, 0.01]}}\n"
    done = end_of(begin(tmp_path, text, *SHORT))
    assert done.code == 0, done.err
    runs = found_runs(tmp_path)
    assert [status(paths)["state"] for paths in runs] == ["completed"] * 2
    first, second = ([row["loss"] for row in rows(paths, "train")] for paths in runs)
    assert first[0] == second[0], "the same seed"
    assert first[-1] != second[-1], "another rate"


# --- resumed otherwise


def losses(paths: RunPaths) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in rows(paths)], dtype=torch.float64)


@pytest.mark.fault(40)
@pytest.mark.parametrize(
    ("changes", "who"),
    [
        (("--local", "--devices", "3"), "3 ranks under ddp"),
        (("parallel.strategy=fsdp",), "2 ranks under fsdp"),
    ],
    ids=["three ranks", "fsdp"],
)
def test_a_run_continues_on_other_ranks_with_the_same_losses(
    changes: tuple[str, ...], who: str, interrupted_plain: RunPaths, quiet_plain: RunPaths, tmp_path: Path
) -> None:
    at = committed(interrupted_plain)[0].step
    paths = copy_of(interrupted_plain, tmp_path)
    done = resume(paths, *changes)
    assert done.code == 0, done.err
    assert status(paths)["state"] == "completed"
    assert [row["step"] for row in rows(paths)] == [row["step"] for row in rows(quiet_plain)]
    torch.testing.assert_close(losses(paths), losses(quiet_plain), rtol=0, atol=1e-5)
    said = f"continuing with {who} from checkpoint {at} of 2 ranks under ddp"
    logs = [path.read_text() for path in sorted(paths.attempt(2).folder.glob("rank-*.log"))]
    assert [log.count(said) for log in logs] == [1] + [0] * (len(logs) - 1)
    assert "not bitwise" in logs[0] and "BatchNorm" not in logs[0]


def test_channels_last_is_another_layout_of_the_same_numbers(tmp_path: Path) -> None:
    # Without dropout: a random mask is drawn in the order of memory.
    plain = submit(tmp_path / "plain", *SHORT, "model.args={norm: false, dropout: 0}", text=PLAIN)
    model = 'model={name: "tests.end_to_end.paced:channels_last_only", channels_last: true}'
    other = submit(tmp_path / "other", *SHORT, model, text=PLAIN)
    torch.testing.assert_close(losses(other), losses(plain), rtol=0, atol=1e-5)


# --- taken away


def test_a_limit_of_open_files_that_is_too_low_is_named(tmp_path: Path) -> None:
    experiment = write_experiment(tmp_path)
    done = hpc_train(
        "submit",
        experiment,
        "--local",
        "--devices",
        "1",
        HPC_TRAIN_RUNS=str(tmp_path / "runs"),
        before=("prlimit", "--nofile=32:32"),
    )
    assert done.code == 1
    assert "may open 32 files and sockets but needs 48, with world size 1" in done.err
    record = read_record(only_run(tmp_path).attempt(1))
    assert record is not None and (record.cause, record.exit_codes) == ("user error", [ExitCode.ENVIRONMENT])
    assert "diverge" not in done.err + done.out, "no other learning rate is proposed"


def test_an_address_space_too_small_for_a_ranks_imports_is_named(tmp_path: Path) -> None:
    """torch can't be imported: the shared objects do not fit."""
    experiment, mib = write_experiment(tmp_path), 600
    command = ["submit", str(experiment), "--local", "--devices", "1"]
    done = subprocess.run(
        ["prlimit", f"--as={mib << 20}", sys.executable, "-m", "hpc_train", *command],
        cwd=work_tree(),
        env=os.environ | {"HPC_TRAIN_RUNS": str(tmp_path / "runs"), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    assert done.returncode == 1, done.stderr
    limit = f"the address space is limited to {mib} MiB (`ulimit -v`)"
    assert limit in done.stderr and limit in str(status(only_run(tmp_path))["reason"])
