from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.plan.input_files import fingerprints, other_inputs
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.building import build_source
from tests.datasets.samples import experiment, image_file, targets_of
from tests.datasets.sources import stand_in_datasets
from tests.datasets.sources.exactness import assert_exact

ANIMALS = ["ant", "bee", "cat"]


@pytest.fixture(params=["stand-in", "datasets"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package itself where it is installed: with pyarrow it takes 400 MB, too much for the dev extra."""
    if request.param == "datasets":
        found = pytest.importorskip("datasets", reason="datasets and pyarrow: too large for the dev extra")
        # Some versions of dill can't hash tables in memory; those that are read from disk have a fingerprint.
        monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", lambda *given: "of the test")
        return found
    monkeypatch.setitem(sys.modules, "datasets", stand_in_datasets)
    return stand_in_datasets


def image(number: int) -> bytes:
    return image_file(7 * number)


def rows(library: Any, numbers: range, **more: list[Any]) -> Any:
    features = {
        "image": library.Image(),
        "animal": library.ClassLabel(names=ANIMALS),
        "name": library.Value("string"),
        "number": library.Value("int64"),
        "weight": library.Value("float32"),
    }
    columns: dict[str, list[Any]] = {
        "image": [{"bytes": image(n), "path": None} for n in numbers],
        "animal": [n % 3 for n in numbers],
        "name": [ANIMALS[n % 3] for n in numbers],
        "number": [n % 4 for n in numbers],
        "weight": [n / 2 for n in numbers],
    }
    return library.Dataset.from_dict(columns | more, features=library.Features(features))


def build(root: Path, name: str = "huggingface", *, download: bool = False, **args: Any) -> DataSource:
    return build_source(DataConfig(name=name, root=str(root), args=args), download=download)


def test_images_are_the_files_and_labels_the_classes(root: Path) -> None:
    source = build(root)
    assert source.val is not None
    assert [split.file_content(n)[0] for split in (source.train, source.val) for n in range(len(split))] == [  # type: ignore[union-attr]
        image(number) for number in range(19)
    ]
    assert targets_of(source.train) == [0, 1, 2] * 4 and targets_of(source.val) == [0, 1, 2] * 2 + [0]
    assert source.info.class_names == tuple(ANIMALS) and source.info.num_classes == 3


def test_targets_of_other_columns(root: Path) -> None:
    names = build(root, target_column="name")
    assert targets_of(names.train) == [0, 1, 2] * 4 and names.info.class_names == tuple(ANIMALS)
    numbers = build(root, target_column="number", val="train")
    assert targets_of(numbers.val) == [0, 1, 2, 3] * 3 and numbers.info.num_classes == 4
    weights = build(root, target_column="weight", target="number")
    assert targets_of(weights.train)[3] == 1.5 and weights.info.num_classes == 1
    assert weights.train.file_content(3)[1].dtype == np.float32  # type: ignore[union-attr]
    assert weights.info.target_shape == names.info.target_shape == ()
    whole = build(root, target_column="number", target="number")
    assert targets_of(whole.train)[3] == 3.0 and whole.info.num_classes == 1
    assert whole.train.file_content(3)[1].dtype == np.float32  # type: ignore[union-attr]


def labelled(library: Any, feature: Any, labels: list[Any]) -> Any:
    """Return rows with an image and a label; ``feature``: the label's, or the names of classes."""
    if isinstance(feature, list):
        feature = library.ClassLabel(names=feature)
    features = library.Features({"image": library.Image(), "label": feature})
    columns = {"image": [{"bytes": image(0), "path": None} for _ in labels], "label": labels}
    return library.Dataset.from_dict(columns, features=features)


def saved(library: Any, root: Path, **splits: Any) -> Path:
    library.DatasetDict(splits).save_to_disk(str(root))
    return root


@pytest.fixture
def root(library: Any, tmp_path: Path) -> Path:
    return saved(
        library, tmp_path / "saved", train=rows(library, range(12)), test=rows(library, range(12, 19))
    )


def test_class_numbers_are_those_of_the_training_datas_names(library: Any, tmp_path: Path) -> None:
    def source(name: str, classes: list[str], labels: list[int]) -> DataSource:
        train, val = labelled(library, ["a", "b", "c"], [0, 1, 2]), labelled(library, classes, labels)
        return build(saved(library, tmp_path / name, train=train, val=val))

    other = source("other", ["c", "a", "b"], [0, 1, 2, -1])
    assert targets_of(other.train) == [0, 1, 2] and targets_of(other.val) == [2, 0, 1, -1]
    assert targets_of(source("fewer", ["a", "c"], [0, 1]).val) == [0, 2]
    with pytest.raises(BadFileError, match=r"^data\.args\.val: .* label has the class 'dog', which .*; save"):
        source("unknown", ["a", "b", "dog"], [0, 1, 2])


def test_prepare_reports_classes_without_samples(
    library: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, val = labelled(library, ["a", "b", "c"], [0, 0, 2]), labelled(library, ["c", "b"], [0, 1])
    build(saved(library, tmp_path / "rare", train=train, val=val), download=True)
    said = "".join(capsys.readouterr())
    assert "data.root: 1 of 3 classes have no training sample: b" in said
    assert "data.root: 1 of 3 classes have no validation sample: a" in said


def test_several_numbers_are_a_target(library: Any, tmp_path: Path) -> None:
    features = library.Features(
        {"image": library.Image(), "corners": library.Sequence(library.Value("int64"))}
    )
    columns = {"image": [{"bytes": image(n), "path": None} for n in range(3)], "corners": [[1, 2]] * 3}
    library.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "corners"))
    source = build(tmp_path / "corners", target_column="corners", target="number")
    assert (source.info.num_classes, source.info.target_shape) == (2, (2,))
    assert targets_of(source.train) == [[1.0, 2.0]] * 3


def test_resume_and_ranks_read_the_same(root: Path) -> None:
    assert_exact(lambda: build(root))


def test_a_single_split_has_no_validation(library: Any, tmp_path: Path) -> None:
    rows(library, range(8)).save_to_disk(str(tmp_path / "one"))
    assert build(tmp_path / "one").val is None


def test_an_image_may_be_a_path(library: Any, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(image(3))
    paths = [{"bytes": None, "path": str(pictures / "a.png")}]
    rows(library, range(1), image=paths).save_to_disk(str(tmp_path / "one"))
    source = build(tmp_path / "one", roots=[str(pictures)])
    assert source.train.file_content(0)[0] == image(3)  # type: ignore[union-attr]
    if library is stand_in_datasets:  # the package copies the file into the Arrow file
        with pytest.raises(BadFileError, match=r"row 0 of .* train .*a\.png', which is not below .*roots"):
            build(tmp_path / "one").train.file_content(0)  # type: ignore[union-attr]


def test_a_row_without_an_image_is_an_error_of_the_sample(library: Any, tmp_path: Path) -> None:
    rows(library, range(2), image=[{"bytes": image(0), "path": None}, None]).save_to_disk(
        str(tmp_path / "one")
    )
    with pytest.raises(ValueError, match="the row has no image"):
        build(tmp_path / "one").train.file_content(1)  # type: ignore[union-attr]


def test_prepare_saves_a_data_set_of_the_hub_once(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(name: str, config: str | None, revision: str | None) -> Any:
        asked.append((name, config, revision))
        return library.DatasetDict({"train": rows(library, range(8))})

    monkeypatch.setattr(library, "load_dataset", load)
    root, name = tmp_path / "hub", "huggingface/someone/animals"
    with pytest.raises(BadFileError, match=r"^data\.root: .*hub is not a folder .*; run `hpc-train prepare`"):
        build(root, name)
    for download in (True, True, False):
        assert len(build(root, name, download=download, revision="v1").train) == 8
    assert asked == [("someone/animals", None, "v1")]
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_download_that_fails_leaves_nothing(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("BuilderConfig 'x' not found")

    monkeypatch.setattr(library, "load_dataset", fail)
    with pytest.raises(BadFileError, match=r"^data\.name: .*/a can't be loaded: BuilderConfig 'x' not"):
        build(tmp_path / "hub", "huggingface/a", download=True, config="x")
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_is_that_of_the_arrow_files(library: Any, root: Path, tmp_path: Path) -> None:
    def of(root: Path) -> Any:
        return experiment(name="huggingface", root=str(root))

    before = fingerprints(of(root))
    assert list(before) == ["data.root"]
    rows(library, range(3)).save_to_disk(str(tmp_path / "other"))
    assert other_inputs(before, fingerprints(of(root))) == []
    assert other_inputs(before, fingerprints(of(tmp_path / "other"))) == ["data.root"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"train": "training"}, r"^data\.args\.train: .* has no split 'training'; write one of train, test"),
        ({"val": "dev"}, r"^data\.args\.val: .* has no split 'dev'"),
        ({"image_column": "img"}, r"^data\.args\.image_column: .* no column 'img'; write one of image"),
        ({"image_column": "name"}, r"^data\.args\.image_column: the column name has no images"),
        ({"target_column": "x"}, r"^data\.args\.target_column: there is no column 'x'"),
        ({"target_column": "weight"}, r"^data\.args\.target_column: the column weight .* has no classes"),
        ({"split": "x"}, r"^data\.args\.split: huggingface takes no argument 'split'"),
    ],
)
def test_wrong_arguments_are_named(root: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFileError, match=words):
        build(root, **args)


def test_what_is_not_saved_by_the_library_is_refused(library: Any, tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"^data\.root: .* has no data set of .*: .*save_to_disk"):
        build(tmp_path)
    with pytest.raises(BadFileError, match=r"^data\.root: .*nowhere is not a folder on this machine; fix"):
        build(tmp_path / "nowhere")


def test_without_its_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadFileError, match=r"^data\.name: .* needs datasets; pip install 'hpc-train\[hf\]'"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "train", "val", "words"),
    [
        ("string", ["a", "b"], ["a", "z"], r"row 1 of the split val .* 'z', .*training samples \(a, b"),
        ("int64", [0, 1], [0, 5], r"row 1 of the split val .* has '5' in label, a class that the train"),
        ("int64", [0, -1], [0], r"row 1 of the split train .* has '-1' in label, not a class number"),
        ("int64", [0, 10**12], [0], r"has '1000000000000' in label, not a class number, 0 to 16777215"),
        ("int64", [0, None], [0], r"row 1 of the split train .* has no label; fill it in"),
        ("float64", [0.0, float("nan")], [0.0], r"row 1 of .* train .*'nan' in label, .*missing label"),
        ("string", ["a", ""], ["a"], r"row 1 of the split train .* has no label"),
        ("binary", [b"a", b"b"], [b"a"], r"row 0 of the split train .* in label, not a class but bytes"),
    ],
)
def test_a_wrong_label_is_named_with_its_row(
    library: Any, tmp_path: Path, dtype: str, train: list[Any], val: list[Any], words: str
) -> None:
    train, val = (labelled(library, library.Value(dtype), labels) for labels in (train, val))
    root = saved(library, tmp_path / "saved", train=train, val=val)
    with pytest.raises(BadFileError, match=words):
        build(root)


def test_prepare_finds_rows_without_a_label(library: Any, tmp_path: Path) -> None:
    labels = {"train": [0, 1], "test": [-1, 0], "other": [0]}
    splits = {name: labelled(library, ANIMALS, values) for name, values in labels.items()}
    root = saved(library, tmp_path / "saved", **splits)
    with pytest.raises(BadFileError, match=r"row 0 of the split test .* has '-1' in label, .*missing label"):
        build(root, download=True)
    config = DataConfig(name="huggingface", root=str(root), on_bad_sample="skip")
    assert build_source(config, download=True).info.num_classes == 3
    numbers = saved(library, tmp_path / "n", train=labelled(library, library.Value("float64"), [0.5, 1e300]))
    with pytest.raises(BadFileError, match=r"row 1 of .* train .*, not a number that float32 can hold"):
        build(numbers, download=True, target="number")


def test_splits_with_other_features_are_refused(library: Any, tmp_path: Path) -> None:
    train, val = labelled(library, ["a", "b"], [0, 1]), labelled(library, library.Value("int64"), [1])
    root = saved(library, tmp_path / "saved", train=train, val=val)
    with pytest.raises(BadFileError, match="label has class labels in train and int in val; save both"):
        build(root)


def test_a_saved_format_is_reset_and_unused_splits_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("datasets", reason="datasets and pyarrow: too large for the dev extra")
    monkeypatch.setattr("datasets.arrow_dataset.generate_fingerprint", lambda *given: "of the test")
    for kind in ("torch", "numpy", "pandas", "arrow"):
        train = labelled(library, ["a", "b"], [0, 1]).with_format(kind, columns=["label"])
        source = build(saved(library, tmp_path / kind, train=train, more=train), download=True)
        assert source.train.file_content(1) == (image(0), 1)  # type: ignore[union-attr]
        assert "splits that are not read: more" in capfd.readouterr().err
    build(tmp_path / "torch", download=True, val="train")
    assert "train and val are both the split train" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["../other.arrow", "/etc/passwd", "pipe"])
def test_a_data_set_consists_of_regular_files_below_its_root(tmp_path: Path, name: str) -> None:
    pytest.importorskip("datasets", reason="datasets and pyarrow: too large for the dev extra")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(BadFileError, match=r"^data\.root: .*(names the file|is a named pipe)"):
        build(tmp_path)
    (tmp_path / "state.json").write_text("[" * 100_000)
    with pytest.raises(BadFileError, match=r"state\.json is damaged .*; write the data set again"):
        build(tmp_path)
