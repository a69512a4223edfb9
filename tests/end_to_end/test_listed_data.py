"""A run on tar shards, killed in mid-epoch and resumed, is bitwise that on a list of the same images."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets.building import build_source
from tests.end_to_end.holding import Hold
from tests.end_to_end.runs import (
    EXPERIMENT,
    assert_equal_to_the_bit,
    hpc_train,
    kill_everything,
    only_run,
    start,
    submit,
    write_experiment,
)

pytestmark = pytest.mark.slow

TEXT = EXPERIMENT.replace("data: {name: digits,", "data: {DATA,")
TRAIN = 72


def make_data(root: Path) -> None:
    """Write the same images as files with a list, and as members of two shards per split."""
    drawn = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    rows: dict[str, list[str]] = {"train": ["path,target"], "val": ["path,target"]}
    for number in range(96):
        content = io.BytesIO()
        Image.fromarray(drawn.integers(0, 256, (32, 32), dtype=np.uint8)).save(content, "PNG")
        (root / f"images/{number}.png").write_bytes(content.getvalue())
        split = "train" if number < TRAIN else "val"
        rows[split].append(f"images/{number}.png,{number % 3}")
        with tarfile.open(root / f"{split}-{number % TRAIN // 40}.tar", "a") as tar:
            for extension, member in (("png", content.getvalue()), ("cls", b"%d" % (number % 3))):
                info = tarfile.TarInfo(f"{number:03}.{extension}")
                info.size = len(member)
                tar.addfile(info, io.BytesIO(member))
    for split, lines in rows.items():
        (root / f"{split}.csv").write_text("\n".join(lines))


def test_a_killed_run_on_shards_ends_like_one_on_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    make_data(root)
    listed = TEXT.replace("DATA", f'name: image_list, root: "{root}", args: {{channels: 1}}')
    quiet = submit(tmp_path / "listed", "data.workers=auto", devices=2, text=listed)

    args = {"train": "train-{0..1}.tar", "val": "val-0.tar", "channels": 1}
    index = {"HPC_TRAIN_CACHE": str(tmp_path / "cache")}
    monkeypatch.setenv(*next(iter(index.items())))
    build_source(DataConfig(name="webdataset", root=str(root), args=args), download=True)
    sharded = TEXT.replace("DATA", f'name: webdataset, root: "{root}", args: {args}')
    experiment = write_experiment(tmp_path / "sharded", sharded)
    runs = index | {"HPC_TRAIN_RUNS": str(tmp_path / "sharded/runs")}
    with Hold(tmp_path / "sharded", 9) as hold:
        process = start("submit", experiment, hold.override, "--local", "--devices", "2", **runs)
        hold.wait(process)
        paths = only_run(tmp_path / "sharded")
        kill_everything(process, paths)
    done = hpc_train("resume", paths.folder, **runs)
    assert done.code == 0, done.err
    assert_equal_to_the_bit(quiet, paths)
