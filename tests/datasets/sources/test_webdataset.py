from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_train.cli.preflight import missing_data
from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import missing_index, training_samples
from hpc_train.experiment.data_facts.listed_data import index_path, webdataset_files
from hpc_train.experiment.plan.input_files import fingerprints, other_inputs
from hpc_train.experiment.validate.loading import load
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.building import build_source
from tests.datasets.samples import experiment, image_file, targets_of
from tests.datasets.sources.exactness import assert_exact
from tests.datasets.sources.test_image_list import rewrite, without

ANIMALS = ("cat", "ant", "bee")
SHARDS = "train-{00..02}.tar"


pytestmark = pytest.mark.usefixtures("own_cache")


def image(number: int) -> bytes:
    return image_file(7 * number, "JPEG")


def members_of(number: int) -> dict[str, bytes]:
    """Return the members of a sample by extension."""
    fields = {"name": ANIMALS[number % 3], "age": number / 2, "box": [number, 1.5]}
    return {
        "jpg": image(number),
        "cls": b"%d\n" % (number % 3),
        "txt": ANIMALS[number % 3].encode(),
        "json": json.dumps(fields).encode(),
    }


def write(path: Path, samples: dict[str, dict[str, bytes]], form: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for key, members in samples.items():
            for extension, content in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four samples in each of three shards, seven of validation; long names, folders, an odd member."""
    root = tmp_path / "shards"
    root.mkdir()
    for shard in range(3):
        keys = [f"{'deep/' * 40 * shard}{'0' * 6}{4 * shard + n}" for n in range(4)]
        samples = {key: members_of(4 * shard + n) for n, key in enumerate(keys)}
        write(root / f"train-{shard:02}.tar", {"__meta__": {"json": b"{}"}} | samples)
    write(root / "val.tar", {f"v{n}": members_of(n) for n in range(12, 19)}, tarfile.GNU_FORMAT)
    return root


def config(root: Path, **args: Any) -> DataConfig:
    return DataConfig(name="webdataset", root=str(root), args={"train": SHARDS, "val": "val.tar"} | args)


def build(root: Path, *, download: bool = True, **args: Any) -> DataSource:
    return build_source(config(root, **args), download=download)


def test_samples_have_the_order_of_shards_and_members(root: Path) -> None:
    source = build(root)
    assert [split.file_content(n)[0] for split in (source.train, source.val) for n in range(len(split))] == [  # type: ignore[union-attr, arg-type]
        image(number) for number in range(19)
    ]
    assert targets_of(source.train) == [0, 1, 2] * 4
    assert source.info.class_names == ("0", "1", "2") and source.info.channels == 3
    assert source.train.path(5) == root / "train-01.tar" / f"{'deep/' * 40}0000005.jpg"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "targets", "classes"),
    [
        ({"target_member": "txt"}, [2, 0, 1, 2], ("ant", "bee", "cat")),
        (
            {"target_member": "json.name", "classes": ["bee", "cat", "ant"]},
            [1, 2, 0, 1],
            ("bee", "cat", "ant"),
        ),
        ({"num_classes": 4, "image": "JPG"}, [0, 1, 2, 0], ("0", "1", "2", "3")),
        ({"target_member": "json.age", "target": "number"}, [0.0, 0.5, 1.0, 1.5], ()),
        ({"target_member": "json.box", "target": "number"}, [[0, 1.5], [1, 1.5], [2, 1.5], [3, 1.5]], ()),
        ({"target_member": "cls", "target": "number"}, [0.0, 1.0, 2.0, 0.0], ()),
    ],
)
def test_targets(root: Path, args: dict[str, Any], targets: list[Any], classes: tuple[str, ...]) -> None:
    source = build(root, **args)
    assert targets_of(source.train)[:4] == targets
    assert source.info.class_names == classes
    if args.get("target") == "number":
        assert source.info.num_classes == np.asarray(targets[0]).size
    assert source.info.target_shape == np.shape(targets[0])


def test_prepare_reports_classes_without_samples(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(root, num_classes=5)
    build(root, num_classes=5, download=False)
    said = "".join(capsys.readouterr())
    assert said.count("data.root: 2 of 5 classes have no training sample: 3, 4") == 1
    assert said.count("data.root: 2 of 5 classes have no validation sample: 3, 4") == 1


def test_prepare_reports_shards_that_are_read_twice(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(root, train=["train-00.tar", "train-00.tar"], val="train-00.tar")
    printed = "".join(capsys.readouterr())
    assert "train names train-00.tar or a copy more than once" in printed
    assert "train and val both name train-00.tar" in printed
    (root / "link.tar").symlink_to("train-00.tar")
    shutil.copy(root / "train-00.tar", root / "copy.tar")
    for name in ("link.tar", "copy.tar"):
        build(root, train="train-00.tar", val=name)
        assert "train and val both name train-00.tar" in "".join(capsys.readouterr())
    build(root, train="train-00.tar", val=None)
    assert "name" not in "".join(capsys.readouterr())


def test_resume_and_ranks_read_the_same(root: Path) -> None:
    build(root)
    assert_exact(lambda: build(root, download=False))


def test_ranks_need_the_index_of_these_shards(root: Path, tmp_path: Path) -> None:
    words = r"^data\.root: .* has 4 files without an index, .*; run `hpc-train prepare`"
    assert training_samples(config(root)) is None
    assert missing_index(config(root)) is not None
    with pytest.raises(BadFileError, match=words):
        build(root, download=False)
    build(root)
    assert len(build(root, download=False).train) == 12 == training_samples(config(root))
    assert missing_index(config(root)) is None
    path = index_path(config(root), webdataset_files(config(root)))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(BadFileError, match=words):
        build(root, download=False)
    for absent in (("val", ""), ("train", "offsets")):
        path.write_bytes(content)
        rewrite(path, lambda header, absent=absent: without(header, *absent))  # type: ignore[misc]
        with pytest.raises(BadFileError, match=words):
            build(root, download=False)
    path.write_bytes(content)
    write(root / "train-01.tar", {"x": members_of(1)})
    with pytest.raises(BadFileError, match=words):
        build(root, download=False)
    assert missing_index(config(root / "elsewhere")) is None, "the ranks may be able to read it"


def test_plan_and_submit_find_out_that_the_index_is_missing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(
        "name: x\ntask: classification\nmodel: {name: 'some.models:net'}\n"
        f"data: {{name: webdataset, root: {root}, args: {{train: train-00.tar}}, cache: {tmp_path}}}\n"
        "optimization: {steps: 1, global_batch_size: 4, micro_batch_size: 4,"
        " optimizer: {name: sgd, lr: 0.1}}\n"
    )
    loaded = load(tmp_path / "exp.yaml", check_names=False)
    (line,) = missing_data(loaded, "fetch it")
    assert "exp.yaml:4:" in line and "has 1 files without an index, or changed" in line
    data = loaded.experiment.data
    build_source(data, download=True)
    assert missing_data(loaded, "fetch it") == []
    assert len(list(tmp_path.glob("*.index"))) == 1


def test_the_fingerprint_is_that_of_the_shards(root: Path) -> None:
    def of(train: str) -> Any:
        return experiment(name="webdataset", root=str(root), args={"train": train})

    before = fingerprints(of("train-00.tar"))
    assert list(before) == ["data.root"]
    assert other_inputs(before, fingerprints(of("train-{00..00}.tar"))) == []
    assert other_inputs(before, fingerprints(of("train-01.tar"))) == ["data.root"]


OF_JSON = {"target_member": "json.a"}


def one(**members: bytes) -> dict[str, dict[str, bytes]]:
    """Return a sample "a" of an image and these members."""
    return {"a": {"jpg": b"x"} | members}


def test_names_of_shards() -> None:
    data = DataConfig(name="webdataset", root="r", args={"train": ["{8..11}/s-{0..1}.tar", "last.tar"]})
    assert [path.as_posix() for path in webdataset_files(data)] == [
        *(f"r/{folder}/s-{n}.tar" for folder in (8, 9, 10, 11) for n in (0, 1)),
        "r/last.tar",
    ]


@pytest.mark.parametrize(
    ("samples", "args", "words"),
    [
        ({}, {}, r"train-00\.tar has no samples; take it out"),
        ({"a": {"cls": b"0"}}, {}, r"train-00\.tar: sample a has no image \(cls\); write the shard again"),
        (one(png=b"y", cls=b"0"), {}, r"sample a has 2 images \(jpg, png\); name .* in data\.args\.image"),
        (one(), {}, r"sample a has 0 members cls \(jpg\); write the shard again, or another"),
        (one(cls=b""), {}, r"sample a has the target '', not a class"),
        (one(cls=b"\xff"), {}, r"sample a has a target that can't be read: .* byte 0xff"),
        (one(json=b"{"), OF_JSON, r"a has a target that can't"),
        (
            one(cls=b"0\n3\n"),
            {},
            r"sample a has a target that can't be read: it has several lines, .* one class",
        ),
        (
            {f"a.v1.{n}": {"jpg": b"x", "cls": b"0"} for n in range(9)},
            {},
            r"a has no image \(v1\.0\.jpg, .*, …\); .* the first dot of a name like a\.v1\.0\.jpg: write",
        ),
        (one(json=b'{"b": 1}'), OF_JSON, r"sample a has no field 'a' in its JSON \(b\); .* write another"),
        (one(json=b'{"a": 1.5}'), OF_JSON, r"target '1\.5', not a class; .* data\.args\.target: number"),
        (
            one(json=b'{"a": [1]}') | {"b": {"jpg": b"x", "json": b'{"a": [1, 2]}'}},
            OF_JSON | {"target": "number"},
            r"sample b has the target '\[1, 2\]', not 1 numbers",
        ),
        (one(cls=b"nan"), {"target": "number"}, r"the target 'nan', not a number; fix"),
        (one(cls=b"7"), {"num_classes": 3}, r"sample a has the class '7', .* not among"),
        (one(cls=b"7"), {}, r"val\.tar: sample v12 has .*'0', .*training samples \(7"),
        ({}, {"classes": ["a"], "target": "number"}, r"^data\.args\.classes: is for .*target: class"),
        ({}, {"target_member": "npy"}, r"^data\.args\.target_member: needs text .*, got .* 'npy'; write"),
        ({}, {"train": "train-{08..09}.tar"}, r"^data\.args\.train: .*08\.tar is not .*, nor are 1 more"),
        ({}, {"train": []}, r"^data\.args\.train: names no file"),
        ({}, {"train": "{0..9999999}.tar"}, r"^data\.args\.train: names 10,000,000 files, over"),
        ({}, {"train": ["{2000000..0}.tar", "{1..1000001}.tar"]}, r"^data\.args\.train: names 1,000,001"),
        ({}, {"val": ["{0..999}-{0..999}.tar", "a"]}, r"^data\.args\.val: names 1,000,001 files, over"),
        ({}, {"train": "{0..%s}.tar" % ("9" * 5000)}, r"^data\.args\.train: has a range .* over 9 digits"),
        ({}, {"train": "a\0.tar"}, r"^data\.args\.train: 'a\\x00\.tar' has a NUL character; take it out"),
        (one(cls=bytes((1 << 24) + 1)), {}, r"sample a has a target of 16777217 bytes"),
        (one(json=b'{"a": 1, "a": 2}'), OF_JSON, r"a target that can't be read: it has the key 'a' twice"),
    ],
)
def test_a_bad_shard_is_named_with_its_sample(
    root: Path, samples: dict[str, dict[str, bytes]], args: dict[str, Any], words: str
) -> None:
    write(root / "train-00.tar", samples)
    with pytest.raises(BadFileError, match=words):
        build(root, **{"train": "train-00.tar"} | args)


def test_compressed_and_damaged_shards_are_refused(root: Path) -> None:
    path = root / "train-00.tar"
    content = path.read_bytes()
    path.write_bytes(gzip.compress(content))
    with pytest.raises(BadFileError, match=r"train-00\.tar is compressed .*gzip.*; write it uncompressed"):
        build(root)
    for damaged in (b"", content[:5000], b"no tar file" * 100):
        path.write_bytes(damaged)
        with pytest.raises(BadFileError, match=r"train-00\.tar is not a complete tar.*; write it again"):
            build(root)


def test_a_shard_that_was_cut_is_an_error_of_the_sample(root: Path) -> None:
    split = build(root).train
    with (root / "train-02.tar").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match=r"the shard ends after 0 of the member's \d+ bytes"):
        split.file_content(11)  # type: ignore[union-attr]


def test_a_sparse_member_is_refused(root: Path) -> None:
    with tarfile.open(root / "train-00.tar", "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type = tarfile.GNUTYPE_SPARSE
        tar.addfile(info)
    with pytest.raises(BadFileError, match=r"train-00\.tar: a\.jpg is sparse; write the shard without"):
        build(root)


def add(
    tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(content), link
    tar.addfile(info, io.BytesIO(content))


def test_a_hard_link_has_the_content_of_its_member(root: Path) -> None:
    with tarfile.open(root / "train-00.tar", "w") as tar:
        add(tar, "folder", kind=tarfile.DIRTYPE)
        add(tar, "a.jpg", image(1))
        add(tar, "a.txt", b"\xef\xbb\xbfcat")
        add(tar, "b.jpg", kind=tarfile.LNKTYPE, link="a.jpg")
        add(tar, "b.txt", kind=tarfile.LNKTYPE, link="a.txt")
    source = build(root, train="train-00.tar", val=None, target_member="txt")
    assert [source.train.file_content(n)[0] for n in range(2)] == [image(1)] * 2  # type: ignore[union-attr]
    assert targets_of(source.train) == [0, 0] and source.info.class_names == ("cat",)


@pytest.mark.parametrize(
    ("kind", "link", "words"),
    [
        (tarfile.LNKTYPE, "z.cls", r"a\.cls is a link to z\.cls, not a file of the shard; write"),
        (tarfile.SYMTYPE, "a.jpg", r"a\.cls is a link to a\.jpg, not a file"),
        (tarfile.FIFOTYPE, "", r"a\.cls is of type b'6'"),
        (b"M", "", r"a\.cls is of type b'M'"),
    ],
)
def test_a_member_without_content_is_refused(kind: bytes, link: str, words: str, root: Path) -> None:
    with tarfile.open(root / "train-00.tar", "w") as tar:
        add(tar, "a.jpg", image(1))
        add(tar, "a.cls", kind=kind, link=link)
    with pytest.raises(BadFileError, match=words):
        build(root)


def test_a_sample_that_is_there_twice_is_refused(root: Path) -> None:
    members = members_of(1)
    with tarfile.open(root / "train-00.tar", "w") as tar:
        for name in ("a", "b", "a"):
            add(tar, f"{name}.jpg", members["jpg"])
            add(tar, f"{name}.cls", members["cls"])
    with pytest.raises(BadFileError, match=r"sample a is there twice, or its members do"):
        build(root)


def test_members_of_no_sample_are_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root / "train-00.tar", {"__meta__": {"json": b""}, "._a": {"jpg": b""}, "a": members_of(1)})
    build(root, train="train-00.tar", val=None)
    assert "data.root: 2 members of shards skipped (__meta__.json, ._a.jpg)" in "".join(capsys.readouterr())


def header(num_bytes: int = 0, kind: bytes = tarfile.REGTYPE, **pax: str) -> bytes:
    info = tarfile.TarInfo("a.jpg")
    info.type, info.size, info.pax_headers = kind, num_bytes, pax
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (header(1 << 70), r"a\.jpg ends at byte \d+ of"),
        (header(size="1" + "0" * 400), r"a\.jpg ends at byte 10+\d+ of"),
        (header(size="1" * 5000), r"sample a has 0 members cls \(jpg\)"),
        (header(-512), r"has the size -512|offset"),
        (header(1 << 40, tarfile.XHDTYPE), r"a header of type b'x' has the size 1099511627776"),
        (header(1 << 40, tarfile.GNUTYPE_LONGNAME), r"a header of type b'L' has the size"),
        (header(512, tarfile.XGLTYPE) * 5000, "write it again"),
    ],
)
def test_absurd_sizes_are_errors(start: bytes, words: str, root: Path) -> None:
    (root / "train-00.tar").write_bytes(start + (root / "val.tar").read_bytes())
    with pytest.raises(BadFileError, match=rf"train-00\.tar(:| is not a complete tar file:) .*{words}"):
        build(root)


def test_tar_files_joined_by_cat_are_refused(root: Path) -> None:
    path = root / "train-00.tar"
    content = path.read_bytes()
    path.write_bytes(content + (root / "train-01.tar").read_bytes())
    words = r"train-00\.tar is not a complete .* continues after its end-of-archive block at byte \d+, like"
    with pytest.raises(BadFileError, match=words):
        build(root)
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole, as after preallocation
    assert len(build(root).train) == 12
    with path.open("r+b") as file:
        file.seek((1 << 40) - 1)
        file.write(b"x")
    with pytest.raises(BadFileError, match=words):
        build(root)


def test_pipes_are_no_shards(root: Path) -> None:
    os.mkfifo(root / "train-03.tar")
    with pytest.raises(BadFileError, match=r"train-03\.tar is not a file on this machine"):
        build(root, train="train-03.tar")
