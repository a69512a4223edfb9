"""``survey``: the data set, numbers and arguments of folders as users have them, and what it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpc_train.errors import UsageError
from hpc_train.experiment.data_facts.survey.content import Survey
from hpc_train.experiment.data_facts.survey.looking import survey
from tests.datasets.coco import read, write, write_coco
from tests.datasets.sources import masks
from tests.shapes import write_folder, write_list

_TWO = ("circle", "cross")
_SIZE = (12, 10)


def classes(root: Path, mode: str = "RGB", **counts: int) -> Path:
    return write_folder(root, counts or {"train": 5, "val": 2}, _SIZE, shapes=_TWO, mode=mode)


def surveyed(root: Path, **choices: str) -> Survey:
    content = survey(root, **choices)
    assert content is not None
    return content


def missing_in_val(root: Path) -> Path:
    shutil.rmtree(classes(root) / "val" / "cross")
    return root


def one_of_a_class(root: Path) -> Path:
    for path in sorted((classes(root) / "train" / "cross").iterdir())[1:]:
        path.unlink()
    return root


def extra_folders(root: Path) -> Path:
    """Nested folders, files that are no images, a damaged one, and a folder of neither split."""
    (classes(root) / "notes").mkdir()
    (root / "train" / "cross" / "more").mkdir()
    (root / "train" / "cross" / "00000.png").rename(root / "train" / "cross" / "more" / "x.PNG")
    (root / "train" / "cross" / "readme.txt").touch()
    (root / "train" / "circle" / "00000.png").write_bytes(b"no image")
    return root


@pytest.mark.parametrize(
    ("make", "samples", "args", "remark"),
    [
        (classes, 10, {}, ""),
        (lambda root: classes(root, mode="L"), 10, {"channels": 1}, "gray"),
        (missing_in_val, 10, {}, "val has no image of cross"),
        (one_of_a_class, 6, {}, "only 1 image of cross"),
        (extra_folders, 10, {}, "not read: notes"),
        (extra_folders, 10, {}, r"1 of 10 files of a sample can't be opened: .*circle/00000\.png"),
    ],
)
def test_a_folder_of_classes(
    make: Callable[[Path], Path], samples: int, args: dict[str, Any], remark: str, tmp_path: Path
) -> None:
    content = surveyed(make(tmp_path / "data"))
    assert (content.task, content.name, content.samples) == ("classification", "imagefolder", samples)
    assert content.args == args and content.has_val and content.images is not None
    assert re.search(remark, "\n".join(content.lines))
    assert (content.images.width, content.images.height) == _SIZE


def test_images_without_classes_are_no_validation(tmp_path: Path) -> None:
    root = classes(tmp_path / "data", train=3)
    (root / "test").mkdir()
    (root / "train" / "cross" / "00000.png").rename(root / "test" / "0.png")
    content = surveyed(root)
    assert "not read: test" in content.lines and len(content.new_lists["val"]) == 2


@pytest.mark.parametrize("part", [".", "train"])
def test_without_validation_images_a_fifth_of_each_class_is_for_it(part: str, tmp_path: Path) -> None:
    content = surveyed(classes(tmp_path / "data", **{part: 10}))
    train, val = (content.new_lists[split] for split in ("train", "val"))
    assert content.name == "image_list" and train[0] == val[0] == ("path", "class")
    assert [sum(row[1] == shape for row in val) for shape in _TWO] == [2, 2]
    paths = [row[0] for row in (*train[1:], *val[1:])]
    assert len({*paths}) == 20 and all((tmp_path / "data" / path).is_file() for path in paths)
    assert content == surveyed(tmp_path / "data"), "the same images at each call"
    assert surveyed(tmp_path / "data", name="imagefolder").new_lists == {} if part == "train" else True


def test_a_folder_of_the_same_classes_is_validation(tmp_path: Path) -> None:
    content = surveyed(classes(tmp_path / "data", train=5, holdout=2))
    assert len(content.new_lists["val"]) == 5 and "those in holdout" in "\n".join(content.lines)


def listed(root: Path, header: str, rows: list[str], name: str = "train.csv") -> Path:
    """Write two images, and a list of them."""
    root.mkdir(exist_ok=True)
    for number in (0, 1):
        Image.new("RGB", _SIZE).save(root / f"{number}.png")
    (root / name).write_text("\n".join([header, *rows]) + "\n")
    return root


@pytest.mark.parametrize(
    ("header", "rows", "task", "args"),
    [
        ("id,file,label", ["a,0.png,ant", "b,1.png,bee"], "classification", {"target_column": "label"}),
        ("file,x", ["0.png,0.5", "1.png,2"], "regression", {"target_column": "x", "target": "number"}),
        ("file,x", ["0.png,3", "1.png,3", "0.png,3"], "classification", {"target_column": "x"}),
        ("file,x", ["0.png,3", "1.png,2"], "regression", {"target_column": "x", "target": "number"}),
        (
            "file,x,y", ["0.png,5,1", "1.png,1,1"], "regression",
            {"target_column": ["x", "y"], "target": "number"},
        ),
        (
            "file,a,b", ["0.png,0,1", "1.png,1,1"], "classification",
            {"target_column": ["a", "b"], "target": "classes"},
        ),
        (
            "file,a,b", ["0.png,0.5,1", "1.png,1,1"], "regression",
            {"target_column": ["a", "b"], "target": "number"},
        ),
        ("file,size,kind", ["0.png,3,ant", "1.png,4,ant"], "classification", {"target_column": "kind"}),
    ],
)  # fmt: skip
def test_the_columns_of_a_list(
    header: str, rows: list[str], task: str, args: dict[str, Any], tmp_path: Path
) -> None:
    root = listed(listed(tmp_path / "data", header, rows), header, rows, "val.csv")
    content = surveyed(root)
    assert (content.task, content.name) == (task, "image_list") and not content.new_lists
    assert content.args == {"path_column": "file", "train": "train.csv", "val": "val.csv"} | args


def test_the_task_decides_about_numbers(tmp_path: Path) -> None:
    root = listed(tmp_path / "data", "file,x", ["0.png,3", "1.png,3"])
    assert surveyed(root, task="regression").args["target"] == "number"
    assert (surveyed(root).task, surveyed(root, task="classification").task) == ("classification",) * 2
    listed(root, "file,x", ["0.png,ant", "1.png,2"])
    with pytest.raises(UsageError, match="regression needs numbers, and the list has 'ant'"):
        survey(root, task="regression")


def test_a_list_beside_a_folder_of_its_images(tmp_path: Path) -> None:
    """Also if it is named itself, and lacks validation images."""
    root = write_list(tmp_path / "data", {"train": 20}, _SIZE)
    table = (root / "train.csv").read_text().replace("images/", "")
    (root / "labels.csv").write_text(table)
    (root / "train.csv").unlink()
    for folder in (root, root / "labels.csv"):
        content = surveyed(folder)
        assert content.root == root / "images" and content.samples == 16
        assert {split: len(rows) - 1 for split, rows in content.new_lists.items()} == {"train": 16, "val": 4}


def test_a_list_of_something_else_beside_class_folders(tmp_path: Path) -> None:
    root = classes(tmp_path / "data", **{".": 5})
    (root / "authors.csv").write_text("name,year\nA,2001\n")
    assert surveyed(root).new_lists["train"][1][1] in _TWO
    with pytest.raises(UsageError, match="names image files"):
        survey(root, task="regression")


def test_classes_of_the_validation_list_alone_are_written(tmp_path: Path) -> None:
    root = listed(tmp_path / "data", "file,label", ["0.png,10", "1.png,9"])
    listed(root, "file,label", ["0.png,11"], "val.csv")
    content = surveyed(root)
    assert content.args["classes"] == ["9", "10", "11"] and "no training image of 11" in content.lines


@pytest.mark.parametrize(
    ("values", "args"),
    [
        ([0, 1, 2, 255], {"num_classes": 3}),
        ([0, 255], {"num_classes": 2, "mask_values": [0, 255]}),
        ([0, 1], {"num_classes": 2}),
        ([0, 50, 100], {"num_classes": 3, "mask_values": [0, 50, 100]}),
    ],
)
def test_the_values_of_masks(values: list[int], args: dict[str, Any], tmp_path: Path) -> None:
    root = masks.write_folder(tmp_path / "data", train=2)
    pixels = np.array(values, np.uint8).reshape(1, -1).repeat(4, 0)
    for path in (root / "train" / "masks").iterdir():
        masks.save(path, pixels)
    content = surveyed(root)
    assert (content.task, content.args) == ("segmentation", args)
    assert not content.has_val and "no validation data" in "\n".join(content.lines)


def test_gray_images_with_boxes_get_three_channels_for_the_detectors(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "data")
    for path in root.rglob("*.png"):
        Image.open(path).convert("L").save(path)
    content = surveyed(root)
    assert content.images is not None and content.images.channels == 1 and "channels" not in content.args


def test_boxes_outside_of_images_are_dropped(tmp_path: Path) -> None:
    root = write_coco(tmp_path / "data")
    assert (surveyed(root).task, surveyed(root).args, surveyed(root).samples) == ("detection", {}, 8)
    document = read(root)
    document["annotations"][0]["bbox"] = [30, 0, 9, 9]
    write(root, "train", document)
    content = surveyed(root)
    assert content.args == {"bad_boxes": "drop"} and "dropped: 1 of all boxes" in "\n".join(content.lines)


@pytest.mark.parametrize(
    ("files", "target", "args", "samples"),
    [
        ({"train.txt": 2000}, "", {"sequence_length": 128, "val_fraction": 0.1}, 56),
        ({"book.txt": 2000}, "book.txt", {"sequence_length": 128, "val_fraction": 0.1}, 56),
        ({"book.txt": 200}, "book.txt", {"sequence_length": 16, "val_fraction": 0.1}, 44),
        ({"train.txt": 2000, "val.txt": 2000}, "", {"sequence_length": 128}, 62),
    ],
    ids=["folder", "file", "short", "validation"],
)
def test_the_end_of_a_text_is_for_validation_unless_it_has_its_own(
    files: dict[str, int], target: str, args: dict[str, Any], samples: int, tmp_path: Path
) -> None:
    for name, words in files.items():
        (tmp_path / name).write_text("abc " * words)
    content = surveyed(tmp_path / target)
    assert (content.task, content.name, content.samples) == ("causal_lm", "text", samples)
    assert content.args == args
    is_cut = not target and len(files) == 1
    assert content.root == (tmp_path / "train.txt" if is_cut else None)


def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    assert surveyed(tmp_path).args["tokenizer"] == "bytes"


def unknown_class(root: Path) -> Path:
    (classes(root) / "val" / "cross").rename(root / "val" / "square")
    return root


def colored_masks(root: Path) -> Path:
    masks.write_folder(root, train=1)
    for path in (root / "train" / "masks").iterdir():
        Image.new("RGB", _SIZE).save(path)
    return root


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (unknown_class, r"val/square is a class that train lacks; put images of it into .*/train/square"),
        (colored_masks, r"the mask .*000\.png has colors \(mode RGB\); save one class number per pixel"),
        (lambda root: listed(root, "file,label", ["9.png,1"]), r"\(file, label\) names image files below"),
        (lambda root: listed(root, "file", ["0.png"]), r"no column but file; write a column target"),
        (lambda root: write_coco(root, train=0), r"no image below .*train can be opened"),
    ],
)
def test_unreadable_folders_are_refused(make: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        survey(make(tmp_path / "data"))


def test_a_folder_of_other_files_is_refused_with_the_layouts(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").touch()
    with pytest.raises(UsageError, match=r"contains notes\.doc, which no data set reads; arrange them as"):
        survey(tmp_path)


def test_a_folder_of_another_task_is_refused_with_its_layout(tmp_path: Path) -> None:
    root = classes(tmp_path / "data")
    with pytest.raises(UsageError, match=r"no folder .*train/images .* must be in .*train/images/ and"):
        survey(root, task="segmentation")
    assert surveyed(root, task="classification").name == "imagefolder"


@pytest.mark.parametrize(("name", "content"), [("a.zip", b"PK\3\4\0\0"), ("train.json", b"{}")])
def test_other_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=r"neither a text nor a list .*; write the folder of the data"):
        survey(tmp_path / name)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UsageError, match=f"{tmp_path}: Permission denied; make it readable"):
        survey(tmp_path)


def test_nothing_is_read_of_other_data_sets(tmp_path: Path) -> None:
    assert survey(tmp_path, name="torchvision/CIFAR10") is None
    assert survey(tmp_path / "absent") is None
