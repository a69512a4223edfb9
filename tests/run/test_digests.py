"""``digests.bin``: fixed records, in the order of their steps, of which a damaged one is never used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from hpc_train.errors import BadFileError
from hpc_train.run import digests as module
from hpc_train.run.digests import (
    MAX_PARTS,
    RECORD_BYTES,
    DigestsFile,
    PartDigest,
    RecordsFile,
    StepDigest,
    part_digests,
    parts_of,
    read_digests,
    read_parts,
    shard_digests,
)

HEADER_BYTES = 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "digests.bin"


def digest(step: int, attempt: int = 1) -> StepDigest:
    return StepDigest(
        step, (step * 0x9E3779B97F4A7C15) % 2**64, 1 / step, None if step % 3 else step / 7, attempt
    )


def write_digests(path: Path, attempts: Sequence[int]) -> None:
    """Write a digest of each step from 1 on, by the attempt that trained it."""
    path.unlink(missing_ok=True)
    file = DigestsFile(path, 0)
    file.append([digest(step, attempt) for step, attempt in enumerate(attempts, 1)])
    file.close()


def write(path: Path, steps: range, resumed_step: int = 0, attempt: int = 1) -> None:
    file = DigestsFile(path, resumed_step)
    for begin in range(0, len(steps), 4):  # as training writes them: several at a time
        file.append([digest(step, attempt) for step in steps[begin : begin + 4]])
    file.sync()
    file.close()


def test_digests_are_read_as_written(path: Path) -> None:
    assert list(read_digests(path)) == []
    write(path, range(1, 100))
    assert path.stat().st_size == HEADER_BYTES + 99 * RECORD_BYTES
    assert list(read_digests(path)) == [digest(step) for step in range(1, 100)]
    for first, last in ((1, 1), (50, 53), (99, 200), (100, 200), (0, 2)):
        steps = [step for step in range(1, 100) if first <= step <= last]
        assert [each.step for each in read_digests(path, first, last)] == steps


def test_a_resume_withdraws_later_digests(path: Path) -> None:
    write(path, range(1, 12))
    write(path, range(8, 10), resumed_step=7, attempt=2)
    attempts = [(each.step, each.attempt) for each in read_digests(path)]
    assert attempts == [*((step, 1) for step in range(1, 8)), (8, 2), (9, 2)]


def test_a_file_may_begin_late(path: Path) -> None:
    """A run that an earlier version began has digests from its resume on."""
    write(path, range(41, 50), resumed_step=40)
    assert [each.step for each in read_digests(path, 40, 43)] == [41, 42, 43]


@pytest.mark.parametrize("place", ["tail", "middle", "header"])
def test_damage_is_cut_or_omitted(place: str, path: Path) -> None:
    write(path, range(1, 12))
    content = bytearray(path.read_bytes())
    if place == "tail":
        path.write_bytes(content[:-7])
        steps = list(range(1, 11))
    elif place == "middle":
        content[HEADER_BYTES + 4 * RECORD_BYTES + 17] ^= 1
        path.write_bytes(content)
        steps = [1, 2, 3, 4, *range(6, 12)]
    else:
        path.write_bytes(b"other" + content[5:])
        steps = []
    assert [each.step for each in read_digests(path)] == steps
    write(path, range(12, 14), resumed_step=11)
    assert [each.step for each in read_digests(path)] == [*steps, 12, 13]
    assert (path.stat().st_size - HEADER_BYTES) % RECORD_BYTES == 0


def test_a_later_version_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERSION", 2)
    write(path, range(1, 3))
    monkeypatch.setattr(module, "VERSION", 1)
    with pytest.raises(BadFileError, match="has version 2 and this hpc-train reads 1"):
        list(read_digests(path))


def test_the_size_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEP", 5)
    write(path, range(1, 12))
    assert path.stat().st_size == HEADER_BYTES + 5 * RECORD_BYTES


def test_numbers_are_compared_by_their_bits(path: Path) -> None:
    one = StepDigest(1, 5, 0.1, 0.2)
    assert one.differences(StepDigest(1, 5, 0.1, 0.2, attempt=9)) == []
    others = StepDigest(1, 6, math.nextafter(0.1, 1), math.nextafter(0.2, 1))
    assert one.differences(others) == ["samples", "loss", "grad_norm"]
    assert one.differences(StepDigest(1, 5, 0.1, None)) == [], "the other has none to compare"
    assert StepDigest(1, 5, 0.0, None).differences(StepDigest(1, 5, -0.0, None)) == ["loss"]
    assert StepDigest(1, 5, math.nan, None).differences(StepDigest(1, 5, -math.nan, None)) == []


def part(step: int, part: int) -> PartDigest:
    return PartDigest(step, part, step, 2**64 - part, attempt=1, ranks=2)


def test_digests_of_parts_are_read_by_step_and_withdrawn(path: Path) -> None:
    file = RecordsFile(path, 0, PartDigest)
    for step in (32, 64, 96):
        file.append([part(step, number) for number in (3, 7, 2**64 - 1)])
    file.close()
    assert [step for step, _ in read_parts(path)] == [32, 64, 96]
    assert dict(read_parts(path))[64] == {number: part(64, number) for number in (3, 7, 2**64 - 1)}
    assert list(read_digests(path)) == [], "another file"
    file = RecordsFile(path, 64, PartDigest)
    file.append([part(128, 3)])
    file.close()
    assert [(step, len(digests)) for step, digests in read_parts(path)] == [(32, 3), (64, 3), (128, 1)]
    assert part(64, 3).differences(PartDigest(64, 3, 1, 1)) == ["weights", "optimizer state"]


def test_a_part_is_a_module_or_contains_several() -> None:
    names = ["model.a.b.weight", "ema.a.b.weight", "optimizer.a.b.weight.exp_avg", "model.scale"]
    assert parts_of(names) == dict.fromkeys(names[:3], "a.b") | {"model.scale": ""}
    blocks = [f"model.blocks.{number}.{name}.weight" for number in range(40) for name in ("one", "two")]
    assert len({*parts_of(blocks).values()}) == 40 <= MAX_PARTS
    assert {*parts_of([f"model.{number}.weight" for number in range(MAX_PARTS + 1)]).values()} == {""}


def test_a_digest_of_a_part_depends_on_all_of_its_tensors() -> None:
    tensors = {
        "model.a.weight": "1",
        "ema.a.weight": "2",
        "optimizer.a.weight.step": "3",
        "model.b.bias": "4",
    }
    digests = part_digests(tensors, 0)
    assert digests == part_digests(dict(reversed(tensors.items())), 0)
    assert digests["b"][1] == 0, "without optimizer state"
    for changed, place in (("model.a.weight", 0), ("ema.a.weight", 0), ("optimizer.a.weight.step", 1)):
        others = part_digests(tensors | {changed: "5"}, 0)
        assert others["a"][place] != digests["a"][place] and others["a"][1 - place] == digests["a"][1 - place]
    assert part_digests(tensors, 1)["a"] != digests["a"], "swapped ranks would have the same sum"


def test_pieces_of_a_saved_tensor_have_one_digest(path: Path) -> None:
    pieces = {
        "b": torch.ones(2, 2),
        "a": torch.arange(300_000.0),
        "a..2": torch.ones(3),
        "a..1": torch.zeros(5),
        "a..10": torch.full((1,), 7.0),
    }
    save_file(pieces, path, {"step": "3"})
    whole = b"".join(pieces[key].numpy().tobytes() for key in ("a", "a..1", "a..2", "a..10"))
    expected = {
        "a": xxhash.xxh3_64_hexdigest(whole),
        "b": xxhash.xxh3_64_hexdigest(pieces["b"].numpy().tobytes()),
    }
    assert shard_digests(path) == expected
    content = path.read_bytes()
    for damaged in (b"", content[:7], content[:20], b"\xff" * 40, content[:8] + b"[" + content[9:]):
        path.write_bytes(damaged)
        with pytest.raises(BadFileError, match="can't be read"):
            shard_digests(path)
