from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.training.datasets import packing
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.sources.image_files import ImageFiles
from tests.datasets.samples import CPU, experiment
from tests.datasets.sources.masks import write_folder
from tests.waiting import HANG_LIMIT_S


def save_image(path: Path, value: int = 0, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), value, dtype=np.uint8)).convert(mode).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for split in ("train", "val"):
        for number, name in enumerate(["cat", "ant", "bee"]):
            for image in range(3):
                save_image(root / split / name / f"{image}.png", number * 10 + image)
    return root


def build(root: Path | None, **args: object):
    return build_source(DataConfig(name="imagefolder", root=None if root is None else str(root), args=args))


def test_classes_and_files_come_in_the_order_of_their_names(root: Path) -> None:
    source = build(root)
    assert source.info.class_names == ("ant", "bee", "cat")
    assert source.info.mean == (0.485, 0.456, 0.406)
    samples = [source.train[index] for index in range(len(source.train))]
    assert [target for _, target in samples] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [int(image[0, 0, 0]) for image, _ in samples] == [10, 11, 12, 20, 21, 22, 0, 1, 2]
    assert samples[0][0].shape == (3, 6, 8)


def test_test_stands_in_for_val_and_val_wins(root: Path) -> None:
    (root / "val").rename(root / "test")
    assert build(root).val is not None
    for name in ("ant", "bee", "cat"):
        save_image(root / "val" / name / "only.png")
    val = build(root).val
    assert val is not None
    assert len(val) == 3


def test_without_validation_folders_there_is_none(root: Path) -> None:
    shutil.rmtree(root / "val")
    assert build(root).val is None


def test_other_files_hidden_files_and_link_cycles_are_skipped(root: Path) -> None:
    (root / "train" / "ant" / "notes.txt").write_text("x")
    (root / "train" / "ant" / "._0.png").write_text("x")
    (root / "train" / ".cache").mkdir()
    (root / "train" / "ant" / "loop").symlink_to(root / "train" / "ant")
    save_image(root / "train" / "ant" / "deep" / "more.JPEG")
    source = build(root)
    assert source.info.num_classes == 3
    assert len(source.train) == 10


def test_gray_and_palette_images_mix_with_colour(root: Path) -> None:
    save_image(root / "train" / "ant" / "gray.png", 7, "L")
    save_image(root / "train" / "ant" / "palette.gif", 7, "P")
    for channels in (1, 3):
        train = build(root, channels=channels).train
        assert {tuple(train[index][0].shape) for index in range(len(train))} == {(channels, 6, 8)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_image_is_named_with_its_file(root: Path, workers: int) -> None:
    broken = root / "train" / "bee" / "1.png"
    broken.write_bytes(broken.read_bytes()[:-30])
    given = experiment(workers=workers, global_batch_size=9, micro_batch_size=3)
    with (
        training_batches(build(root), given, Position(0), 1, 0, 1, CPU) as batches,
        pytest.raises(BadFileError, match=r"^data: sample 4 \(.*bee/1\.png\) can't be read: "),
    ):
        list(batches)


def test_a_batch_of_files_has_the_pixels_of_the_files(root: Path) -> None:
    given = experiment(global_batch_size=9, micro_batch_size=9)
    ((_, (batch,)),) = training_batches(build(root), given, Position(0), 1, 0, 1, CPU)
    pairs = zip(batch.inputs[:, 0, 0, 0].tolist(), batch.targets.tolist(), strict=True)
    assert sorted(pairs) == [(0, 2), (1, 2), (2, 2), (10, 0), (11, 0), (12, 0), (20, 1), (21, 1), (22, 1)]
    assert batch.inputs.dtype == torch.uint8


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"^data\.root: is missing, .*; write the folder that"):
        build_source(DataConfig(name="imagefolder"))
    with pytest.raises(BadFileError, match=r"^data\.root: .*nowhere is not a folder on this machine"):
        build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: (r / "train").rename(r / "training"), r"no folder train \(it contains training, val\)"),
        (lambda r: (r / "val").rename(r / "validation"), r"neither val nor test .* validation; rename"),
        (lambda r: (r / "val/cat").rename(r / "val/dog"), r"val has classes that train has not: dog; put"),
        (lambda r: (r / "train/dog").mkdir(), r"dog contains no image"),
        (lambda r: [shutil.rmtree(path) for path in (r / "train").iterdir()], r"contains no class folders"),
    ],
    ids=["no train", "validation", "other classes", "empty class", "no classes"],
)
def test_folders_that_do_not_fit_are_named(root: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(root)
    with pytest.raises(BadFileError, match=rf"^data\.root: .*{words}"):
        build(root)


def test_spellings_of_one_class_are_named(root: Path) -> None:
    (root / "val" / "cat").rename(root / "val" / "Cat")
    with pytest.raises(BadFileError, match=r"val has the class 'Cat', and train has 'cat'; spell them"):
        build(root)
    (root / "train" / "bee").rename(root / "train" / "Cat")
    (root / "val" / "bee").rename(root / "val" / "cat")
    assert "'Cat' and 'cat'" in "".join(build(root).notices)


def test_a_folder_that_cannot_be_listed_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image(root / "train" / "ant" / "deep" / "more.png")
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if os.fspath(path).endswith("deep"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(BadFileError, match=r"^data: the folder .*ant/deep can't be listed: Stale"):
        build(root)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("0", "2", "10"), "10 is class 1"),
        (("00", "02", "10"), None),
        (("0", "2", "x"), None),
    ],
)
def test_numbers_in_another_order_than_by_size_are_reported(
    names: tuple[str, ...], words: str | None, root: Path
) -> None:
    for split in ("train", "val"):
        for old, new in zip(("ant", "bee", "cat"), names, strict=True):
            (root / split / old).rename(root / split / new)
    notices = "".join(build(root).notices)
    assert "in alphabetical order" not in notices if words is None else words in notices


def test_val_may_lack_classes_of_train(root: Path) -> None:
    shutil.rmtree(root / "val/bee")
    source = build(root)
    assert source.info.class_names == ("ant", "bee", "cat") and source.val is not None
    assert [source.val[index][1] for index in range(6)] == [0, 0, 0, 2, 2, 2]
    assert f"data.root: {root / 'val'} has no image of bee" in source.notices


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # its name has a short limit
        server.bind(path.name)


@pytest.mark.timeout(HANG_LIMIT_S)
@pytest.mark.parametrize("instead", [pipe, endless, listening, Path.mkdir])
def test_what_is_not_a_regular_file_is_a_bad_image(
    instead: Callable[[Path], None], root: Path, tmp_path: Path
) -> None:
    split: Any = build(root).train
    folder = DataConfig(name="imagefolder", root=str(root))
    masked = write_folder(tmp_path / "scenes", train=2, val=1)
    scenes: Any = build_source(
        DataConfig(name="segmentation_folder", root=str(masked), args={"num_classes": 3})
    ).train
    predicted = ImageFiles(root / "train/ant", 3)
    reads: list[tuple[Path, Callable[[], object]]] = [
        (root / "train/ant/0.png", lambda: split.file_content(0)),
        (root / "train/ant/2.png", lambda: packing._read(split, 2, packing._AnySize(folder, 3))),
        (root / "train/ant/1.png", lambda: predicted.file_content(1)),
        (masked / "train/images/000.png", lambda: scenes.file_content(0)),
        (masked / "train/masks/001.png", lambda: scenes.file_content(1)),
    ]
    for path, read in reads:
        path.unlink()
        instead(path)
        with pytest.raises(BadFileError, match=rf"^data: {path}: (not a regular|No such device).*; put an"):
            read()
