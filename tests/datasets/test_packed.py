"""A pack gives the samples of its image folder, and is never read where it is not intact."""

from __future__ import annotations

import io
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hpc_train.errors import BadFileError, TransientStorageError
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import file_content
from hpc_train.paths import RunPaths
from hpc_train.training.datasets import packing
from hpc_train.training.datasets.base import DataSource
from hpc_train.training.datasets.batches import evaluation_batches, training_batches
from hpc_train.training.datasets.building import build_source
from hpc_train.training.datasets.decoding import read_image
from hpc_train.training.datasets.packed import FOOTER, DamagedPackError, PackedFiles, PackedPixels, hash_of
from hpc_train.training.datasets.sampler import Position
from hpc_train.training.datasets.skipping import BadSamples
from tests.datasets.samples import CPU, experiment
from tests.waiting import HANG_LIMIT_S

#: Sides and format of the images of a folder, and whether they are stored decoded.
FOLDERS = {
    "small JPEG": ([(12, 10)], "jpg", "RGB", True),
    "small PNG": ([(12, 10)], "png", "RGB", True),
    "gray PNG": ([(12, 10)], "png", "L", True),
    "large JPEG": ([(90, 70)], "jpg", "RGB", False),
    "JPEG of two sizes": ([(12, 10), (14, 10)], "jpg", "RGB", False),
    "large and small JPEG": ([(90, 70), (12, 10)], "jpg", "RGB", False),
}


def image(sides: tuple[int, int], seed: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (sides[1], sides[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def make_folder(root: Path, kind: str = "small JPEG") -> Path:
    sides, suffix, mode, _ = FOLDERS[kind]
    for split, count in (("train", 6), ("val", 3)):
        for name in ("ant", "bee"):
            for number in range(count):
                path = root / split / name / ("deep" if number == 0 else ".") / f"{number}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                seed = random.Random(f"{split} {name} {number}").randrange(1 << 16)
                image(sides[number % len(sides)], seed, mode).save(path)
    return root


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "_checked", set())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "images")


def folder_of(root: Path, **data: Any) -> DataSource:
    return build_source(DataConfig(name="imagefolder", root=str(root), **data))


def with_cache(root: Path, **data: Any) -> DataConfig:
    return DataConfig(name="imagefolder", root=str(root), cache=str(root.parent / "packs"), **data)


def packed(root: Path, **data: Any) -> DataSource:
    """Return the source that ranks read after ``prepare``."""
    build_source(with_cache(root, **data), download=True)
    return build_source(with_cache(root, **data))


def pack_of(root: Path) -> Path:
    (path,) = (root.parent / "packs").iterdir()
    return path


def batches(source: DataSource, **keys: Any) -> list[Any]:
    config = experiment(global_batch_size=4, micro_batch_size=2, **keys)
    with training_batches(source, config, Position(1), 5, 0, 1, CPU) as training:
        found = [batch for _, slots in training for batch in slots]
    assert source.val is not None
    return [*found, *evaluation_batches(source.val, config, 0, 1, CPU)]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 3
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        # A convolution's last bit may depend on the layout in memory.
        assert one.inputs.stride() == other.inputs.stride()
        assert one.targets.dtype == other.targets.dtype and torch.equal(one.valid, other.valid)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("cache_pixels", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {"image_size": 8},
        {"image_size": 8, "augment": {"random_resized_crop": {}, "hflip": 0.5}},
        {"image_size": 4, "augment": {"random_resized_crop": {}}},
        {"image_size": 12, "augment": {"crop_padding": 2, "hflip": 0.5, "vflip": 0.5, "randaugment": {}}},
    ],
    ids=["resized", "crops", "crops of reduced images", "padded crops"],
)
def test_batches_are_bitwise_those_of_the_folder(
    tmp_path: Path, kind: str, cache_pixels: bool, keys: dict[str, Any]
) -> None:
    root = make_folder(tmp_path / "images", kind)
    args = {"channels": 1 if FOLDERS[kind][2] == "L" else 3}
    ours = packed(root, args=args, cache_pixels=cache_pixels, **keys)
    theirs = folder_of(root, args=args, **keys)
    assert ours.info == theirs.info and len(ours.train) == len(theirs.train) == 12
    assert_same(batches(ours, **keys), batches(theirs, **keys))


@pytest.mark.parametrize("kind", FOLDERS)
def test_small_images_that_are_alike_are_stored_decoded(tmp_path: Path, kind: str) -> None:
    source = packed(make_folder(tmp_path / "images", kind))
    kinds = {type(source.train), type(source.val)}
    assert kinds == {PackedPixels if FOLDERS[kind][3] else PackedFiles}


def test_crops_that_decode_at_a_fraction_read_files_as_they_are(root: Path) -> None:
    crops = {"augment": {"random_resized_crop": {}}}
    assert isinstance(packed(root, image_size=7, **crops).train, PackedPixels)
    assert isinstance(packed(root, image_size=6, **crops).train, PackedFiles)
    assert isinstance(build_source(with_cache(root, image_size=7, **crops)).train, PackedPixels)


def num_decoded(source: DataSource) -> int:
    return sum(isinstance(read_image(source.train.content(i), 3, i), torch.Tensor) for i in range(12))


def test_pixels_are_stored_of_images_that_are_always_decoded_in_full(tmp_path: Path) -> None:
    root = make_folder(tmp_path / "images", "large and small JPEG")
    crops = {"augment": {"random_resized_crop": {}}}
    # The shorter sides are 70 and 10 pixels.
    expected = [({"image_size": 5, **crops}, 0), ({"image_size": 8, **crops}, 6)]
    expected += [({"image_size": [36, 90], **crops}, 12), ({"image_size": 8}, 12)]
    for keys, count in expected:
        with pytest.raises(BadFileError, match="has no pack of the images"):
            build_source(with_cache(root, cache_pixels=True, **keys))
        assert num_decoded(packed(root, cache_pixels=True, **keys)) == count
    for keys, count in expected:  # none has replaced another
        assert num_decoded(build_source(with_cache(root, cache_pixels=True, **keys))) == count
    with pytest.raises(BadFileError, match="has no pack of the images"):
        build_source(with_cache(root, image_size=8))


def test_batches_from_loader_processes_are_the_same(root: Path) -> None:
    assert_same(batches(packed(root), workers=2), batches(folder_of(root)))


def test_a_folder_test_is_packed_as_validation(root: Path) -> None:
    (root / "val").rename(root / "test")
    source = packed(root)
    assert_same(batches(source), batches(folder_of(root)))
    assert source.val.path(0) == root / "test/ant/1.jpg"
    image((12, 10), 9).save(root / "test/ant/new.jpg")
    with pytest.raises(BadFileError, match="has no pack of the images"):
        build_source(with_cache(root))


def test_samples_have_the_names_of_their_source_files(root: Path) -> None:
    ours, theirs = packed(root).train, folder_of(root).train
    assert [ours.path(i) for i in range(12)] == [theirs.path(i) for i in range(12)]


def test_without_prepare_and_with_a_pack_of_other_images_it_is_an_error(root: Path) -> None:
    words = r"^data\.cache: .* has no pack of the images.*; run `hpc-train prepare`"
    with pytest.raises(BadFileError, match=words):
        build_source(with_cache(root))
    packed(root)
    image((12, 10), 9).save(root / "train/ant/new.jpg")
    with pytest.raises(BadFileError, match=words):
        build_source(with_cache(root))
    assert len(packed(root).train) == 13


def test_prepare_finds_images_that_changed_in_place(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_content, "MOST_FILES", 2)
    packed(root)
    changed = root / "train/bee/5.jpg"  # neither its content nor its size is part of the name
    seen = changed.stat()
    image((12, 10), 9).save(changed, quality=20)
    os.truncate(changed, seen.st_size)  # equal size: zeros follow the end of the image
    os.utime(changed, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    monkeypatch.setattr(packing, "_checked", set())
    assert_same(batches(packed(root)), batches(folder_of(root)))
    assert f"{changed} has changed since it was packed, one of 1; writing it again" in capsys.readouterr().err


def test_two_data_sets_share_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal names, sizes and times; as few bytes as possible are part of a pack's name."""
    monkeypatch.setattr(file_content, "MOST_FILES", 1)
    roots = [tmp_path / name for name in ("raw", "clean")]
    for root, gray in zip(roots, (10, 200), strict=True):
        for number in range(6):
            path = root / f"train/ant/{number}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (80, 80), (gray if number else 7,) * 3).save(path)
            os.utime(path, (1_600_000_000, 1_600_000_000))
    expected = [folder_of(root).train[5][0] for root in roots]  # type: ignore[index]
    packed(roots[0])
    with pytest.raises(BadFileError, match="has no pack of the images"):
        build_source(with_cache(roots[1]))
    packed(roots[1])
    for root, pixels in zip(roots, expected, strict=True):
        content, _ = build_source(with_cache(root)).train.file_content(5)  # type: ignore[union-attr]
        assert torch.equal(read_image(content, 3, 5), pixels)  # type: ignore[arg-type]


def test_prepare_keeps_an_intact_pack(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(root)
    before = pack_of(root).stat().st_ino
    monkeypatch.setattr(packing, "_checked", set())
    packed(root)
    assert pack_of(root).stat().st_ino == before
    assert "intact and up to date" in capsys.readouterr().err


STORED = [("small JPEG", False), ("large JPEG", False), ("large JPEG", True)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("kind", "cache_pixels"), STORED)
def test_a_damaged_pack_is_an_error_never_other_pixels(
    tmp_path: Path, kind: str, cache_pixels: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(tmp_path / "images", kind)
    keys: dict[str, Any] = {"image_size": 8, "cache_pixels": cache_pixels}
    good = batches(packed(root, **keys), image_size=8)
    drawn, path = random.Random(seed), pack_of(root)
    content = bytearray(path.read_bytes())
    if seed % 3:
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
    else:
        del content[drawn.randrange(len(content)) :]
    path.write_bytes(content)
    try:
        # What only prepare reads may be damaged.
        assert_same(batches(build_source(with_cache(root, **keys)), image_size=8), good)
    except BadFileError as error:
        assert str(error).startswith(f"data.cache: {path} is not a complete, undamaged pack: ")
        assert str(error).endswith("remove the file, then run `hpc-train prepare`")
    monkeypatch.setattr(packing, "_checked", set())
    assert_same(batches(packed(root, **keys), image_size=8), good)


@pytest.mark.parametrize(("kind", "cache_pixels"), STORED)
def test_a_damaged_sample_is_named_and_never_skipped(tmp_path: Path, kind: str, cache_pixels: bool) -> None:
    root = make_folder(tmp_path / "images", kind)
    source = packed(root, image_size=8, cache_pixels=cache_pixels)
    damage(pack_of(root), int(source.train.ends[6]))
    with pytest.raises(BadFileError, match=r"the hash of sample 6 \(.*/train/bee/1\.jpg\)"):
        with_skips(source, tmp_path)


def with_skips(source: DataSource, folder: Path) -> list[Any]:
    config = experiment(
        global_batch_size=12, micro_batch_size=12, image_size=8, on_bad_sample="skip", max_bad_samples=3
    )
    bad = BadSamples(RunPaths(folder / "run"), 1, 0)
    (folder / "run/attempts/1").mkdir(parents=True, exist_ok=True)
    with training_batches(source, config, Position(0), 2, 0, 1, CPU, bad) as training:
        found = [batch for _, slots in training for batch in slots]
    return [*found, *(sorted(bad._seen))]


@pytest.mark.parametrize("cache_pixels", [False, True])
def test_a_bad_image_is_replaced_as_in_the_folder(root: Path, tmp_path: Path, cache_pixels: bool) -> None:
    broken = root / "train/bee/1.jpg"
    broken.write_bytes(broken.read_bytes()[:30])
    source = packed(root, image_size=8, on_bad_sample="skip", cache_pixels=cache_pixels)
    assert isinstance(source.train, PackedFiles)
    *ours, our_bad = with_skips(source, tmp_path / "ours")
    *theirs, their_bad = with_skips(folder_of(root), tmp_path / "theirs")
    assert our_bad == their_bad == ("train", 6)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


def test_prepare_names_an_image_that_it_can_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_content, "MOST_FILES", 2)  # the others are not read for the pack's name
    for name, said in (
        ("5", r"^data\.cache: .*/5\.jpg can't be packed: "),
        ("1", r"^data\.root: .*/1\.jpg can't "),
    ):
        (root / f"train/ant/{name}.jpg").unlink()
        (root / f"train/ant/{name}.jpg").symlink_to(root / "nowhere.jpg")
        with pytest.raises(BadFileError, match=said):
            packed(root)
        assert list((root.parent / "packs").iterdir()) == []


def test_images_that_change_meanwhile_are_no_pack(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = packing._read

    def reading(*arguments: Any) -> Any:
        image((12, 10), 9).save(root / "train/ant/new.jpg")
        return read(*arguments)

    monkeypatch.setattr(packing, "_read", reading)
    with pytest.raises(BadFileError, match=r"^data\.root: .* changed while they were packed; run"):
        packed(root)
    assert list((root.parent / "packs").iterdir()) == []


def test_two_prepares_at_once_write_one_pack(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    finish = packing._PackWriter.finish

    def finish_together(writer: Any, header: dict[str, Any]) -> None:
        both.wait(HANG_LIMIT_S)  # each has written its samples, neither has renamed its file
        finish(writer, header)

    monkeypatch.setattr(packing._PackWriter, "finish", finish_together)
    with ThreadPoolExecutor(2) as pool:
        sources = list(pool.map(lambda _: packed(root), range(2)))
    assert pack_of(root).suffix == ".pack"
    for source in sources:
        assert_same(batches(source), batches(folder_of(root)))


def test_a_run_reads_the_pack_that_it_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = packed(root)
    good = batches(source)
    before = pack_of(root).stat().st_ino
    os.utime(root / "train/bee/5.jpg", (1, 1))
    monkeypatch.setattr(packing, "_checked", set())
    packed(root)
    assert pack_of(root).stat().st_ino != before
    assert_same(batches(source), good)


def test_what_a_killed_prepare_left_is_removed_after_a_day(root: Path) -> None:
    packs = root.parent / "packs"
    packs.mkdir()
    old, new = packs / ".a.pack.0", packs / ".b.pack.0"
    for path, age_s in ((old, 2 * 24 * 3600), (new, 0)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s,) * 2)
    packed(root)
    assert new.exists() and not old.exists()


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header, with a hash that fits."""
    import json

    import xxhash

    content = path.read_bytes()
    nbytes, _, magic = FOOTER.unpack(content[-FOOTER.size :])
    header = json.loads(content[-FOOTER.size - nbytes : -FOOTER.size])
    change(header)
    text = json.dumps(header).encode()
    footer = FOOTER.pack(len(text), xxhash.xxh3_128_digest(text), magic)
    path.write_bytes(content[: -FOOTER.size - nbytes] + text + footer)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.clear(),
        lambda header: header.update(classes=["ant"]),
        lambda header: header.update(classes=[3, 4]),
        lambda header: header["splits"].pop("train"),
        lambda header: header["splits"].update(other=header["splits"]["val"]),
        lambda header: header["splits"]["train"].update(folder="../../etc"),
        lambda header: header["splits"]["train"].update(samples=11),
        lambda header: header["splits"]["train"].update(samples=-1),
        lambda header: header["splits"]["train"].update(samples=True),
        lambda header: header["splits"]["train"].update(pixels=[10, 12]),
        lambda header: header["splits"]["train"].update(pixels=[10, 12, 4]),
        lambda header: header["splits"]["train"].update(pixels=[10, 13, 3]),
        lambda header: header["splits"]["train"].update(has_decoded=1),
        lambda header: header["splits"]["train"]["arrays"].pop("ends"),
        lambda header: header["splits"]["train"]["arrays"]["ends"].update(offset=1 << 61),
        lambda header: header["splits"]["train"]["arrays"]["ends"].update(nbytes=1 << 61),
        lambda header: header["splits"]["train"]["arrays"]["ends"].update(nbytes=3),
        lambda header: header["splits"]["train"]["arrays"].update(ends=[]),
    ],
)
def test_a_header_of_other_content_is_refused(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    packed(root)
    rewritten(pack_of(root), change)
    with pytest.raises(DamagedPackError, match=r"remove the file, then run `hpc-train prepare`"):
        build_source(with_cache(root))


def test_positions_out_of_order_are_refused_though_their_hash_fits(root: Path) -> None:
    ends = packed(root).train.ends.copy()
    ends[[2, 3]] = ends[[3, 2]]
    offset = 0

    def forge(header: dict[str, Any]) -> None:
        nonlocal offset
        entry = header["splits"]["train"]["arrays"]["ends"]
        offset, entry["xxh3_128"] = entry["offset"], hash_of(ends.view(np.uint8))

    rewritten(pack_of(root), forge)
    with pack_of(root).open("r+b") as file:
        file.seek(offset)
        file.write(ends.tobytes())
    with pytest.raises(DamagedPackError, match="values out of range"):
        build_source(with_cache(root))


def test_a_pipe_in_its_place_does_not_block(root: Path) -> None:
    packed(root)
    path = pack_of(root)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedPackError, match="not a regular file"):
        build_source(with_cache(root))


@pytest.mark.parametrize("kind", ["small JPEG", "large JPEG"])
def test_a_temporary_error_is_tried_again(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_folder(tmp_path / "images", kind)
    source, good = packed(root, image_size=8), batches(folder_of(root), image_size=8)
    monkeypatch.setattr("hpc_train.training.datasets.reading.time.sleep", lambda pause_s: None)
    failures = [OSError(5, "Input/output error")] * 2

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return function(*arguments)

        return read

    for name in ("pread", "preadv"):
        monkeypatch.setattr(f"hpc_train.training.datasets.packed.os.{name}", failing(getattr(os, name)))
    assert_same(batches(source, image_size=8), good)
    failures += [OSError(5, "Input/output error")] * 20
    with pytest.raises(TransientStorageError, match=r"can't be read at the moment"):
        batches(source, image_size=8)


def test_a_full_disk_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.errors import StorageError

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing._PackWriter, "finish", lambda self, header: Full().write(b""))
    with pytest.raises(StorageError, match=r"packs: the disk is full"):
        packed(root)
    assert list((root.parent / "packs").iterdir()) == []
