"""A run that reads a pack, from its node's own disk, is bitwise that which reads the image folder."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.paths import RunPaths
from hpc_train.training.data_staging import PackCopy, copy_of
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.packed import PackedPixels, find_pack
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    found_runs,
    only_run,
    start,
    status,
    submit,
    wait_for,
    write_experiment,
)
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow

LOCAL = ("--local", "--devices", "1")
TEXT = EXPERIMENT.replace(
    "data: {name: digits,", 'data: {name: imagefolder, root: "ROOT", args: {channels: 1},'
)


def make_images(root: Path) -> Path:
    drawn = np.random.default_rng(0)
    for number in range(96):
        path = root / ("train" if number < 72 else "val") / f"class{number % 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256, (32, 32), dtype=np.uint8)).save(path)
    return root


def test_rank_0_reports_what_is_not_read_and_what_loses_information(tmp_path: Path) -> None:
    root = make_images(tmp_path / "images")
    (root / "train/class0/.hidden.jpg").touch()
    (root / "train/class0/0.jpg").unlink()  # the first of the files, which is inspected
    Image.fromarray(np.full((32, 32), 4095, np.uint16)).save(root / "train/class0/0.png")
    text = TEXT.replace("ROOT", str(root)).replace("steps: 30", "steps: 2")
    overrides = ("optimization.schedule={name: constant}", "evaluation.every_steps=2")
    paths = submit(tmp_path / "run", *overrides, devices=2, text=text)
    first, second = (paths.attempt(1).log(rank).read_text() for rank in (0, 1))
    for words in (
        "data.root: not read: 1 hidden files or folders (first: train/class0/.hidden.jpg)",
        "inspected images have 16 bits per pixel (values 4095 to 4095)",
    ):
        assert first.count(words) == 1, first
        assert words not in second


def has_open(paths: RunPaths, path: Path) -> bool:
    """Whether a rank of the newest attempt has the file open."""
    try:
        record = json.loads(paths.attempt_folders()[-1].record.read_text())
        pids = [rank["pid"] for rank in record["rank_processes"]]
        files = [file.readlink() for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    except (OSError, IndexError):
        return False
    return path in files


def test_a_run_with_a_staged_pack_is_interrupted_and_resumed_without_one(tmp_path: Path) -> None:
    """Ctrl-C while data are staged, then in training; the rest is read from the image folder."""
    root, disk = make_images(tmp_path / "images"), tmp_path / "disk"
    text = TEXT.replace("ROOT", str(root))
    quiet = submit(tmp_path / "quiet", devices=1, text=text)
    disk.mkdir()
    cache = {"cache": str(tmp_path / "packs"), "stage": str(disk)}
    data = DataConfig(name="imagefolder", root=str(root), args={"channels": 1}, **cache)  # type: ignore[arg-type]
    assert isinstance(build_source(data, download=True).train, PackedPixels)
    keys = [f"data.{key}={value}" for key, value in cache.items()]
    runs = {"HPC_TRAIN_RUNS": str(tmp_path / "cached/runs")}
    experiment = write_experiment(tmp_path / "cached", text)

    copy = copy_of(find_pack(data), disk)
    interrupted_while_staging(copy, tmp_path / "cached", experiment, *keys, **runs)
    paths = only_run(tmp_path / "cached")
    assert paths.folder.name == quiet.folder.name, "the same run id"

    with Hold(tmp_path, 9) as hold:
        process = start("resume", paths.folder, hold.override, **runs)
        hold.wait(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_LIMIT_S) == 130, process.communicate()[1]
    assert copy.is_complete and f"{copy.path} has been copied" in paths.attempt(2).log(0).read_text()

    process = start("resume", paths.folder, "data.cache=", "data.stage=false", **runs)
    _, err = process.communicate(timeout=HANG_LIMIT_S)
    assert process.returncode == 0, err
    assert status(paths)["attempt"] == 3
    assert_equal_to_the_bit(quiet, paths)


def interrupted_while_staging(
    copy: PackCopy, folder: Path, experiment: Path, *keys: str, **environment: str
) -> None:
    """Submit while another job copies, and interrupt the rank that waits for it."""
    copy.folder.parent.mkdir(mode=0o700)
    copy.folder.mkdir()
    with (copy.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start("submit", experiment, *keys, *LOCAL, **environment)
        wait_for(lambda: bool(found_runs(folder)) or process.poll() is not None, "the run's folder")
        assert process.poll() is None, process.communicate()[1]
        paths = only_run(folder)
        wait_for(lambda: has_open(paths, copy.folder / ".lock") or process.poll() is not None, "staging")
        assert process.poll() is None, process.communicate()[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_LIMIT_S) == 130, process.communicate()[1]
    assert not copy.path.exists()
