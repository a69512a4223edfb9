from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.training.datasets.base import ArraySplit, DataSource
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.normalize import Normalize
from hpc_train.training.datasets.reading import Failure, Read, SlotReader
from hpc_train.training.datasets.sampler import Position, Slot
from hpc_train.training.datasets.sources.text import TextSplit
from hpc_train.training.datasets.targets import TargetCheck
from hpc_train.training.datasets.types import DataInfo, TargetSpec
from tests.datasets.samples import CPU, OneByOne, experiment, random_split


def built(root: Path, **args: Any) -> DataSource:
    return build_source(DataConfig(name="text", root=str(root), args=args))


def folder(root: Path, train: str, val: str | None = None) -> Path:
    root.mkdir(exist_ok=True)
    (root / "train.txt").write_bytes(train.encode())
    if val is not None:
        (root / "val.txt").write_bytes(val.encode())
    return root


def text_of(source: DataSource, tokens: torch.Tensor) -> str:
    return "".join(source.info.class_names[token] for token in tokens.tolist())


def whole(split: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(split, ArraySplit)
    return split.batch(torch.arange(len(split)))


def test_targets_are_the_characters_that_follow(tmp_path: Path) -> None:
    source = built(folder(tmp_path / "data", "to be or not"), sequence_length=3)
    samples = zip(*whole(source.train), strict=True)
    assert [(text_of(source, i), text_of(source, t)) for i, t in samples] == [
        ("to ", "o b"),
        ("be ", "e o"),
        ("or ", "r n"),
    ]
    assert source.info == DataInfo(7, 0, (), (), tuple(" benort"), 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(count=st.integers(2, 200), length=st.integers(1, 20))
def test_every_token_but_the_first_is_a_target_once(count: int, length: int) -> None:
    split = TextSplit(torch.arange(count, dtype=torch.int32), length)
    if len(split) == 0:
        assert count <= length
        return
    inputs, targets = split.batch(torch.arange(len(split)))
    assert inputs.dtype == targets.dtype == torch.int64
    num_tokens = len(split) * length
    assert inputs.flatten().tolist() == list(range(num_tokens))
    assert targets.flatten().tolist() == list(range(1, num_tokens + 1))
    assert count - 1 - num_tokens < length, "less than a sequence is left out"


@pytest.mark.parametrize(
    ("args", "cut"), [({}, 90), ({"val_fraction": 0.25}, 75), ({"val_fraction": 0}, 100)]
)
def test_the_end_of_a_single_file_is_for_validation(args: dict[str, Any], cut: int, tmp_path: Path) -> None:
    text = "".join(chr(0x100 + number) for number in range(100))
    (tmp_path / "one.txt").write_text(text)
    source = built(tmp_path / "one.txt", sequence_length=1, **args)
    assert text_of(source, whole(source.train)[0].flatten()) == text[: cut - 1]
    if cut == 100:
        assert source.val is None
        return
    assert text_of(source, whole(source.val)[0].flatten()) == text[cut:-1]


def test_characters_of_validation_alone_come_behind_those_of_training(tmp_path: Path) -> None:
    alone = built(folder(tmp_path / "alone", "banana nab"), sequence_length=2)
    assert alone.val is None
    both = built(folder(tmp_path / "both", "banana nab", "a 1 b 0 n"), sequence_length=2)
    assert both.info.class_names == (*alone.info.class_names, "0", "1")
    assert both.info.num_classes == alone.info.num_classes + 2
    assert torch.equal(whole(both.train)[0], whole(alone.train)[0])
    assert text_of(both, whole(both.val)[0].flatten()) == "a 1 b 0 "


@pytest.mark.parametrize("text", ["é\r\n𝄞\n€\r!", "".join(map(chr, range(0x400, 0x400 + 300)))])
def test_line_ends_and_any_number_of_characters_stay_as_they_are(text: str, tmp_path: Path) -> None:
    source = built(folder(tmp_path / "data", text), sequence_length=1)
    assert text_of(source, whole(source.train)[0].flatten()) == text[:-1]


@pytest.mark.parametrize("tokens", ["characters", "bytes"])
def test_a_byte_order_mark_is_not_text(tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"abcd" * 5)
    source = built(path, sequence_length=3, tokens=tokens, val_fraction=0)
    config = DataConfig(name="text", root=str(path), args={"sequence_length": 3, "tokens": tokens})
    path.write_bytes(b"abcd" * 5)
    plain = built(path, sequence_length=3, tokens=tokens, val_fraction=0)
    assert source.info == plain.info and len(source.train) == len(plain.train) == 6
    assert torch.equal(whole(source.train)[0], whole(plain.train)[0])
    counts = []
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + b"abcd" * 5)
        counts.append(training_samples(config))
    assert counts == [5, 5]


def test_bytes_need_no_utf8(tmp_path: Path) -> None:
    content = bytes(range(255, -1, -1)) * 2
    (tmp_path / "any.bin").write_bytes(content)
    source = built(tmp_path / "any.bin", sequence_length=4, tokens="bytes", val_fraction=0.5)
    assert source.info.num_classes == 256
    assert source.info.class_names == ()
    assert whole(source.train)[0].flatten().tolist() == list(content[:252])
    with pytest.raises(BadFileError, match=r"^data.root: .* not UTF-8 text \(at byte 0\); .*tokens: bytes"):
        built(tmp_path / "any.bin")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"sequence_length": 12}, r"^data.args.sequence_length: the training text has 12 characters"),
        ({"sequence_length": 5}, r"^data.args.sequence_length: the validation text has 3.*write a smaller"),
        ({"val_fraction": 0.5}, r"^data.args.val_fraction: .* is a folder, .*take it out"),
        ({"val_fraction": 1}, r"^data.args.val_fraction: .* at least 0 and below 1, got 1; write"),
        ({"tokens": "words"}, r"^data.args.tokens: needs one of characters, bytes, got .* 'words'; write"),
        ({"sequence_len": 3}, r"^data.args.sequence_len: .*did you mean 'sequence_length'"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], words: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "data", "twelve chars", "val")
    with pytest.raises(BadFileError, match=words):
        built(root, **args)


def test_a_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"^data.root: ~no-such-user/data does not exist on this machine"):
        built(Path("~no-such-user/data"))
    with pytest.raises(BadFileError, match=r"^data.root: .*nowhere.txt does not exist on this machine"):
        built(tmp_path / "nowhere.txt")
    with pytest.raises(BadFileError, match=r"^data.root: .* has no file train.txt"):
        built(tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_reach_the_model_as_they_were_read(workers: int, tmp_path: Path) -> None:
    """Two ranks together see in an epoch every sequence once, and normalisation leaves them alone."""
    source = built(folder(tmp_path / "data", "".join(map(chr, range(32, 113)))), sequence_length=5)
    assert len(source.train) == 16
    config = experiment(workers=workers)
    seen = []
    for rank in range(2):
        with training_batches(source, config, Position(0), 2, rank, 2, CPU) as batches:
            seen += [batch for _, step in batches for batch in step]
    normalize = Normalize(source.info, config.data, torch.float64)
    for batch in seen:
        assert torch.equal(normalize(batch.inputs), batch.inputs)
        assert batch.inputs.dtype == torch.int64
        assert torch.equal(batch.targets, batch.inputs + 1)
    assert sorted(int(first) for batch in seen for first in batch.inputs[:, 0]) == list(range(0, 80, 5))


def test_sequences_that_can_not_be_read_as_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    info = DataInfo(9, 0, (), (), sequence_length=4)
    made = DataSource(OneByOne(random_split(3)), None, info)
    monkeypatch.setattr("hpc_train.training.datasets.building._build", lambda config, download: made)
    with pytest.raises(BadFileError, match=r"^data.name: OneByOne has sequences but no method batch"):
        build_source(DataConfig(name="acme:data"))


def test_files_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, "to be", "or not")  # 5 and 6 characters
    for name in ("valid.txt", "train.txt.gz", "notes.md"):
        (tmp_path / name).touch()
    build_source(DataConfig(name="text", root=str(tmp_path), args={"sequence_length": 2}), download=True)
    printed = "".join(capsys.readouterr())
    assert f"data.root: 2 files in {tmp_path} not read (train.txt.gz, valid.txt)" in printed
    assert "the last 1 of the 6 validation tokens are not used, since they do not fill a seq" in printed
    assert "training tokens" not in printed


def test_validation_text_that_is_training_text_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "".join(map(chr, range(33, 1033)))
    for val, words in (
        (text[-200:], "2 of 2 compared passages of the validation tokens"),
        (text[::-1], None),
    ):
        folder(tmp_path, text, val)
        build_source(DataConfig(name="text", root=str(tmp_path), args={"sequence_length": 70}), download=True)
        printed = "".join(capsys.readouterr())
        assert "compared" not in printed if words is None else words in printed


def test_nul_characters_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_bytes("to be".encode("utf-16-le"))
    with pytest.raises(BadFileError, match=r"train.txt has a NUL .*\(number 1\), like UTF.*; convert"):
        built(tmp_path, sequence_length=2)
    assert len(built(tmp_path, sequence_length=2, tokens="bytes").train) == 4
    os.mkfifo(folder(tmp_path, "to be or") / "val.txt")
    with pytest.raises(BadFileError, match=r"val.txt is a named pipe, not a regular file; put the text"):
        built(tmp_path, sequence_length=2)


@pytest.mark.parametrize(("highest", "is_checked"), [(6, True), (4, False)])
def test_tokens_in_memory_are_checked_once_or_always(highest: int, is_checked: bool, tmp_path: Path) -> None:
    source = built(folder(tmp_path / "data", "to be or not"), sequence_length=3)
    spec = TargetSpec("tokens", kind="integer", shape=(3,), minimum=0, maximum=highest)
    reader = SlotReader(
        source.train, None, 0, lambda inputs, targets, _: (inputs, targets), TargetCheck("t", spec)
    )
    assert reader.is_in_memory is is_checked
    read = reader.__getitems__(Slot(0, 0, 0, 0, 1.0, torch.arange(3), 3))
    assert isinstance(read, Read) if is_checked else isinstance(read, Failure)
