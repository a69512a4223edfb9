from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.experiment.data_facts.listed_data import (
    INDEX_LENGTH,
    INDEX_MAGIC,
    header_digest,
    image_list_files,
    index_path,
)
from hpc_train.experiment.plan.input_files import fingerprints, other_inputs
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.index_files import Index, Layout, ensure_index, open_index, packed_texts
from hpc_train.training.datasets.sources import image_list
from tests.datasets.samples import experiment, targets_of
from tests.datasets.sources.exactness import assert_exact

ANIMALS = ("cat", "ant", "bee")
LAYOUT = Layout(frozenset({"train", "val"}), image_list.ARRAYS)


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve training and seven validation images; image n has the value n, class n modulo 3."""
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    for number in range(19):
        image = Image.fromarray(np.full((6, 8, 3), number, dtype=np.uint8))
        image.save(root / "images" / f"{number}.{'png' if number % 2 else 'jpg'}")
    write(root, "train", range(12))
    write(root, "val", range(12, 19))
    return root


def file_of(number: int) -> str:
    return f"images/{number}.{'png' if number % 2 else 'jpg'}"


def write(root: Path, split: str, numbers: range, text: str = "path,target,x,y\n") -> None:
    lines = [f"{file_of(n)},{ANIMALS[n % 3]},{n / 4},{n % 2}\n" for n in numbers]
    (root / f"{split}.csv").write_text(text + "".join(lines))


def config(root: Path, cache: Path | None = None, **args: Any) -> DataConfig:
    keys = {"cache": None if cache is None else str(cache)}
    return DataConfig(name="image_list", root=str(root), args=args, **keys)  # type: ignore[arg-type]


def build(root: Path, *, download: bool = False, **args: Any) -> DataSource:
    return build_source(config(root, **args), download=download)


def test_rows_keep_their_order_and_classes_are_sorted(root: Path) -> None:
    source = build(root)
    assert source.info.class_names == ("ant", "bee", "cat")
    assert source.info.num_classes == 3
    assert targets_of(source.train) == [2, 0, 1] * 4
    assert targets_of(source.val) == [2, 0, 1] * 2 + [2]
    content, _ = source.train.file_content(3)  # type: ignore[union-attr]
    assert Image.open(io.BytesIO(content)).getpixel((0, 0)) == (3, 3, 3)
    assert source.train.path(4) == root / "images/4.jpg"  # type: ignore[union-attr]


def test_numbers_are_sorted_by_size_or_taken_as_they_are(root: Path) -> None:
    for name in ("train", "val"):
        (root / f"{name}.csv").write_text(f"path,target\n{file_of(1)},10\n{file_of(2)},9\n{file_of(3)},1\n")
    assert build(root).info.class_names == ("1", "9", "10")
    assert targets_of(build(root).train) == [2, 1, 0]
    given = build(root, num_classes=12)
    assert targets_of(given.train) == [10, 9, 1] and given.info.num_classes == 12
    with pytest.raises(BadFileError, match=r"train\.csv:2 has the class '10', .*those of data\.args \(0, 1"):
        build(root, num_classes=10)
    assert targets_of(build(root, classes=["9", "10", "1"]).train) == [1, 0, 2]


def test_several_numbers_and_several_classes(root: Path) -> None:
    numbers = build(root, target="number", target_column=["x", "y"])
    assert numbers.info.num_classes == 2 and numbers.info.class_names == ("x", "y")
    assert numbers.info.target_shape == (2,) and build(root).info.target_shape == ()
    assert targets_of(numbers.train)[5] == [1.25, 1.0]
    assert numbers.train.file_content(0)[1].dtype == np.float32  # type: ignore[union-attr]
    one = build(root, target="number", target_column="x")
    assert targets_of(one.train)[6] == 1.5 and one.info.num_classes == 1 and one.info.target_shape == ()
    several = build(root, target="classes", target_column=["y"])
    assert targets_of(several.train)[:2] == [[0.0], [1.0]] and several.info.target_shape == (1,)


def test_tabs_a_byte_order_mark_and_line_ends_in_cells(root: Path) -> None:
    text = f'\ufefftarget\tpath\r\n"an\nt"\t{file_of(1)}\r\n\r\nbee\t{file_of(2)}\r\n'
    (root / "list.tsv").write_bytes(text.encode())
    source = build(root, train="list.tsv")
    assert source.info.class_names == ("an\nt", "bee") and source.val is None
    assert [source.train.path(index).name for index in range(2)] == ["1.png", "2.jpg"]  # type: ignore[union-attr]


def test_resume_and_ranks_read_the_same(root: Path) -> None:
    build(root, download=True)
    assert_exact(lambda: build(root))


def test_the_index_equals_the_list(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = config(root, tmp_path / "index")
    read = build_source(cached)
    assert not (tmp_path / "index").exists()
    prepared = build_source(cached, download=True)
    assert len(list((tmp_path / "index").glob("*.index"))) == 1
    monkeypatch.setattr(image_list, "_parsed", lambda *args: pytest.fail("parsed again"))
    opened, again = build_source(cached), build_source(cached, download=True)
    for source in (prepared, opened, again):
        assert source.info == read.info
        for ours, theirs in ((source.train, read.train), (source.val, read.val)):
            pairs = [ours.file_content(index) for index in range(len(ours))]  # type: ignore[union-attr, arg-type]
            assert pairs == [theirs.file_content(index) for index in range(len(theirs))]  # type: ignore[union-attr, arg-type]


def test_a_damaged_or_outdated_index_is_not_used(root: Path) -> None:
    build(root, download=True)
    data = config(root)
    path = index_path(data, image_list_files(data))
    content = path.read_bytes()
    for damaged in (content[:-1], content[:20], b"", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        assert open_index(data, image_list_files(data), LAYOUT) is None
        assert len(build(root).train) == 12
    path.write_bytes(content)
    write(root, "train", range(11))
    assert len(build(root).train) == 11 == training_samples(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], str]) -> None:
    """Change the header of an index, and give it the right hash."""
    content = path.read_bytes()
    begin = len(INDEX_MAGIC) + INDEX_LENGTH.size
    nbytes, _ = INDEX_LENGTH.unpack(content[len(INDEX_MAGIC) : begin])
    text = change(json.loads(content[begin : begin + nbytes])).encode()
    start = INDEX_MAGIC + INDEX_LENGTH.pack(len(text), header_digest(text))
    path.write_bytes(start + text + content[begin + nbytes :])


def without(header: dict[str, Any], split: str, array: str = "") -> str:
    """Return the header without a split, or without one of its arrays."""
    del (header["splits"][split]["arrays"] if array else header["splits"])[array or split]
    return json.dumps(header)


def changed(header: dict[str, Any], array: str, **values: Any) -> str:
    header["splits"]["train"]["arrays"][array].update(values)
    return json.dumps(header)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: changed(header, "targets", offset=-8),
        lambda header: changed(header, "targets", offset=1 << 62),
        lambda header: changed(header, "targets", nbytes=-1),
        lambda header: changed(header, "targets", nbytes=1 << 62),
        lambda header: changed(header, "targets", shape=[1 << 62]),
        lambda header: changed(header, "targets", shape=[-1]),
        lambda header: changed(header, "targets", shape=[2, 6]),
        lambda header: changed(header, "targets", shape=[12] + [1] * 100),
        lambda header: changed(header, "targets", shape=12),
        lambda header: changed(header, "targets", dtype="<f8"),
        lambda header: changed(header, "targets", dtype="|O"),
        lambda header: changed(header, "lines", dtype="<f8"),
        lambda header: changed(header, "targets", xxh3_128=None),
        lambda header: json.dumps(header).replace('"offset": 0', '"offset": ' + "9" * 5000),
        lambda header: json.dumps(header | {"facts": {"remarks": 1}}),
        lambda header: json.dumps(header | {"splits": {}}),
        lambda header: json.dumps(header | {"class_names": [1]}),
        lambda header: json.dumps(header["splits"]["train"]),
        lambda _: "[" * 100_000,
        lambda _: "1",
        lambda header: without(header, "train"),
        lambda header: without(header, "val"),
        lambda header: without(header, "train", "targets"),
        lambda header: without(header, "train", "lines"),
        lambda header: without(header, "val", "bytes"),
    ],
)
def test_an_absurd_header_is_a_damaged_index(root: Path, change: Callable[[dict[str, Any]], str]) -> None:
    """Its hash is right: someone else may have written it."""
    build(root, download=True)
    data = config(root)
    path = index_path(data, image_list_files(data))
    content = path.read_bytes()
    rewrite(path, change)
    assert open_index(data, image_list_files(data), LAYOUT) is None
    assert len(build(root).train) == 12, "from the list"
    build(root, download=True)
    assert path.read_bytes() == content, "written again"


def test_samples_are_counted_without_torch_by_the_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert training_samples(config(root)) == 12
    build(root, download=True)
    monkeypatch.setattr("csv.reader", lambda *args, **kwargs: pytest.fail("counted again"))
    assert training_samples(config(root)) == 12
    assert training_samples(config(root / "nowhere")) is None
    assert training_samples(config(root, target="x")) is None
    os.mkfifo(root / "pipe.csv")
    assert training_samples(config(root, train="pipe.csv")) is None


def test_the_fingerprint_is_that_of_the_lists(root: Path) -> None:
    def of(**args: Any) -> Experiment:
        return experiment(name="image_list", root=str(root), args=args)

    before = fingerprints(of())
    assert str(root) not in str(before)
    (root / "images/0.jpg").touch()
    assert other_inputs(before, fingerprints(of())) == []
    assert other_inputs(before, fingerprints(of(train="val.csv"))) == ["data.root"]


def test_a_million_rows_open_from_their_index(root: Path, tmp_path: Path) -> None:
    """The arrays are all that a rank keeps of them: under 80 bytes per sample."""
    count = 1_000_000
    names = [b"folder/%07d.jpg" % number for number in range(count)]
    arrays = packed_texts(names) | {"lines": np.arange(count), "targets": np.arange(count) % 10}
    data, files = config(root, tmp_path), image_list_files(config(root))
    ensure_index(data, files, LAYOUT, lambda: Index({"train": arrays, "val": arrays}, ("a",)))
    opened = open_index(data, files, LAYOUT)
    assert opened is not None
    assert all(isinstance(array, np.ndarray) for array in opened.splits["train"].values())
    assert sum(array.nbytes for array in opened.splits["train"].values()) < 80 * count
    split = image_list.ListedImages(root, files[0], dict(opened.splits["train"]), 3)
    assert len(split) == count and split.path(count - 1) == root / "folder/0999999.jpg"
    assert training_samples(data) == count


@pytest.mark.parametrize(
    ("lines", "args", "words"),
    [
        ("", {}, r"^data\.args\.path_column: .*train\.csv has no column 'path' \(its header: nothing\)"),
        ("file,target\n", {}, r"^data\.args\.path_column: .* \(its header: file, target\); write one"),
        ("path,target,target\n", {}, r"^data\.args\.target_column: .* has twice the column 'target'"),
        ("path,target\n", {}, r"^data\.root: .*train\.csv has no rows below its header"),
        ("path,target\na,b\nc\n", {}, r"train\.csv:3 has 1 cells, and the header 2; fix the row"),
        ("path,target\n,b\n", {}, r"train\.csv:2 has no path; fill it in, or remove the row"),
        ("path;target\na;b\n", {}, r"has cells separated by semicolons; write it with commas"),
        ("path\ttarget\na\tb\n", {}, r"has cells separated by tabs; write it with commas"),
        ("path, target\na, b\n", {}, r"has blanks around 'target' in its header; remove the blanks"),
        ("0.jpg,cat\n1.jpg,dog\n", {}, r"has no header, but 0.jpg, cat; add the line path,target"),
        ("# by me\npath,target\na,b\n", {}, r"begins with a comment; remove the lines above"),
        ("path,target\nhttps://a.b/0.jpg,b\n", {}, r"train\.csv:2 names .* is a URL; download the files"),
        ("path,target\na,\n", {}, r"train\.csv:2 has no target; fill it in"),
        ('path,target\na,"b\n', {}, r"train\.csv:\d: unexpected end of data; fix the row"),
        ("path,target\na,b\n", {"target": "number"}, r"train\.csv:2 has 'b' in target, not a number"),
        ("path,target\na,nan\n", {"target": "number"}, r"train\.csv:2 has 'nan' in target, not a number"),
        ("path,target\na,2\n", {"target": "classes"}, r"train\.csv:2 has '2' in target, .* needs 0 or 1"),
        ("path,target\na,b\n", {"classes": ["c"]}, r"train\.csv:2 has the class 'b', .* \(c\); fix it"),
        ("path,target\na,b\n", {}, r"val\.csv:2 has the class 'cat', .*the training samples \(b\)"),
        ("path,target\n", {"target_column": ["a", "b"]}, r"^data\.args\.target_column: 2 columns are not"),
        ("path,target\n", {"classes": ["a", "a"]}, r"^data\.args\.classes: names a class twice"),
        ("path,target\n", {"classes": ["a"], "num_classes": 1}, r"^data\.args\.num_classes: follows from"),
        ("path,target\n", {"classes": ["a"], "target": "number"}, r"^data\.args\.classes: .*take it out"),
        ("path,target\n", {"train": "list.txt"}, r"^data\.args\.train: list.txt is not a \.csv, \.tsv or"),
        ("path,target\n", {"val": "none.csv"}, r"none\.csv is not a file .* the list in data\.args\.val"),
        ("path,target\n", {"path_colum": "x"}, r"^data\.args\.path_colum: .*; did you mean 'path_column'"),
    ],
)
def test_a_bad_list_is_named_with_its_line(root: Path, lines: str, args: dict[str, Any], words: str) -> None:
    (root / "train.csv").write_text(lines)
    with pytest.raises(BadFileError, match=words):
        build(root, **args)


def test_a_list_that_is_not_text_is_refused(root: Path) -> None:
    (root / "train.csv").write_bytes(b"path,target\n\xff,a\n")
    with pytest.raises(BadFileError, match=r"train\.csv is not UTF-8 text \(.*byte\); convert it"):
        build(root)


def test_a_missing_image_is_named_with_file_and_line(root: Path) -> None:
    (root / file_of(5)).unlink()
    source = build(root)
    with pytest.raises(FileNotFoundError, match=rf"named in {root}/train\.csv:7\): '{root}/images/5\.png'"):
        source.train.file_content(5)  # type: ignore[union-attr]


def test_parquet_without_its_package_names_the_extra(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "train.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadFileError, match=r"needs pyarrow; pip install 'hpc-train\[parquet\]', or convert"):
        build(root, train="train.parquet")


def test_parquet_gives_the_same_as_csv(root: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow takes 170 MB: not in the dev extra")
    from pyarrow import parquet

    for split, numbers in (("train", range(12)), ("val", range(12, 19))):
        table = {"path": list(map(file_of, numbers)), "target": [ANIMALS[n % 3] for n in numbers]}
        parquet.write_table(pyarrow.table(table), root / f"{split}.parquet", row_group_size=5)
    (text, rows) = build(root), build(root, train="train.parquet")
    assert rows.info == text.info
    for ours, theirs in ((rows.train, text.train), (rows.val, text.val)):
        assert targets_of(ours) == targets_of(theirs)
        assert [ours.path(n) for n in range(7)] == [theirs.path(n) for n in range(7)]  # type: ignore[union-attr]
    parquet.write_table(pyarrow.table({"path": ["a", None], "target": [1, 2]}), root / "train.parquet")
    with pytest.raises(BadFileError, match=r"train\.parquet:2 has no path"):
        build(root, train="train.parquet")
    (root / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadFileError, match=r"train\.parquet is not a readable Parquet file"):
        build(root, train="train.parquet")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["a", "nan"], r"train\.csv:3 has 'nan' in target, not a class but a missing label; fill it in"),
        (["a", "<NA>"], r"train\.csv:3 has '<NA>' in target, .*data\.args\.classes"),
        (["a", " "], r"train\.csv:3 has ' ' in target, not a class but a missing label"),
        (["1", "NA", "2"], r"train\.csv:3 has 'NA' in target, not a class but a missing label"),
        (["1", "1.0"], r"train\.csv:3 has '1\.0' in target, and .*train\.csv:2 has '1'; write a number"),
        (["a", "b\0"], r"train\.csv:3 has 'b\\x00' in target, .* NUL byte"),
        (["a", "9" * 5000], r"train\.csv:3 has '9+…' in target, .*longer than 4096 bytes"),
    ],
)
def test_a_label_that_is_none_is_an_error_with_its_row(root: Path, cells: list[str], words: str) -> None:
    text = "path,target\n" + "".join(f"{file_of(n)},{cell}\n" for n, cell in enumerate(cells))
    (root / "train.csv").write_text(text)
    with pytest.raises(BadFileError, match=words):
        build(root)


def test_names_like_those_of_missing_cells_can_be_classes(root: Path) -> None:
    (root / "val.csv").unlink()
    (root / "train.csv").write_text(f"path,target\n{file_of(0)},none\n{file_of(1)},scratch\n")
    assert build(root).info.class_names == ("none", "scratch")
    (root / "train.csv").write_text(f"path,target\n{file_of(0)},nan\n{file_of(1)},roti\n")
    assert targets_of(build(root, classes=["nan", "roti"]).train) == [0, 1]


def test_a_name_of_windows_is_refused_with_the_one_to_write(root: Path) -> None:
    (root / "part").mkdir()
    (root / file_of(0)).rename(root / "part" / "0.jpg")
    (root / "train.csv").write_text("path,target\npart\\0.jpg,a\n")
    with pytest.raises(BadFileError, match=r"train\.csv:2 .* has backslashes, .*; write part/0\.jpg"):
        build(root)


def test_amounts_read_as_classes_are_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "val.csv").unlink()
    rows = "".join(f"{file_of(number)},0.1{number}\n" for number in range(1, 4))
    (root / "train.csv").write_text(f"path,target\n{rows}")
    build(root, download=True)
    assert "3 of 3 classes are numbers with a fraction (0.11, 0.12, 0.13)" in "".join(capsys.readouterr())


def test_only_files_below_the_root_or_the_roots_are_named(root: Path, tmp_path: Path) -> None:
    (root / "val.csv").unlink()
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / file_of(0)).rename(outside / "0.jpg")
    for name in (f"{outside}/0.jpg", "../outside/0.jpg"):
        (root / "train.csv").write_text(f"path,target\n{name},a\n")
        with pytest.raises(BadFileError, match=r"train\.csv:2 names .*0\.jpg', which .*roots: \[FOLD"):
            build(root)
        assert build(root, roots=[str(outside)]).train.file_content(0)  # type: ignore[union-attr]
    (root / "linked").symlink_to(outside)
    (root / "train.csv").write_text(f"path,target\nlinked/0.jpg,a\n{root}/{file_of(1)},b\n")
    split = build(root).train
    assert all(split.file_content(n)[0] for n in range(2))  # type: ignore[union-attr]


def test_a_pipe_and_a_device_are_refused(root: Path) -> None:
    (root / file_of(0)).unlink()
    os.mkfifo(root / file_of(0))
    (root / file_of(1)).unlink()
    (root / file_of(1)).symlink_to("/dev/zero")
    split = build(root).train
    for index in range(2):
        with pytest.raises(BadFileError, match=rf"not a regular file \(named in .*train\.csv:{index + 2}\)"):
            split.file_content(index)  # type: ignore[union-attr]


def test_prepare_prints_how_lists_and_files_differ(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(root, "train", range(11))
    with (root / "train.csv").open("a") as file:
        file.write(f"{file_of(3)},bee,0,0\n{file_of(12)},dog,0,0\n./{file_of(5)},bee,0,0\n")
    (root / "test.csv").touch()
    (root / file_of(4)).unlink()
    for _ in range(2):
        build(root, download=True)
        printed = capfd.readouterr().err
        assert "test.csv beside train.csv are not read" in printed
        assert "train.csv has 2 files in more than one row: images/3.png, images/5.png" in printed
        assert "val.csv and train.csv both name 1 file: images/12.jpg" in printed
        assert "2 files have different targets in different rows: images/12.jpg, images/3.png" in printed
        assert f"1 image below {root} is in no list: images/11.png" in printed
        assert f"1 listed file below {root} does not exist: images/4.jpg" in printed
        assert "1 of 4 classes have no validation sample: dog" in printed


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        ("a/list.csv", "b/list.csv", "b/list.csv and a/list.csv both name 4 files"),
        ("a/list.csv", "a/list.csv", "a/list.csv for val and a/list.csv both name 4 files"),
    ],
)
def test_shared_files_of_lists_of_one_name_are_counted(
    train: str, val: str, words: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (root / folder).mkdir()
        write(root, "train", range(4))
        (root / "train.csv").rename(root / folder / "list.csv")
    build(root, download=True, train=train, val=val)
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.0, math.nan], r"parquet:2 has 'nan' in target, .*missing label"),
        ([b"a", b"b"], r"parquet:1 has \"b'a'\" in target, not a class but bytes"),
        ([0.5, 1.0], r"parquet:1 has '0\.5' in target, not a class; fix it, or write .*target: num"),
        ([[1], [2]], r"parquet:1 has '\[1\]' in target, not a class but list"),
    ],
)
def test_parquet_values_of_other_types_are_refused(root: Path, labels: list[Any], words: str) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow takes 170 MB: not in the dev extra")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"path": [file_of(0), file_of(1)], "target": labels}), root / "t.parquet"
    )
    with pytest.raises(BadFileError, match=words):
        build(root, train="t.parquet")
    names = [file_of(n).encode() for n in range(2)]
    parquet.write_table(pyarrow.table({"path": names, "target": ["a", "b"]}), root / "t.parquet")
    with pytest.raises(BadFileError, match=r"parquet:1 names the file .*, which is bytes, not text"):
        build(root, train="t.parquet")
