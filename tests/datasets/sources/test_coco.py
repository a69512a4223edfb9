from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.experiment.plan import input_files
from hpc_train.experiment.plan.input_files import other_inputs
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.images import PixelRules
from hpc_train.training.datasets.reading import Failure, SlotReader
from hpc_train.training.datasets.sampler import Slot
from hpc_train.training.datasets.targets import TargetCheck
from tests.datasets.coco import SIDE, read, write, write_coco
from tests.datasets.samples import experiment

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_coco(tmp_path / "coco")


Change = Callable[[dict[str, Any]], object]


def change(root: Path, act: Change) -> dict[str, Any]:
    """Change the training annotations; return them."""
    document = read(root)
    act(document)
    write(root, "train", document)
    return document


def build(root: Path, **args: Any) -> DataSource:
    return build_source(DataConfig(name="coco", root=str(root), args=args))


def target(source: DataSource, index: int) -> dict[str, Any]:
    split: Any = source.train
    found: dict[str, Any] = split.file_content(index)[1]
    return found


def test_targets_are_the_annotations_of_each_image(root: Path) -> None:
    source, document = build(root), read(root)
    assert (len(source.train), source.val and len(source.val)) == (8, 5)
    assert source.info.num_classes == 2 and source.info.class_names == ("dark", "bright")
    for index, image in enumerate(document["images"]):
        own = [each for each in document["annotations"] if each["image_id"] == image["id"]]
        found = target(source, index)
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in own)]
        assert found["boxes"].tolist() == boxes and found["boxes"].dtype == np.float32
        assert found["boxes"].shape == (index % 3, 4), "images without boxes are samples too"
        assert found["labels"].tolist() == [{3: 1, 7: 2}[each["category_id"]] for each in own]
        assert found["iscrowd"].tolist() == [0] * len(own) and found["image_id"] == image["id"]


def test_the_number_of_samples_is_known_without_torch(root: Path) -> None:
    config = DataConfig(name="coco", root=str(root))
    assert training_samples(config) == 8
    (root / "train.json").write_text("{")
    assert training_samples(config) is None
    (root / "train.json").unlink()
    os.mkfifo(root / "train.json")
    assert training_samples(config) is None


def test_changed_annotations_are_other_data(root: Path) -> None:
    config = experiment(name="coco", root=str(root))
    then = input_files.fingerprints(config)
    change(root, lambda d: d["annotations"][0]["bbox"].__setitem__(2, 1))
    input_files._fingerprint.cache_clear()
    assert other_inputs(then, input_files.fingerprints(config)) == ["data.root"]


def test_boxes_are_clipped_by_a_rounded_pixel(root: Path) -> None:
    document = change(root, box(SIDE - 4, -0.6, 4.7, 8))
    place = [each["id"] for each in document["images"]].index(document["annotations"][0]["image_id"])
    assert target(build(root), place)["boxes"][0].tolist() == [SIDE - 4, 0, SIDE, pytest.approx(7.4)]


def box(*bbox: float) -> Change:
    return lambda document: document["annotations"][0].update(bbox=bbox)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (box(20, 0, 20, 4), r"annotation 106 of image 70, .* outside of its 32x32 pixels; fix it"),
        (box(1, 1, 0, 4), r"annotation 106 of image 70, .* without area; .* data\.args: \{bad_boxes: drop\}"),
        (box(1, 1, 4), r"annotation 106 of .*; write \[left, top, width, height\] in pixels"),
        (box(1, 1, float("nan"), 4), r"annotation 106 of .*; write \[left, top, width, height\] in pixels"),
        (
            lambda d: [entry.update(bbox=[0.1, 0.2, 0.5, 0.5]) for entry in d["annotations"]],
            r"annotation 106 of .* a fraction of the image .*; write \[left, top, width, height\] in pixels",
        ),
        (lambda d: d["annotations"][0].update(category_id=4), "annotation 106 of .* category_id 4; add the"),
        (lambda d: d["annotations"][0].update(image_id=5), "annotation 106 of image 5, which is none of its"),
        (lambda d: d["images"][0].update(file_name="x.png"), r"image 0, whose .*/x\.png does not exist"),
        (lambda d: d["images"][1].update(id=0), r"image \{'id': 0,.*; give each an id of its own"),
        (lambda d: d["images"][0].pop("width"), "image 0 without file_name, width and height; write them"),
        (lambda d: d["categories"][0].update(id=3), "category .*; give each an id of its own"),
        (lambda d: d["categories"].clear(), "no categories; write"),
        (lambda d: d["annotations"][0].update(iscrowd="0"), "annotation 106 of .* iscrowd '0'; write 0 or 1"),
        (box(1, 1, 10**400, 4), r"annotation 106 of .*; write \[left, top, width, height\] in pixels"),
        (lambda d: d["images"][0].update(width=10**400), r"image 0 of 10+ x 32 pixels \(width x height\)"),
        (
            lambda d: d["images"][0].update(width=32.0),
            r"image 0 of 32\.0 x 32 pixels .*; write whole numbers",
        ),
        (
            lambda d: [entry.update(bbox=[3, 4, 20, 20], area=17 * 16) for entry in d["annotations"]],
            r"annotation 106 of .* area 272, which is that of left, top, right, bottom, .*; write \[left",
        ),
        (
            lambda d: [entry.update(bbox=[3, 4, 30, 31]) for entry in d["annotations"]],
            r"annotation 106 of .* pixels; all boxes of the file would fit as left, top, right, bottom",
        ),
        (lambda d: d["images"][1].update(id=10**20), r"image \{'id': 10+,.*; give each an id"),
        (lambda d: d["categories"][0].update(name="\ud800"), "category .*; give each an id of its own"),
        (lambda d: d.pop("images"), "no list 'images'; write it in the format of COCO"),
    ],
)
def test_a_mistake_is_named_with_file_image_and_annotation(root: Path, act: Change, said: str) -> None:
    change(root, act)
    with pytest.raises(BadFileError, match=rf"^data\.root: .*/train\.json has (the )?{said}"):
        build(root)


def test_bad_boxes_can_be_dropped(root: Path) -> None:
    change(root, box(1, 1, 0, 4))
    document = change(root, lambda d: d["annotations"][1].update(bbox=[20, 0, 20, 4]))
    source = build(root, bad_boxes="drop")
    assert sum(len(target(source, index)["labels"]) for index in range(8)) == len(document["annotations"]) - 2


def test_damaged_or_missing_files_and_other_categories_are_refused(root: Path) -> None:
    text = (root / "val.json").read_text()
    (root / "val.json").write_text(text[:50])
    with pytest.raises(BadFileError, match=r"^data\.root: .*/val\.json is not valid JSON .*; write it again"):
        build(root)
    for old, new, key in (
        ('{"images"', '{"categories": [], "images"', "categories"),
        ('"bbox"', '"bbox": [0, 0, 1, 1], "bbox"', "bbox"),
    ):
        assert old in text
        (root / "val.json").write_text(text.replace(old, new, 1))
        with pytest.raises(BadFileError, match=rf"val\.json is not valid JSON \(.*the key '{key}' twice\)"):
            build(root)
    (root / "val.json").write_text(text.replace("bright", "light"))
    with pytest.raises(BadFileError, match=r"^data\.root: the categories in .*val\.json differ from"):
        build(root)
    (root / "val.json").unlink()
    assert build(root).val is None
    (root / "train.json").unlink()
    with pytest.raises(BadFileError, match=r"^data\.root: .*/coco contains no train\.json; write the folder"):
        build(root)


def test_the_index_that_prepare_writes_gives_the_same_as_the_files(root: Path, tmp_path: Path) -> None:
    data = DataConfig(name="coco", root=str(root), cache=str(tmp_path / "index"))
    parsed = build_source(data)
    assert not (tmp_path / "index").exists()
    prepared = build_source(data, download=True)
    assert len(list((tmp_path / "index").glob("*.index"))) == 1
    (root / "val" / "0.png").unlink()  # seen by who parses the files
    opened = build_source(data)
    assert parsed.info == prepared.info == opened.info
    for name in ("train", "val"):
        splits: list[Any] = [getattr(source, name) for source in (parsed, prepared, opened)]
        assert len({len(split) for split in splits}) == 1
        for index in range(len(splits[0])):
            paths = {split.path(index) for split in splits}
            expected, *others = (split.target(index) for split in splits)
            assert len(paths) == 1
            for key, value in expected.items():
                assert all(np.array_equal(other[key], value) for other in others)
                assert {other[key].dtype for other in others} == {value.dtype}


def test_changed_or_missing_annotations_are_not_those_of_the_index(root: Path, tmp_path: Path) -> None:
    data = DataConfig(name="coco", root=str(root), cache=str(tmp_path / "index"))
    build_source(data, download=True)
    (root / "val.json").unlink()
    assert build_source(data).val is None
    change(root, lambda d: d["images"][0].update(file_name="missing.png"))
    with pytest.raises(BadFileError, match=r"missing\.png does not exist"):
        build_source(data)


def test_the_index_is_a_few_arrays(root: Path) -> None:
    """Lists of Python objects would be copied into each loader process as their references are counted."""
    split: Any = build(root).train
    held = split._arrays.values()
    assert all(isinstance(each, np.ndarray) and each.dtype != object for each in held)
    assert not any(isinstance(each, (list, dict, torch.Tensor)) for each in held)


@pytest.mark.parametrize("name", ["../val/0.png", "/etc/passwd", "a\0.png", "\ud800.png", "a" * 5000])
def test_a_name_of_a_file_elsewhere_is_refused(root: Path, name: str) -> None:
    change(root, lambda d: d["images"][0].update(file_name=name))
    with pytest.raises(BadFileError, match=r"^data\.root: .*/train\.json, image 0 names the file .*, which "):
        build(root)


def test_files_behind_a_link_and_below_the_roots_are_read(root: Path, tmp_path: Path) -> None:
    (root / "train").rename(tmp_path / "store")
    (root / "train").mkdir()
    (root / "train" / "part").symlink_to(tmp_path / "store")
    document = read(root)
    for number, image in enumerate(document["images"]):
        image["file_name"] = f"part/{number}.png" if number else f"{tmp_path}/store/0.png"
    write(root, "train", document)
    split: Any = build(root, roots=[str(tmp_path / "store")]).train
    assert all(split.file_content(index)[0] for index in range(8))


def test_an_image_of_another_size_than_its_annotations_is_an_error(root: Path) -> None:
    change(root, lambda d: d["images"][5].update(width=64, height=48))
    words = r"32x32 pixels, and .*train\.json, image 50 has 64x48 \(perhaps it was resized after it was annot"
    config = DataConfig(name="coco", root=str(root))
    with pytest.raises(BadFileError, match=rf"^data: .*/train/5\.png has {words}"):
        build_source(config, download=True)
    assert re.search(words, failure_of(config, 5))
    Image.new("RGB", (48, 64)).save(root / "train" / "5.png")
    with pytest.raises(BadFileError, match="perhaps the EXIF orientation was applied"):
        build_source(config, download=True)
    build_source(config.model_copy(update={"on_bad_sample": "skip"}), download=True)


def failure_of(config: DataConfig, index: int) -> str:
    """Return the message of the error as which a rank reads a training sample; empty if it can be read."""

    def ready(inputs: Any, targets: Any, slot: Slot) -> tuple[Any, Any]:
        return inputs, targets

    train = build_source(config).train
    reader = SlotReader(train, 3, 0, ready, TargetCheck("detection"), rules=PixelRules.of(config))
    read = reader.__getitems__(Slot(0, 0, 0, 0, 1.0, torch.tensor([index]), 1))
    return read.message if isinstance(read, Failure) else ""


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_the_size_is_compared_after_the_orientation_is_applied(file_format: str, root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (48, 64)).save(root / "train/5.png", file_format, exif=exif)
    config = DataConfig(name="coco", root=str(root))
    for (width, height), fitting in (((64, 48), "apply"), ((48, 64), None)):
        change(root, lambda d: d["images"][5].update(width=width, height=height))
        for orientation in ("apply", None):
            data = config.model_copy(update={"exif_orientation": orientation})
            if orientation == fitting:
                build_source(data, download=True)
                assert failure_of(data, 5) == ""
            else:
                with pytest.raises(BadFileError, match=r"see data\.exif_orientation"):
                    build_source(data, download=True)
                assert "see data.exif_orientation" in failure_of(data, 5)


def test_an_image_with_too_many_pixels_is_reported_by_its_reader(root: Path) -> None:
    data = DataConfig(name="coco", root=str(root), max_image_pixels=SIDE * SIDE - 1)
    build_source(data, download=True)
    assert "data.max_image_pixels is 1023" in failure_of(data, 5)


def share_a_folder(root: Path) -> None:
    """Make val a link to train, with one image in both files."""
    shutil.rmtree(root / "val")
    (root / "val").symlink_to("train")
    document = read(root)
    write(root, "val", document | {"images": document["images"][6:], "annotations": []})
    change(root, lambda d: d.update(images=d["images"][:7]))
    change(root, lambda d: d.update(annotations=[a for a in d["annotations"] if a["image_id"] < 70]))


@pytest.mark.parametrize(
    ("act", "keys", "printed"),
    [
        (
            lambda root: change(
                root, lambda d: (d["annotations"].append(d["annotations"][0]), d["images"].pop(6))
            ),
            {},
            [
                r"1 image below \S+/coco/train is in no list: 6\.png",
                "train.json has 1 annotation more than once",
            ],
        ),
        (lambda root: (root / "test.json").touch(), {}, [r"test\.json in \S+/coco is not read"]),
        (lambda root: (root / "valid.json").touch(), {}, [r"valid\.json in \S+/coco is not read"]),
        (
            lambda root: change(root, box(1, 1, 0, 4)),
            {"args": {"bad_boxes": "drop"}},
            [r"train\.json: 1 of 7 boxes are dropped, .* \(first: the annotation 106\)$"],
        ),
        (
            lambda root: change(root, lambda d: d["annotations"][2].update(ignore=1)),
            {},
            [r"train\.json has 1 annotation with the key ignore, which is not read; .* write iscrowd: 1"],
        ),
        (share_a_folder, {}, [r"val\.json and train\.json both name 1 file: 6\.png"]),
        (
            lambda root: change(root, box(1, 1, 1.5, 9)),
            {"image_size": SIDE // 2},
            [r"data\.image_size: 1 of the 7 training boxes have a side of less than 1 pixel"],
        ),
        (lambda root: change(root, box(1, 1, 1.5, 9)), {"image_size": SIDE}, []),
    ],
)
def test_prepare_prints_what_is_not_read_or_differs(
    root: Path,
    capfd: pytest.CaptureFixture[str],
    act: Callable[[Path], object],
    keys: dict[str, Any],
    printed: list[str],
) -> None:
    act(root)
    build_source(DataConfig(name="coco", root=str(root), **keys), download=True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "the index" not in line]
    remarks = [line for line in lines if "classes have no" not in line]
    assert len(remarks) == len(printed), remarks
    assert all(re.search(words, line) for words, line in zip(printed, remarks, strict=True)), remarks
