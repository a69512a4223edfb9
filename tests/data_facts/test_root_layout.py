"""What a data root lacks is found without torch, by ``validate``, and in the same words by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import misplaced
from hpc_train.training.datasets.building import build_source


def make(root: Path, paths: Sequence[str]) -> Path:
    """Make these folders, and files where a path has a suffix."""
    root.mkdir()
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch() if "." in path else (root / path).mkdir(exist_ok=True)
    return root


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("imagefolder", ["val/ant/1.png"], r"has no folder train \(it contains val\); the images must be in"),
        ("imagefolder", [], r"has no folder train \(it contains nothing\)"),
        ("imagefolder", ["Train/ant/1.png"], r"has no folder train .*; rename Train to train"),
        ("imagefolder", ["training/ant/1.png", "val"], r"has no folder train .*; rename training to train"),
        ("imagefolder", ["train/1.png"], r"train contains no class folders; put images into"),
        ("imagefolder", ["train/ant/1.png", "validation/ant/1.png"], "neither val nor test .* rename the"),
        ("segmentation_folder", ["train/1.png"], "there is no folder .*train/images on this machine"),
        ("segmentation_folder", ["train/images", "train/masks", "test/images"], "no folder .*test/masks"),
        ("coco", ["train/1.jpg"], "contains no train.json; write the folder that contains it"),
        (
            "coco",
            ["annotations/instances_train2017.json", "train2017/1.jpg"],
            r"no train.json; run `cd .*; ln -s annotations/instances_\w+.json train.json; ln -s \w+ train`",
        ),
        ("coco", ["train.json"], "there is no folder .*train on this machine; put the images of train.json"),
        ("coco", ["train.json", "train/1.jpg", "val.json"], "there is no folder .*val on this machine"),
        ("text", ["val.txt"], "has no file train.txt"),
    ],
)
def test_what_a_root_lacks_is_named(name: str, paths: Sequence[str], message: str, tmp_path: Path) -> None:
    args = {"num_classes": 3} if name == "segmentation_folder" else {}
    data = DataConfig(name=name, root=str(make(tmp_path / "data", paths)), args=args)
    problem = misplaced(data)
    assert problem is not None
    with pytest.raises(BadFileError, match=rf"^data\.root: .*{message}") as raised:
        build_source(data)
    assert str(raised.value) == str(problem)


def test_the_training_folder_itself_is_not_the_root(tmp_path: Path) -> None:
    make(tmp_path / "data", ["train/ant/1.png"])
    problem = misplaced(DataConfig(name="imagefolder", root=str(tmp_path / "data" / "train")))
    assert problem is not None and problem.remedy == f"write data.root: {tmp_path / 'data'}"


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("imagefolder", ["train/ant/1.png"]),
        ("imagefolder", ["train/ant/1.png", "test/ant/1.png", "notes/a.txt", ".cache/x"]),
        ("segmentation_folder", ["train/images", "train/masks"]),
        ("coco", ["train.json", "train", "test.json", "test"]),
        ("text", ["train.txt"]),
        ("synthetic", []),
    ],
)
def test_whole_roots_lack_nothing(name: str, paths: Sequence[str], tmp_path: Path) -> None:
    assert misplaced(DataConfig(name=name, root=str(make(tmp_path / "data", paths)))) is None


def test_a_text_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert misplaced(DataConfig(name="text", root=str(tmp_path / "a.txt"))) is None
