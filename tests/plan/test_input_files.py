"""Fingerprints of data and weights: the same wherever the files are, others where the files are others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan import input_files
from hpc_train.experiment.plan.input_files import DATA, WEIGHTS, fingerprints, other_inputs
from hpc_train.experiment.validate.loading import load
from tests.plan.files import EXPERIMENT

LONG_AGO = 1_600_000_000
#: The part ``files`` of the list in ``folder_of_lists``.
RECORDED_BY_0_2 = "a9fe7e6f92744309fe14957c0e74db43"


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(input_files, "SETTLED_NS", 0)
    forget()
    yield
    forget()


def forget() -> None:
    for remembering in (input_files._fingerprint, input_files._listed, input_files._of_own_data):
        remembering.cache_clear()


def images(root: Path, classes: int = 2, count: int = 6, content: bytes = b"image") -> Path:
    for split in ("train", "val"):
        for number in range(classes):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(count):
                (folder / f"{image}.png").write_bytes(content)
    for folder in [*root.rglob("*"), root]:
        os.utime(folder, (LONG_AGO, LONG_AGO))
    return root


def of(tmp_path: Path, *overrides: str) -> Experiment:
    file = tmp_path / "exp.yaml"
    file.write_text(EXPERIMENT)
    return load(file, overrides, check_names=False).experiment


def of_images(tmp_path: Path, root: Path) -> Any:
    forget()
    return fingerprints(of(tmp_path, f"data={{name: imagefolder, root: {root}, image_size: 8}}")).get(DATA)


def test_a_copy_elsewhere_is_the_same_data(tmp_path: Path) -> None:
    here = images(tmp_path / "here")
    there = shutil.copytree(here, tmp_path / "mnt" / "there")
    found = of_images(tmp_path, here)
    assert set(found) == {"classes", "images", "samples"}
    assert of_images(tmp_path, there) == found


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"classes": 3}, set()),
        ({"count": 7}, {"classes"}),
        ({"content": b"other image"}, {"classes"}),
        ({"content": b"imagf"}, {"classes", "images"}),
    ],
    ids=["a class more", "an image more", "other sizes", "other pixels"],
)
def test_other_images_are_other_data(other: dict[str, Any], same: set[str], tmp_path: Path) -> None:
    one, two = (
        of_images(tmp_path, images(tmp_path / name, **keys)) for name, keys in (("1", {}), ("2", other))
    )
    assert {part for part in one if one[part] == two[part]} == same


def _notes(root: Path) -> None:
    for name in ("README", "train/.DS_Store", "train/class0/index.csv"):
        (root / name).write_text("ours")


def _rename_with_times(root: Path) -> None:
    folder = root / "train" / "class0"
    (folder / "0.png").rename(folder / "9.png")
    os.utime(folder, (LONG_AGO, LONG_AGO))  # as tar and rsync do


def _overwrite(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"imagf")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_notes, set()),
        (_rename_with_times, {"images", "samples"}),
        (lambda root: _overwrite(root / "train/class0/0.png"), {"samples"}),
        (lambda root: _overwrite(root / "val/class1/5.png"), {"samples"}),
    ],
)
def test_changes_below_the_folder(change: Callable[[Path], None], parts: set[str], tmp_path: Path) -> None:
    root = images(tmp_path / "data")
    before = of_images(tmp_path, root)
    change(root)
    after = of_images(tmp_path, root)
    assert {part for part in before if before[part] != after[part]} == parts


def test_only_changed_folders_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = images(tmp_path / "data")
    before = of_images(tmp_path, root)
    walked = []
    walk = input_files._walk
    monkeypatch.setattr(input_files, "_walk", lambda *args: walked.append(args) or walk(*args))
    assert of_images(tmp_path, root) == before and not walked
    (root / "train" / "class0" / "9.png").write_bytes(b"image")
    assert of_images(tmp_path, root) != before and walked


def test_a_folder_that_just_changed_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "SETTLED_NS", 3_000_000_000)
    of_images(tmp_path, images(tmp_path / "data"))
    assert not (tmp_path / "cache").exists()


def test_without_time_only_classes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = images(tmp_path / "data")
    whole = of_images(tmp_path, root)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(input_files, "LIMIT_S", -1.0)
    assert of_images(tmp_path, root) == {"classes": whole["classes"]}


def test_a_damaged_cache_or_that_of_an_earlier_version_is_not_believed(tmp_path: Path) -> None:
    root = images(tmp_path / "data")
    before = of_images(tmp_path, root)
    (file,) = (tmp_path / "cache").glob("data-*.json")
    earlier = json.loads(file.read_text()) | {"version": 1, "fingerprint": {"classes": "a", "images": "b"}}
    for content in ("", "[]", "{}", '{"folders": 3, "fingerprint": {}}', json.dumps(earlier)):
        file.write_text(content)
        assert of_images(tmp_path, root) == before


def test_a_folder_test_counts_where_there_is_no_val(tmp_path: Path) -> None:
    root = images(tmp_path / "data")
    both = of_images(tmp_path, root)
    (root / "val").rename(root / "test")
    before = of_images(tmp_path, root)
    assert set(both) == {"classes", "images", "samples"} and set(before) == {*both, "test"}
    (root / "test" / "class0" / "9.png").write_bytes(b"image")
    after = of_images(tmp_path, root)
    assert {part for part in before if before[part] == after[part]} == {"classes", "images"}


def test_links_that_lead_upwards_are_not_followed_for_ever(tmp_path: Path) -> None:
    root = images(tmp_path / "data")
    for name in ("a", "b", "c"):
        (root / "train" / "class0" / name).symlink_to(root / "train" / "class0")
        (root / "train" / "class1" / name).symlink_to(root / "train")
    assert set(input_files.image_fingerprint(str(root))) == {"classes", "images", "samples"}
    assert len(list(input_files._walk(str(root), ["train"]))) < 60


def test_a_folder_that_is_not_here_says_nothing(tmp_path: Path) -> None:
    assert of_images(tmp_path, tmp_path / "nowhere") is None
    (tmp_path / "empty").mkdir()
    assert of_images(tmp_path, tmp_path / "empty") is None


def test_a_file_of_weights_is_known_by_its_content(tmp_path: Path) -> None:
    found = []
    for name, content in (("a", b"x" * 5_000_000), ("b", b"x" * 5_000_000), ("c", b"x" * 4_999_999 + b"y")):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        found.append(fingerprints(of(tmp_path, f"model.pretrained={path}"))[WEIGHTS])
    assert found[0] == found[1] != found[2]


def test_a_text_is_known_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("one")
    first = input_files._fingerprint(str(tmp_path))
    input_files._fingerprint.cache_clear()
    file.write_text("two")
    assert set(first) == {"train.txt"} and first != input_files._fingerprint(str(tmp_path))


@pytest.mark.parametrize("then", [None, {}, [], "x", {DATA: None}, {DATA: {"other": "part"}}])
def test_what_is_not_known_counts_as_the_same(then: object, tmp_path: Path) -> None:
    root = images(tmp_path / "data")
    experiment = of(tmp_path, f"data={{name: imagefolder, root: {root}, image_size: 8}}")
    now = fingerprints(experiment)
    assert other_inputs(then, now) == other_inputs(now, now) == []
    assert other_inputs({DATA: {"classes": "others"}}, now) == [DATA]


def folder_of_lists(root: Path, pixel: bytes = b"a", label: str = "x") -> Path:
    """Write the files of each data set, always with the same names, sizes and times."""
    for name in ("train/a.png", "train/masks/a.png", "train/images/a.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(pixel * 100)
    (root / "train.csv").write_text(f"path,target\ntrain/a.png,{label}\n")
    (root / "train.json").write_text(json.dumps({"label": label}))
    (root / "train.tar").write_bytes(pixel * 100 + label.encode())
    for path in [*root.rglob("*"), root]:
        os.utime(path, (LONG_AGO, LONG_AGO))
    return root


@pytest.mark.parametrize(
    ("name", "args", "difference"),
    [
        ("image_list", {}, {"label": "y"}),
        ("image_list", {}, {"pixel": b"b"}),
        ("coco", {}, {"label": "y"}),
        ("coco", {}, {"pixel": b"b"}),
        ("segmentation_folder", {"num_classes": 2}, {"pixel": b"b"}),
        ("webdataset", {"train": "train.tar"}, {"label": "y"}),
        ("own:data", {}, {"pixel": b"b"}),
    ],
)
def test_equal_names_sizes_and_times_are_not_the_same_data(
    name: str, args: dict[str, Any], difference: dict[str, Any], tmp_path: Path
) -> None:
    def of_root(root: Path) -> dict[str, dict[str, str]]:
        data = DataConfig(name=name, root=str(root), args=args)
        return fingerprints(of(tmp_path).model_copy(update={"data": data}))

    first = of_root(folder_of_lists(tmp_path / "first"))
    assert other_inputs(first, of_root(folder_of_lists(tmp_path / "copy"))) == []
    assert other_inputs(first, of_root(folder_of_lists(tmp_path / "other", **difference))) == [DATA]


def test_data_of_the_users_own_code_may_gain_files_where_they_are(tmp_path: Path) -> None:
    experiment = of(tmp_path, f"data={{name: 'own:data', root: {folder_of_lists(tmp_path / 'data')}}}")
    before = fingerprints(experiment)
    (tmp_path / "data/cache.npy").write_bytes(b"made by the data set")
    forget()
    assert fingerprints(experiment) != before
    assert other_inputs(before, fingerprints(experiment)) == []


def test_a_run_of_an_earlier_version_is_compared_as_it_was(tmp_path: Path) -> None:
    """Recorded by 0.2: one part ``files``, of the list alone."""
    root = folder_of_lists(tmp_path / "data")
    recorded = {DATA: {"files": "c1b7b8b2"}}
    experiment = of(tmp_path, f"data={{name: image_list, root: {root}, image_size: 8}}")
    assert other_inputs(recorded, fingerprints(experiment, recorded)) == [DATA]
    recorded = {DATA: {"files": fingerprints(experiment, recorded)[DATA]["files"]}}
    assert recorded[DATA]["files"] == RECORDED_BY_0_2
    (root / "train/a.png").write_bytes(b"b" * 100)  # not in that part
    forget()
    assert other_inputs(recorded, fingerprints(experiment, recorded)) == []
    assert set(fingerprints(experiment)[DATA]) == {"content", "samples"}
