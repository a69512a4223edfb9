from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import token_shards
from hpc_train.experiment.data_facts.by_name import training_samples
from hpc_train.experiment.data_facts.token_shards import (
    HEADER_BYTES,
    TokensArgs,
    find_shards,
    header_of,
    index_digest,
    size_of_shard,
    tokens_fingerprint,
)
from hpc_train.experiment.plan.input_files import DATA, fingerprints
from hpc_train.training.datasets import token_check, token_writing
from hpc_train.training.datasets.base import ArraySplit, DataSource
from hpc_train.training.datasets.batches import training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.sources import tokens as tokens_source
from hpc_train.training.datasets.tokenization import decoder_of
from hpc_train.training.datasets.types import DataInfo
from tests.datasets.samples import CPU, assert_equal, experiment

DOCUMENTS = ["to be or not to be", "", "that is", "the question: whether 'tis nobler"]


@pytest.fixture(autouse=True)
def _nothing_is_known_to_be_intact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token_writing, "_checked", set())
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))


def corpus(root: Path, *documents: str, part: str = "train", key: str = "text") -> Path:
    root.mkdir(exist_ok=True)
    lines = [json.dumps({key: text, "id": number}) for number, text in enumerate(documents or DOCUMENTS)]
    (root / f"{part}.jsonl").write_text("\n".join(lines) + "\n\n")
    return root


def config(root: Path, tokenizer: str = "bytes", sequence_length: int = 4, **args: Any) -> DataConfig:
    given = {"tokenizer": tokenizer, "sequence_length": sequence_length} | args
    return DataConfig(name="tokens", root=str(root), args=given)


def prepared(root: Path, **args: Any) -> DataSource:
    return build_source(config(root, **args), download=True)


def change_end(index: Path) -> None:
    """Change the token between documents, which no header of a shard has."""
    content = json.loads(index.read_text())
    index.write_text(json.dumps(content | {"end_of_document": content["end_of_document"] - 1}))


def stream(split: Any) -> list[int]:
    """Return the tokens that all samples together have."""
    assert isinstance(split, ArraySplit)
    inputs, targets = split.batch(torch.arange(len(split)))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous() and targets.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(inputs[1:, 0], targets[:-1, -1])
    return [*inputs.flatten().tolist(), int(targets[-1, -1])]


def of_documents(*documents: str) -> list[int]:
    return [token for text in documents for token in (*text.encode(), 256)]


def shard_files(root: Path) -> list[Path]:
    return sorted(root.glob("tokens/*/*.tokens"))


def document_starts(path: Path) -> list[int]:
    """Return where in a shard its documents start, in tokens: the shard's own index."""
    header = token_shards.read_header(path)
    start = token_shards.documents_offset(header["tokens"], header["dtype"])
    return np.frombuffer(path.read_bytes()[start:], "<u8").tolist()


@pytest.mark.parametrize("shard_tokens", [1, 7, 1000])
def test_documents_become_one_stream_over_all_shards(shard_tokens: int, tmp_path: Path) -> None:
    source = prepared(corpus(tmp_path / "data"), shard_tokens=shard_tokens)
    expected = of_documents(*DOCUMENTS)
    found = stream(source.train)
    assert found == expected[: len(found)] and len(expected) - len(found) < 4
    assert source.info.num_classes == 257 and source.info.sequence_length == 4
    assert len(shard_files(tmp_path / "data")) == -(-len(expected) // shard_tokens)
    starts, before = [], 0
    for file in shard_files(tmp_path / "data"):
        starts += [before + start for start in document_starts(file)]
        before += token_shards.read_header(file)["tokens"]
    assert starts == [0, *(number + 1 for number, token in enumerate(expected[:-1]) if token == 256)]


def test_login_nodes_count_what_ranks_read(tmp_path: Path) -> None:
    root = corpus(tmp_path / "data")
    assert training_samples(config(root)) is None, "not tokenized yet"
    source = prepared(root, shard_tokens=10)
    assert training_samples(config(root)) == len(source.train) == (len(of_documents(*DOCUMENTS)) - 1) // 4
    assert "torch" not in token_shards.__dict__ and "numpy" not in token_shards.__dict__


def test_text_files_are_documents_and_validation_has_its_own_shards(tmp_path: Path) -> None:
    (tmp_path / "train" / "more").mkdir(parents=True)
    (tmp_path / "train" / "b.txt").write_bytes(b"one\r\n")
    (tmp_path / "train" / "more" / "a.txt").write_bytes(b"two \xff")
    (tmp_path / "train" / ".hidden.txt").write_text("no")
    (tmp_path / "val-1.txt").write_text("three")
    source = prepared(tmp_path, sequence_length=1)
    assert bytes(t for t in stream(source.train) if t < 256) == b"one\r\ntwo \xff"
    assert stream(source.val) == of_documents("three")


def test_characters_of_validation_alone_come_behind_those_of_training(tmp_path: Path) -> None:
    corpus(corpus(tmp_path, "banana"), "abcé", part="val")
    source = prepared(tmp_path, tokenizer="characters", sequence_length=1)
    assert source.info.class_names == ("a", "b", "n", "c", "é", "") and source.info.num_classes == 6
    assert stream(source.train) == [1, 0, 2, 0, 2, 0, 5]
    assert decoded(source.info, stream(source.val)) == "abcé"


def test_a_batch_in_any_order_is_that_of_single_samples_and_of_a_loader_process(tmp_path: Path) -> None:
    split = prepared(corpus(tmp_path), shard_tokens=9).train
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    inputs, targets = pickle.loads(pickle.dumps(split)).batch(order)
    for row, index in enumerate(order.tolist()):
        one_input, one_target = split.batch(torch.tensor([index]))  # type: ignore[union-attr]
        assert torch.equal(inputs[row], one_input[0]) and torch.equal(targets[row], one_target[0])


def decoded(info: DataInfo, tokens: list[int]) -> str | None:
    decoder = decoder_of(info)
    return None if decoder is None else decoder.decode(tokens)


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_shards_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_source, "_MAX_OPEN", 3)
    split: Any = prepared(corpus(tmp_path), shard_tokens=2).train
    before = num_open()
    stream(split)
    assert len(split._open) == 3 and num_open() == before + 3
    del split
    assert num_open() == before


def test_position_is_exact_in_mid_epoch_on_any_number_of_ranks(tmp_path: Path) -> None:
    source = prepared(corpus(tmp_path, *DOCUMENTS * 5), shard_tokens=50)
    found = []
    for start in (0, 3):
        with training_batches(source, experiment(), Position(start), 6, 0, 1, CPU) as batches:
            found.append(list(batches))
    assert_equal(found[0][3:], found[1])
    seen = []
    for rank in range(2):
        with training_batches(source, experiment(), Position(3), 6, rank, 2, CPU) as batches:
            seen += [batch.inputs for _, step in batches for batch in step]
    alone = [batch.inputs for _, step in found[1] for batch in step]
    assert sorted(map(str, seen)) == sorted(map(str, alone))


def test_preparing_again_writes_nothing_and_writes_the_same_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for name in ("here", "there"):
        root = corpus(tmp_path / name)
        prepared(root, shard_tokens=10)
        contents.append({path.parent.name + path.name: path.read_bytes() for path in shard_files(root)})
    assert contents[0] == contents[1]
    times = [path.stat().st_mtime_ns for path in shard_files(root)]
    monkeypatch.setattr(token_writing, "_checked", set())
    prepared(root, shard_tokens=3)
    assert [path.stat().st_mtime_ns for path in shard_files(root)] == times
    assert "intact and up to date" in "".join(capsys.readouterr())


def test_changed_text_is_refused_until_it_is_tokenized_again(tmp_path: Path) -> None:
    root = corpus(tmp_path)
    prepared(root)
    corpus(root, *DOCUMENTS, "more")
    with pytest.raises(BadFileError, match=r"^data.root: .* no token shards of the text .*run `hpc-train"):
        build_source(config(root))
    assert training_samples(config(root)) is None
    assert stream(prepared(root, sequence_length=1).train) == of_documents(*DOCUMENTS, "more")
    with pytest.raises(BadFileError, match=r"with tokenizer characters; run"):
        build_source(config(root, "characters"))


def test_text_that_changed_in_place_is_tokenized_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal size, and not in the blocks that a fingerprint reads."""
    monkeypatch.setattr(token_shards, "_BLOCK_BYTES", 1)
    root = corpus(tmp_path, "abcdefgh")
    prepared(root, sequence_length=1)
    status = (root / "train.jsonl").stat()
    corpus(root, "abxdefgh")
    os.utime(root / "train.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))  # as an archive restores it
    monkeypatch.setattr(token_writing, "_checked", set())
    assert stream(prepared(root, sequence_length=1).train) == of_documents("abxdefgh")
    assert "train.jsonl has changed since it was tokenized" in "".join(capsys.readouterr())


def test_shards_without_their_text_are_used(tmp_path: Path) -> None:
    root = corpus(tmp_path)
    expected = stream(prepared(root, sequence_length=1).train)
    (root / "train.jsonl").unlink()
    assert stream(build_source(config(root, sequence_length=1)).train) == expected
    assert len(prepared(root).train) > 0, "prepare has nothing to write"
    (folder,) = (root / "tokens").iterdir()
    (moved := tmp_path / "moved").mkdir()
    folder.rename(moved / folder.name)
    given = config(root, sequence_length=1, shards=str(moved))
    assert stream(build_source(given).train) == expected
    corpus(root, "other")
    build_source(config(root, shards=str(moved)), download=True)
    (root / "train.jsonl").unlink()
    with pytest.raises(BadFileError, match=r"shards of several texts \(bytes-.*; keep one folder"):
        build_source(given)


def test_shards_of_other_tokens_are_other_data(tmp_path: Path) -> None:
    def found(root: Path) -> Any:
        data = config(root).model_dump(include={"name", "root", "args"})
        changed = experiment().model_dump() | {"data": data}
        return fingerprints(Experiment.model_validate(changed)).get(DATA)

    one, other = corpus(tmp_path / "one"), corpus(tmp_path / "other", "other")
    assert found(one) is None or found(one) == {}
    for root in (one, other):
        prepared(root)
    same = corpus(tmp_path / "same")
    prepared(same)
    assert found(one) == found(same) != found(other)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: os.truncate(path, HEADER_BYTES + 10), r"it has 4106 bytes, and its header says \d+"),
        (lambda path: os.truncate(path, 100), "it ends after 100 bytes"),
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), "its header is not JSON|not begin like"),
        (lambda path: path.write_bytes(header_of({"tokens": 5}) + b"\0" * 10), "its header is not .* says"),
        (lambda path: (path.parent / "index.json").write_text("{}"), "it has other fields than an index"),
        (lambda path: change_end(path.parent / "index.json"), "its hash is not that of its fields"),
    ],
)
def test_a_damaged_shard_is_named_and_written_again(damage: Any, why: str, tmp_path: Path) -> None:
    root = corpus(tmp_path)
    expected = stream(prepared(root, sequence_length=1).train)
    damage(shard_files(root)[0])
    words = rf"^data.root: .*bytes-.*not a complete, undamaged .*: ({why}); remove its folder, then run `hpc"
    with pytest.raises(BadFileError, match=words):
        build_source(config(root))
    token_writing._checked.clear()
    assert stream(prepared(root, sequence_length=1).train) == expected


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def verify(root: Path, **args: Any) -> list[float]:
    """Check the shards as the first rank of a node does; return the fractions that it reported."""
    fractions: list[float] = []
    source = build_source(config(root, **args))
    assert source.verify is not None
    source.verify(fractions.append)
    return fractions


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 20, -1])
def test_a_flipped_bit_is_an_error_before_training(at: int, tmp_path: Path) -> None:
    prepared(corpus(tmp_path), shard_tokens=20)
    assert verify(tmp_path)[-1] == 1.0
    shard = shard_files(tmp_path)[1]
    flip(shard, at)
    with pytest.raises(BadFileError, match=rf"{shard.name} .*the hash of its tokens is not .* header"):
        verify(tmp_path)
    token_writing._checked.clear()
    prepared(tmp_path, shard_tokens=20)  # which reads all shards and writes damaged ones again
    assert verify(tmp_path)[-1] == 1.0


def test_intact_shards_are_read_once_in_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(corpus(tmp_path), shard_tokens=20)
    count = len(verify(tmp_path))
    assert count == len(shard_files(tmp_path)) > 2
    assert verify(tmp_path) == []
    shard_files(tmp_path)[0].touch()
    assert len(verify(tmp_path)) == 1
    now = time.time()
    monkeypatch.setattr(token_check.time, "time", lambda: now + 25 * 3600)
    assert len(verify(tmp_path)) == count
    (memory,) = (tmp_path / "cache").glob("tokens-*.json")
    for damaged in ("", "[]", '{"intact": 3}'):
        memory.write_text(damaged)
        assert len(verify(tmp_path)) == count


def test_the_check_ends_at_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(corpus(tmp_path), shard_tokens=20)
    with monkeypatch.context() as patch:
        patch.setattr(token_check, "CHECK_LIMIT_S", -1.0)
        verify(tmp_path)
    count = len(shard_files(tmp_path))
    assert f"{count} of the {count} token shards" in caplog.text
    flip(shard_files(tmp_path)[-1], -1)
    with pytest.raises(BadFileError, match="the hash of its tokens"):
        verify(tmp_path)


def test_a_shard_is_read_in_blocks_until_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may be larger than the memory, and take longer to read than the limit."""
    prepared(corpus(tmp_path, "x" * 1000))
    blocks: list[int] = []
    hasher = SimpleNamespace(update=lambda block: blocks.append(len(block)), hexdigest=lambda: "")
    clock = itertools.count()  # a second passes from each look at the clock to the next
    monkeypatch.setattr(token_check, "_READ_BYTES", 100)
    monkeypatch.setattr(token_check, "CHECK_LIMIT_S", 5.0)
    monkeypatch.setattr(token_check, "xxhash", SimpleNamespace(xxh3_128=lambda: hasher))
    monkeypatch.setattr(
        token_check, "time", SimpleNamespace(monotonic=lambda: float(next(clock)), time=time.time)
    )
    verify(tmp_path)
    assert blocks == [100] * 5


def test_two_texts_share_a_folder_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal names, sizes and times, and equal bytes in the blocks that name the folder."""
    monkeypatch.setattr(token_shards, "_BLOCK_BYTES", 1)
    shards = str(tmp_path / "shards")
    roots = [corpus(tmp_path / name, text) for name, text in (("one", "abcdefgh"), ("two", "abxdefgh"))]
    prepared(roots[0], shards=shards)
    with pytest.raises(BadFileError, match="no token shards of the text"):
        build_source(config(roots[1], shards=shards))
    for root, text in zip(roots, ("abcdefgh", "abxdefgh"), strict=True):
        assert stream(prepared(root, shards=shards, sequence_length=1).train) == of_documents(text)


def test_files_without_a_hash_are_known_by_their_content(tmp_path: Path) -> None:
    parts = []
    for name, token in (("one", 5), ("two", 6)):
        (tmp_path / name).mkdir()
        tokens = np.full(20_000, 1, "<u2")
        tokens[7_000] = token  # not in the blocks that 0.2 read
        tokens.tofile(tmp_path / name / "train.bin")
        parts.append(tokens_fingerprint(config(tmp_path / name, "gpt2")))
    assert parts[0]["tokens"] == parts[1]["tokens"] and parts[0]["content"] != parts[1]["content"]


def test_a_shard_that_gets_shorter_under_a_reader_is_an_error(tmp_path: Path) -> None:
    split: Any = prepared(corpus(tmp_path)).train
    os.truncate(shard_files(tmp_path)[0], HEADER_BYTES + 2 * 30)
    split.batch(torch.tensor([0]))
    with pytest.raises(BadFileError, match=rf"train-00000.tokens .*it ends at byte {HEADER_BYTES + 60}"):
        split.batch(torch.tensor([0, len(split) - 1]))


def test_a_token_beyond_the_vocabulary_names_shard_and_place(tmp_path: Path) -> None:
    np.array([5, 6, 7, 8, 9, 50256, 50257, 1, 2], "<u2").tofile(tmp_path / "train.bin")
    split: Any = build_source(config(tmp_path, "gpt2", 2)).train
    assert split.batch(torch.tensor([0, 1]))[1].tolist() == [[6, 7], [8, 9]]
    words = r"train.bin has the token 50257 at place 6 \(byte 12\), and the vocabulary has 50257; write"
    with pytest.raises(BadFileError, match=words):
        split.batch(torch.tensor([0, 2]))


def test_files_of_nanogpt_and_llmc_are_read(tmp_path: Path) -> None:
    (nano := tmp_path / "nano").mkdir()
    (llmc := tmp_path / "llmc").mkdir()
    np.arange(20, dtype="<u2").tofile(nano / "train.bin")
    np.arange(9, dtype="<u2").tofile(nano / "val.bin")
    for number in (1, 2):
        header = struct.pack("<iii", 20240520, 1, 10).ljust(1024, b"\0")
        tokens = np.arange(10 * number - 10, 10 * number, dtype="<u2").tobytes()
        (llmc / f"fineweb_train_{number:06d}.bin").write_bytes(header + tokens)
    for root in (nano, llmc):
        source = build_source(config(root, "gpt2", 1), download=True)
        assert stream(source.train) == [*range(20)] and source.info.num_classes == 50257
        assert training_samples(config(root, "gpt2", 1)) == 19
    assert stream(build_source(config(nano, "gpt2", 1)).val) == [*range(9)]
    with pytest.raises(BadFileError, match=r"^data.args.vocabulary_size: is missing, and .*train.bin"):
        build_source(config(nano, "cl100k_base"))
    assert build_source(config(nano, "cl100k_base", vocabulary_size=99)).info.num_classes == 99


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", r"train.jsonl:1 is not JSON: .*; fix or remove"),
        (b'{"body": "x"}', r"train.jsonl:1 has no text 'text', but keys 'body'; write data.args.text_key"),
        (b"[1]", r"train.jsonl:1 has no text 'text', but list"),
        (b'{"text": null}', r"train.jsonl:1 has no text 'text', but a value of type NoneType"),
        (b'{"text": 5}', r"train.jsonl:1 has no text 'text', but a value of type int"),
        (b'{"text": "ab", "text": "c"}', r"train.jsonl:1 is not JSON: it has the key 'text' twice"),
        (b'{"text": "caf\xe9"}', r"train.jsonl:1 is not JSON: 'utf-8' codec can't decode byte 0xe9"),
        ('{"text": "ab"}'.encode("utf-16"), r"train.jsonl:1 is not JSON: 'utf-8' codec can't"),
        (b'{"text": "a\0b"}', r"train.jsonl:1 is not JSON: Invalid control character"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"train.jsonl:1 is not JSON: Exceeds the limit"),
        (b'{"text": "ab"}\n{"text": "\\ud83d"}', r"train.jsonl:2 has a lone surrogate.*\(\\ud83d\); replace"),
        (b'{"text": "a\\udcff"}', r"train.jsonl:1 has a lone surrogate.*at character 1"),
        (b'{"text": "a"}\n{"text": "b\\u0000"}', r"train.jsonl:2 has a NUL character \(at character 1 of"),
    ],
)
def test_a_line_without_text_is_named(line: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(line)
    with pytest.raises(BadFileError, match=said):
        prepared(tmp_path, tokenizer="characters" if b"u0000" in line else "bytes")
    assert not list(tmp_path.glob("tokens/*/index.json")), "nothing that ranks would read"
    (tmp_path / "train.jsonl").write_bytes(b'{"body": "abcde"}')
    assert len(prepared(tmp_path, text_key="body").train) == 1


def test_a_byte_order_mark_is_not_text_and_nul_characters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\r\n{"text": "c"}\r\n')
    (tmp_path / "train" / "b.txt").write_bytes(b"\xef\xbb\xbfa\r\n")
    names = prepared(tmp_path, tokenizer="characters", sequence_length=1).info.class_names
    assert names == ("\n", "\r", "a", "b", "c", "")
    assert len(prepared(tmp_path, tokenizer="bytes", sequence_length=1).train) == len("ab.c.a\r\n.") - 1
    (tmp_path / "train" / "b.txt").write_bytes("ab".encode("utf-16-le"))
    with pytest.raises(BadFileError, match=r"b.txt has a NUL character \(at byte 1\), like UTF.*; convert"):
        prepared(tmp_path, tokenizer="characters")


def test_validation_text_that_is_training_text_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path, "ab", "cd", "ab", "", part="train")
    corpus(tmp_path, "ab", "", "ab", "new", part="val")
    prepared(tmp_path, sequence_length=1)
    printed = "".join(capsys.readouterr())
    assert "1 of 2 different validation documents are also training documents" in printed
    assert "train: 10 tokens of 4 documents written, 1 of them without a token" in printed
    # Tokens that other programs wrote have no documents.
    tokens = np.random.default_rng(0).permutation(50_257).astype("<u2")
    for name, val, count in (("tail", tokens[-4000:], 16), ("mixed", np.r_[tokens[:2000], 1:2001], 8)):
        (root := tmp_path / name).mkdir()
        tokens.tofile(root / "train.bin")
        val.astype("<u2").tofile(root / "val.bin")
        build_source(config(root, "gpt2", 100), download=True)
        printed = "".join(capsys.readouterr())
        assert f"{count} of 16 compared passages of the validation tokens are also in the train" in printed
        assert "largest token" not in printed


def test_missing_files_of_a_series_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for names, words in (
        (["train-00000-of-00003", "train-00002-of-00003"], "2 of 3 files train-*-of-00003.jsonl are there"),
        (["train-1", "train-2", "train-4"], "3 of 4 files train-*.jsonl are there, without 3"),
        (["train-1-of-2", "train-2-of-2", "train-2019", "train-2024"], None),
    ):
        root = tmp_path / names[0]
        for name in names:
            corpus(root, part=name)
        prepared(root)
        printed = "".join(capsys.readouterr())
        assert " are there" not in printed if words is None else words in printed


def test_files_that_are_not_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train" / "linked").mkdir(parents=True)
    corpus(tmp_path / "train" / "linked")
    (tmp_path / "train" / "folder").symlink_to(tmp_path / "train" / "linked")
    for name in ("0.jsonl.gz", "train/1.jsonl.zst", "val.parquet", "test.txt", "notes.md", "train/.hidden"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "outside").mkdir()
    corpus(tmp_path / "outside" / "b")
    (tmp_path / "train" / "b.jsonl").symlink_to(tmp_path / "outside" / "b" / "train.jsonl")
    prepared(tmp_path)
    printed = "".join(capsys.readouterr())
    names = "0.jsonl.gz, test.txt, train/1.jsonl.zst, train/folder, val.parquet"
    assert f"5 files in {tmp_path} not read ({names})" in printed
    with pytest.raises(BadFileError, match=r"no text and no tokens.* \(but x.jsonl.gz\); add one"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "x.jsonl.gz").touch()
        prepared(tmp_path / "empty")


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    os.mkfifo(tmp_path / "train" / "a.txt")
    with pytest.raises(BadFileError, match=r"train/a.txt is a named pipe, not a regular file; put the text"):
        prepared(tmp_path)
    (tmp_path / "train" / "a.txt").unlink()
    for name in ("train.jsonl", "train.bin"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(BadFileError, match=rf"{name} is a device, not a regular file"):
            prepared(tmp_path, tokenizer="gpt2")
        (tmp_path / name).unlink()
    corpus(tmp_path)
    with pytest.raises(BadFileError, match=r"data.args.tokenizer: /dev/zero is a device, not a regular"):
        prepared(tmp_path, tokenizer="/dev/zero")


def test_a_vocabulary_size_that_is_not_the_tokenizers_is_refused(tmp_path: Path) -> None:
    words = r"^data.args.vocabulary_size: 300, but tokenizer bytes has 257 tokens; take it out"
    with pytest.raises(BadFileError, match=words):
        prepared(corpus(tmp_path), vocabulary_size=300)
    assert prepared(tmp_path, vocabulary_size=257).info.num_classes == 257


def word_tokenizer(folder: Path, *specials: str, unknown: str | None = "[UNK]") -> tuple[str, Any]:
    """Write a tokenizer.json of the words a, b and c; return its path and the tokenizer."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra lm: pip install 'hpc-train[lm]'")
    words = {"a": 0, "b": 1, "c": 2} | ({} if unknown is None else {unknown: 3})
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown or "-"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(specials))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json"), made


def test_truncation_and_padding_of_a_tokenizer_file_are_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, made = word_tokenizer(tmp_path / "words", "</s>")
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(path)
    source = prepared(corpus(tmp_path / "data", "a b c a", "c"), tokenizer=path, sequence_length=1)
    assert stream(source.train) == [0, 1, 2, 0, 4, 2, 4]
    assert "unknown" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("unknown", "text", "tokens", "words"),
    [
        # A saved dropout would draw the merges at random.
        (None, "ab" * 20, [2] * 20, None),
        (None, "abé ab", [2, 2], r"2 characters of the text have no token and are lost: ' ', '\xe9'"),
        (None, "a<s>b", [0, 4, 1], None),
        ("u", "ac", [0, 3], "1 of 2 tokens are u, the unknown token"),
    ],
)
def test_text_that_a_tokenizer_file_loses_is_counted(
    unknown: str | None,
    text: str,
    tokens: list[int],
    words: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra lm: pip install 'hpc-train[lm]'")
    pieces = {"a": 0, "b": 1, "ab": 2, "u": 3}
    model = tokenizers.models.BPE(pieces, [("a", "b")], dropout=0.5, unk_token=unknown)
    made = tokenizers.Tokenizer(model)
    made.add_tokens(["<s>"])
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    source = prepared(
        corpus(tmp_path / "data", text), tokenizer=str(tmp_path / "tokenizer.json"), sequence_length=1
    )
    assert stream(source.train) == [*tokens, 5]
    printed = "".join(capsys.readouterr())
    assert "if that is not intended" not in printed if words is None else words in printed


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path: Path) -> None:
    path, made = word_tokenizer(tmp_path / "words", "</s>")
    source = prepared(corpus(tmp_path / "data", "a </s> b"), tokenizer=path, sequence_length=1)
    assert stream(source.train) == [0, 3, 1, 4], "</s> is an unknown word"
    made.add_tokens(["</s> "])
    made.model = type(made.model)({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]")
    made.save(path)
    words = r"train.jsonl:2 has the token of the end of a document \(1\) within its text; remove its name"
    with pytest.raises(BadFileError, match=words):
        prepared(corpus(tmp_path / "data", "a", "a </s>"), tokenizer=path)


def test_a_text_that_a_tokenizer_rejects_is_named(tmp_path: Path) -> None:
    path, _ = word_tokenizer(tmp_path / "words", "</s>", unknown=None)
    with pytest.raises(BadFileError, match=r"train.jsonl:2 can't be encoded: .*; fix the text, or write"):
        prepared(corpus(tmp_path / "data", "a b", "a d"), tokenizer=path)


def test_an_encoding_that_is_not_fetched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ConnectionError("no network")

    fake = SimpleNamespace(list_encoding_names=lambda: ["gpt2"], get_encoding=fail)
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    with pytest.raises(BadFileError, match=r"tiktoken can't load gpt2: no network; run prepare with network"):
        prepared(corpus(tmp_path), tokenizer="gpt2")


def raw(root: Path, content: bytes, name: str = "train.bin", **args: Any) -> DataSource:
    """Return the data of a token file that another program wrote."""
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(content)
    return build_source(config(root, "gpt2", 1, **args), download=True)


IDS = [5, 300, 7, 50256, 40000, 9, 2000, 1, 13]
U2, U4, I8 = (np.array(IDS, kind).tobytes() for kind in ("<u2", "<u4", "<i8"))
WIDE = {"vocabulary_size": 128256}


def llmc(magic: int, version: int, tokens: bytes, count: int = len(IDS), order: str = "<") -> bytes:
    return struct.pack(f"{order}iii", magic, version, count).ljust(1024, b"\0") + tokens


@pytest.mark.parametrize(
    ("content", "args"),
    [
        (U2, {}),
        (U4, {}),
        (np.array(IDS, "<i4").tobytes(), WIDE),
        (U2, WIDE | {"dtype": "uint16"}),
        (llmc(20240520, 1, U2), {}),
        (llmc(20240801, 7, U4), WIDE),
    ],
)
def test_variants_of_raw_tokens_are_read(content: bytes, args: dict[str, Any], tmp_path: Path) -> None:
    assert stream(raw(tmp_path, content, **args).train) == IDS


@pytest.mark.parametrize(
    ("content", "args", "words"),
    [
        (U4[:-1], {}, "35 bytes, not whole uint32 tokens"),
        (U2[:7], {}, "7 bytes, not whole uint16 tokens"),
        (I8, {}, "look like int64"),
        (I8, WIDE, "look like int64"),
        (np.array([*IDS, 196, 197], ">u2").tobytes(), {}, "look big-endian"),
        (np.arange(1, 99).astype(">u2").tobytes(), {}, "look big-endian"),
        (np.array(IDS, ">u4").tobytes(), WIDE, "look big-endian"),
        (np.array([*IDS * 999, *[0] * 2048], "<u2").tobytes(), {}, "its last tokens are all 0"),
        (U2[:16], WIDE, "look like uint16; write data.args.dtype: uint16"),
        (np.array([*IDS, 60000], "<u2").tobytes(), {}, r"has the token 60000 at place 9 \(byte 18\)"),
        (np.array([*IDS, 128000], "<u4").tobytes(), {}, r"has the token 128000 at place 9 \(byte 36\)"),
        (llmc(20240520, 1, U2, 10), {}, "its header says 1044"),
        (llmc(20240520, 1, U2, -9), {}, "its header says 1006"),
        (llmc(20240520, 2, U2), {}, "llm.c's of magic 20240520, version 2"),
        (llmc(20240522, 1, U2), {}, "llm.c's of magic 20240522, version 1"),
        (llmc(20240520, 1, np.array(IDS, ">u2").tobytes(), order=">"), {}, "in big-endian byte order"),
        (llmc(20240520, 1, U2), {"dtype": "uint32"}, "^data.args.dtype: uint32, but .* has uint16 by its"),
        (b"\x93NUMPY\x01\0" + bytes(100), {}, "is a NumPy file, not raw tokens; write it again with numpy"),
        (b"PK\x03\x04" + bytes(100), {}, "is a zip archive"),
        (b"To be, or not to be: that is the question.\n" * 3, {}, "is text, not tokens; rename it"),
    ],
)
def test_other_variants_of_raw_tokens_are_refused(
    content: bytes, args: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(BadFileError, match=words):
        raw(tmp_path, content, **args)


@pytest.mark.parametrize(
    ("code", "kind", "lengths", "words"),
    [
        (4, "<i4", (4, 5), None),
        (8, "<u2", (4, 5), None),
        (5, "<i8", (4, 5), r"train.idx is not an index of Megatron's .*code 5\)"),
        (8, "<u2", (4, 4), "has 18 bytes, and its .idx file says 16; copy or write both again"),
        (8, "<u2", (4, 9), "has 18 bytes, and its .idx file says 26"),
        (8, "<u2", (), "has 18 bytes, and its .idx file says 0"),
        (8, "<u2", (1 << 60,), "train.idx ends before its 1152921504606846976 sequences; copy it again"),
    ],
)
def test_megatrons_index_has_the_dtype_and_the_number_of_tokens(
    code: int,
    kind: str,
    lengths: tuple[int, ...],
    words: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count = lengths[0] if lengths and lengths[0] > len(IDS) else len(lengths)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1)
    if count == len(lengths):
        offsets = np.cumsum([0, *lengths[:-1]]) * np.dtype(kind).itemsize
        index += np.array(lengths, "<i4").tobytes() + offsets[:count].astype("<i8").tobytes()
    (tmp_path / "train.idx").write_bytes(index)
    if words is None:
        assert stream(raw(tmp_path, np.array(IDS, kind).tobytes()).train) == IDS
        assert "not read" not in "".join(capsys.readouterr())
        return
    with pytest.raises(BadFileError, match=words):
        raw(tmp_path, np.array(IDS, kind).tobytes())


def test_a_vocabulary_far_beyond_the_tokens_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = np.array([1, 64, 3], "<u2").tobytes()
    raw(tmp_path, content)
    printed = "".join(capsys.readouterr())
    assert "the largest token is 64, and tokenizer gpt2 has 50257 tokens; if the files" in printed
    raw(tmp_path, content, vocabulary_size=50257)
    assert "largest" not in "".join(capsys.readouterr())


def test_raw_splits_of_different_dtypes_are_refused(tmp_path: Path) -> None:
    np.array(IDS, "<u4").tofile(tmp_path / "val.bin")
    words = r"train.bin has uint16 tokens and .*val.bin uint32; write it again"
    with pytest.raises(BadFileError, match=words):
        raw(tmp_path, np.array(IDS, "<u2").tobytes())


def test_missing_data_and_wrong_arguments_are_named(tmp_path: Path) -> None:
    root = corpus(tmp_path / "data", "abc")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "train.txt").write_bytes(b"caf\xe9")
    for given, words in (
        (config(tmp_path / "nowhere"), "nowhere does not exist on this machine; fix the path"),
        (config(root / "train.jsonl"), "is a file; write the folder that contains it"),
        (config(tmp_path), "has no text and no tokens: .*train.bin, nor shards in .*tokens; add one"),
        (config(tmp_path / "latin", "characters"), r"train.txt is not UTF-8 text \(at byte 3\); convert it"),
        (config(root, sequence_length=9), "train has 4 tokens, and a sequence of 9 needs one more"),
        (config(root, "my/tokenizer.json"), r"data.args.tokenizer: .*json can't be read: No such .*; fix"),
        (config(root, sequence_len=9), "data.args.sequence_len: .* no argument .*; did you mean"),
    ):
        with pytest.raises(BadFileError, match=words):
            build_source(given, download=True)


class FakeTikToken:
    """What is used of tiktoken: words of a text are tokens."""

    n_vocab, eot_token = 70_000, 69_999

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [[60_000 + len(word) for word in text.split()] for text in texts]

    def decode_single_token_bytes(self, token: int) -> bytes:
        if not 60_000 < token < 60_010:
            raise KeyError(token)
        return b"x" * (token - 60_000) + b" "


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(list_encoding_names=lambda: ["wide"], get_encoding=lambda name: FakeTikToken())
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    source = prepared(corpus(tmp_path, "a bcd", "ef"), tokenizer="wide", sequence_length=1)
    assert stream(source.train) == [60_001, 60_003, 69_999, 60_002, 69_999]
    assert find_shards(config(tmp_path, "wide"), TokensArgs(tokenizer="wide")).dtype == "uint32"
    assert decoded(source.info, [60_001, 60_003, 69_999]) == "x xxx "
    with pytest.raises(BadFileError, match=r"'gpt3' is unknown; write one of bytes, characters, wide, or"):
        prepared(tmp_path, tokenizer="gpt3")


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("tiktoken", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    for tokenizer in ("gpt2", str(tmp_path / "tokenizer.json")):
        with pytest.raises(BadFileError, match=r"is not installed; run `pip install 'hpc-train\[lm\]'`"):
            prepared(corpus(tmp_path / "data"), tokenizer=tokenizer)


def test_a_tokenizer_file_is_kept_beside_its_shards(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra lm: pip install 'hpc-train[lm]'")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["[UNK]", "<|endoftext|>"])
    made.train_from_iterator(DOCUMENTS, trainer)
    file = tmp_path / "mine" / "tokenizer.json"
    file.parent.mkdir()
    made.save(str(file))
    source = prepared(corpus(tmp_path / "data"), tokenizer=str(file), sequence_length=1)
    expected = [t for text in DOCUMENTS for t in (*made.encode(text).ids, made.token_to_id("<|endoftext|>"))]
    assert stream(source.train) == expected
    file.write_text("{}")
    assert decoded(source.info, expected[:3]) == made.decode(expected[:3])
    with pytest.raises(BadFileError, match=r"tokenizer.json can't be read: "):
        prepared(tmp_path / "data", tokenizer=str(file))


def test_ten_gigabytes_open_without_being_read_or_kept_in_memory(tmp_path: Path) -> None:
    """Sparse files: what is not read costs nothing."""
    count, per_shard = 50, 100_000_000
    what = {"dtype": "uint16", "vocabulary_size": 50257, "tokenizer": "gpt2"}
    entry = {"tokens": per_shard, "documents": 0, "xxh3_128": ""}
    (folder := tmp_path / "tokens" / "gpt2-0123456789ab").mkdir(parents=True)
    for number in range(count):
        path = folder / f"train-{number:05d}.tokens"
        path.write_bytes(header_of({**what, **entry}))
        os.truncate(path, size_of_shard(per_shard, 0, "uint16"))
    files = [{"file": f"train-{number:05d}.tokens", **entry} for number in range(count)]
    index = what | {"end_of_document": 50256, "characters": None, "parts": {"train": files}}
    index |= {"fingerprint": index_digest(index)}
    (folder / "index.json").write_text(json.dumps(index))
    before = resource.getrusage(resource.RUSAGE_SELF)
    source = build_source(config(tmp_path, "gpt2", 1024))
    assert len(source.train) == (count * per_shard - 1) // 1024
    source.train.batch(torch.arange(0, len(source.train), 40_000))  # type: ignore[union-attr]
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (after.ru_maxrss - before.ru_maxrss) << 10 < 100e6
    assert after.ru_inblock - before.ru_inblock < 1 << 14, "blocks of 512 bytes: nothing reads it all"
