"""``webdataset``: samples in the tar files (shards) of the WebDataset format, read by random access.

A sample is a sequence of members with the same name up to the first dot, like ``0001.jpg`` and ``0001.cls``.
``prepare`` reads the headers of all shards once and writes an index with the offset and size of each image,
and its target. Ranks read images by ``pread``, so an epoch has every sample once, in the order of the
permutation, like any other data set.
"""

from __future__ import annotations

import errno
import json
import math
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from hpc_train.console import say
from hpc_train.errors import BadFileError, counted, listed, shortened
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts import data_size, listed_data
from hpc_train.experiment.data_facts.file_content import block_digest
from hpc_train.training.datasets import index_files, token_writing
from hpc_train.training.datasets.base import DataSource, RawTarget, parse_args, refuse_rest, root_of
from hpc_train.training.datasets.sources.infer import image_info
from hpc_train.training.datasets.sources.named_files import class_remarks
from hpc_train.training.datasets.sources.values import ClassNumbers, Place, Targets, numbers_of

#: First bytes of compressed files.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
#: Headers before a member's main header, with its long name or other fields; a longer one is damaged.
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_HEADERS = (*_PAX_TYPES, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MAX_HEADER_BYTES = 1 << 20
#: GNU tar's type of a volume label, ``tar --label``.
_LABEL = b"V"
#: Blocks of shards that are compared if their sizes are equal.
_COMPARED = 16, 1 << 16
#: Maximum size of a target: a class, or a JSON file with a field for it.
_MAX_TARGET_BYTES = 1 << 24
_READ_BYTES = 1 << 20
_IMAGES = tuple(extension.removeprefix(".") for extension in data_size.IMAGE_EXTENSIONS)

#: Arrays of a split, in the index.
_ARRAYS = frozenset({"targets", "shards", "offsets", "sizes", "ends", "bytes"})


class ShardedImages:
    """A ``FileSplit`` of the images in shards."""

    def __init__(self, shards: list[Path], arrays: dict[str, index_files.Array], channels: int) -> None:
        """``arrays``: of the index; ``shards``, ``offsets``, ``sizes`` (N,), ``targets`` (N, …), and the
        members' names as ``packed_texts``.
        """
        self._files = [os.fspath(path) for path in shards]
        self._arrays, self._targets = arrays, arrays["targets"]
        self.channels = channels

    def __len__(self) -> int:
        return len(self._targets)

    def file_content(self, index: int, /) -> tuple[bytes, RawTarget]:
        """Return the content of the image's member, and the target: int64 (), or float32 () or (K,)."""
        size = int(self._arrays["sizes"][index])
        with open(self._file(index), "rb", buffering=0) as file:  # noqa: PTH123  (Path: takes longer)
            content = os.pread(file.fileno(), size, int(self._arrays["offsets"][index]))
        if len(content) < size:
            raise ValueError(f"the shard ends after {len(content)} of the member's {size} bytes")
        return content, self._targets[index]

    def path(self, index: int) -> Path:
        """Return shard and member of a sample, for messages."""
        return Path(self._file(index)) / index_files.text_at(self._arrays, index)

    def _file(self, index: int) -> str:
        return self._files[self._arrays["shards"][index]]


def build(rest: str, config: DataConfig, *, download: bool) -> DataSource:
    """Return the samples in the shards. Raises BadFileError for ranks if ``prepare`` has written no index."""
    refuse_rest(config)
    args = parse_args(listed_data.WebdatasetArgs, config)
    shards = listed_data.shard_files(root_of(config), args)
    for split, paths in shards.items():
        _check_files(split, paths)
    for remark in _shard_remarks(shards) if download else ():
        say(f"data.args: {remark}")
    index = _index(config, args, shards, download)
    if download and args.target == "class":
        targets = {split: arrays["targets"] for split, arrays in index.splits.items()}
        for remark in class_remarks(index.class_names, targets):
            say(f"data.root: {remark}")
    splits = {
        split: ShardedImages(paths, dict(index.splits[split]), args.channels)
        for split, paths in shards.items()
    }
    shape = index.splits["train"]["targets"].shape[1:]
    num_classes = len(index.class_names) if args.target == "class" else math.prod(shape)
    info = image_info(index.class_names, args.channels, num_classes, shape)
    return DataSource(splits["train"], splits.get("val"), info)


def _check_files(split: str, paths: list[Path]) -> None:
    if not paths:
        raise BadFileError(f"data.args.{split}: names no file; write one, or take it out")
    missing = [path for path in paths if not path.is_file()]
    if missing:
        more = f", nor are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadFileError(
            f"data.args.{split}: {missing[0]} is not a file on this machine{more}; fix data.root or the name"
        )


def _shard_remarks(shards: dict[str, list[Path]]) -> Iterator[str]:
    """Yield remarks on shards that are read twice, or as training and validation data."""
    digests = _digests([path for paths in shards.values() for path in paths])
    files = {split: Counter(map(digests.__getitem__, paths)) for split, paths in shards.items()}
    names = {digests[path]: path.name for paths in reversed(shards.values()) for path in paths}
    for split, counts in files.items():
        repeated = [names[file] for file, count in counts.items() if count > 1]
        if repeated:
            shown = listed(repeated, 5)
            yield f"{split} names {shown} or a copy more than once, so an epoch has these samples twice"
    if shared := sorted(names[file] for file in files["train"].keys() & files.get("val", Counter()).keys()):
        yield f"train and val both name {listed(shared, 5)}, so the validation data are training data"


def _digests(paths: list[Path]) -> dict[Path, str]:
    """Return the size of each shard, with a digest of parts of its content if another has the same size."""
    sizes = {path: path.stat().st_size for path in paths}
    counts = Counter(sizes.values())
    return {
        path: f"{size} {block_digest(path, *_COMPARED) if counts[size] > 1 else ''}"
        for path, size in sizes.items()
    }


def _index(
    config: DataConfig, args: listed_data.WebdatasetArgs, shards: dict[str, list[Path]], download: bool
) -> index_files.Index:
    files, layout = listed_data.webdataset_files(config), index_files.Layout(frozenset(shards), _ARRAYS)
    if download:
        return index_files.ensure_index(config, files, layout, lambda: _scanned(shards, args))
    index = index_files.open_index(config, files, layout)
    if index is None:
        message, remedy = listed_data.without_index(config, files)
        raise BadFileError(f"data.root: {message}; {remedy}")
    return index


class _Member(NamedTuple):
    key: str
    extension: str
    name: str
    offset: int
    size: int


class _Sample(NamedTuple):
    image: _Member
    target: Any


def _scanned(shards: dict[str, list[Path]], args: listed_data.WebdatasetArgs) -> index_files.Index:
    """Return the index of all shards. Raises BadFileError with shard and sample for the first bad sample."""
    targets = _Targets(args)
    splits = {split: _scan(paths, args, targets) for split, paths in shards.items()}
    for remark in targets.remarks:
        say(f"data.root: {remark}")
    return index_files.Index(splits, targets.names)


def _scan(
    paths: list[Path], args: listed_data.WebdatasetArgs, targets: _Targets
) -> dict[str, index_files.Array]:
    samples: list[_Member] = []
    counts: list[int] = []
    values: list[Any] = []
    skipped: list[str] = []
    for path in paths:
        before = len(samples)
        for sample in _samples(path, args, skipped):
            samples.append(sample.image)
            values.append(targets.value(sample.target, f"{path}: sample {sample.image.key}"))
        counts.append(len(samples) - before)
        if counts[-1] == 0:
            raise BadFileError(f"data.root: {path} has no samples; take it out of the shards")
    if skipped:
        say(f"data.root: {counted(len(skipped), 'member')} of shards skipped ({listed(skipped, 5)})")
    return index_files.packed_texts([os.fsencode(member.name) for member in samples]) | {
        "shards": np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        "offsets": np.array([member.offset for member in samples], dtype=np.int64),
        "sizes": np.array([member.size for member in samples], dtype=np.int64),
        "targets": targets.array(values),
    }


def _samples(path: Path, args: listed_data.WebdatasetArgs, skipped: list[str]) -> Iterator[_Sample]:
    """Yield the samples of a shard; members that belong to no sample are added to ``skipped``."""
    keys: set[str] = set()
    with path.open("rb") as file:
        start = file.read(8)
        form = next((form for magic, form in _COMPRESSED.items() if start.startswith(magic)), None)
        if form is not None:
            raise BadFileError(
                f"data.root: {path} is compressed ({form}), and samples are read by random access; write it "
                "uncompressed (images are compressed themselves)"
            )
        file.seek(0)
        for key, group in groupby(_members(path, file, skipped), attrgetter("key")):
            where = f"{path}: sample {key}"
            if key in keys:
                raise BadFileError(
                    f"data.root: {where} is there twice, or its members do not follow each other; write the "
                    "shard again, with tar --sort=name"
                )
            keys.add(key)
            yield _sample(where, list(group), file, args)


class _Header(tarfile.TarInfo):
    """A header whose sizes are plausible: ``tarfile`` reads long names of any size into memory."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        """Return the header in a block. Raises ReadError for a negative size, or very long names."""
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.size > _MAX_HEADER_BYTES and header.type in _LONG_HEADERS):
            raise tarfile.ReadError(f"a header of type {header.type!r} has the size {header.size}")
        return header


def _members(path: Path, file: BinaryIO, skipped: list[str]) -> Iterator[_Member]:
    """Yield the members of samples. Raises BadFileError if the file is not one complete tar file."""
    places: dict[str, tuple[int, int]] = {}
    end, nbytes = 0, os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
            while (member := tar.next()) is not None:
                before, end = end, member.offset_data + _data_bytes(member)
                if not before <= member.offset_data <= end <= nbytes:
                    raise tarfile.ReadError(f"{member.name} ends at byte {end} of {nbytes}")
                tar.members = []  # type: ignore[attr-defined]  # else all members stay in memory
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                place = _place(path, member, places)
                if place is not None and (not stem or stem.startswith("__")):
                    skipped.append(shortened(member.name))
                elif place is not None:
                    key = f"{folder}/{stem}" if folder else stem
                    yield _Member(key, extension.lower(), member.name, *place)
        _check_end(file.fileno(), end)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise BadFileError(
            f"data.root: {path} is not a complete tar file: {error}; write it again"
        ) from error


def _data_bytes(member: tarfile.TarInfo) -> int:
    """Return the bytes of a member's data and padding."""
    return -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if member.isreg() else 0


def _place(path: Path, member: tarfile.TarInfo, places: dict[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Return offset and size of a member's data; for a hard link, of the earlier member in ``places``.

    None for a folder or a label. Raises BadFileError for a member of any other type.
    """
    if member.isdir() or member.type == _LABEL:
        return None
    if member.issparse():
        raise BadFileError(f"data.root: {path}: {member.name} is sparse; write the shard without")
    place = (member.offset_data, member.size) if member.isreg() else places.get(member.linkname)
    if place is None or not (member.isreg() or member.islnk()):
        kind = "a link to" if member.islnk() or member.issym() else f"of type {member.type!r}"
        raise BadFileError(
            f"data.root: {path}: {member.name} is {kind} {shortened(member.linkname)}, not a file of the "
            "shard; write it again with tar --dereference --hard-dereference"
        )
    places[member.name] = place
    return place


def _check_end(descriptor: int, end: int) -> None:
    """Raise ReadError unless an end-of-archive block is at ``end``, and only zeros follow it."""
    # ``tarfile`` accepts a file that ends in the middle of a header, or is damaged there, as complete.
    if os.pread(descriptor, tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError(f"it has no end-of-archive block at byte {end}")
    place = end
    while block := os.pread(descriptor, _READ_BYTES, place):
        if block.count(0) < len(block):
            raise tarfile.ReadError(
                f"it continues after its end-of-archive block at byte {end}, like files joined by cat, not "
                "by tar --concatenate"
            )
        place += len(block)
        try:
            place = os.lseek(descriptor, place, os.SEEK_DATA)  # skips the holes of a sparse file
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return


def _sample(where: str, members: list[_Member], file: Any, args: listed_data.WebdatasetArgs) -> _Sample:
    extensions = _IMAGES if args.image is None else (args.image.lower(),)
    images = [member for member in members if member.extension in extensions]
    if len(images) != 1:
        present = listed([member.extension for member in images or members], 10)
        problem = f"{len(images)} images ({present})" if images else f"no image ({present})"
        remedy = "name its extension in data.args.image" if images else "write the shard again with one"
        if not images and any(member.extension.endswith(extensions) for member in members):
            remedy = (
                f"the name of a sample ends at the first dot of a name like {shortened(members[0].name)}: "
                "write the shard again without other dots, or name an image's whole extension in "
                "data.args.image"
            )
        if len({member.extension for member in images}) < len(images):
            remedy = "write the shard again with one"
        raise BadFileError(f"data.root: {where} has {problem}; {remedy}")
    extension, _, field = args.target_member.partition(".")
    targets = [member for member in members if member.extension == extension]
    if len(targets) != 1:
        present = ", ".join(member.extension for member in members)
        raise BadFileError(
            f"data.root: {where} has {len(targets)} members {extension} ({present}); write the shard "
            "again, or another data.args.target_member"
        )
    if targets[0].size > _MAX_TARGET_BYTES:
        raise BadFileError(
            f"data.root: {where} has a target of {targets[0].size} bytes, and at most "
            f"{_MAX_TARGET_BYTES} are read; write another data.args.target_member"
        )
    content = os.pread(file.fileno(), targets[0].size, targets[0].offset)
    return _Sample(images[0], _value(content, field, where))


def _value(content: bytes, field: str, where: str) -> Any:
    """Return the target as text or as a JSON value. Raises BadFileError if it is neither."""
    try:
        if not field:
            text = content.decode("utf-8-sig").strip()
            if len(text.splitlines()) > 1:
                raise ValueError("it has several lines, and a sample has one class or number")
            return text
        entry = json.loads(content, object_pairs_hook=token_writing.refusing_repeated(field))
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"data.root: {where} has a target that can't be read: {error}; fix it") from error
    if not isinstance(entry, dict) or field not in entry:
        keys = ", ".join(map(shortened, list(entry)[:5])) if isinstance(entry, dict) else "not a mapping"
        raise BadFileError(
            f"data.root: {where} has no field {shortened(field)!r} in its JSON ({keys}); fix it, or write "
            "another data.args.target_member"
        )
    return entry[field]


class _Targets(Targets):
    """Converts the targets of samples."""

    def __init__(self, args: listed_data.WebdatasetArgs) -> None:
        if args.target != "class" and (args.classes or args.num_classes):
            raise BadFileError("data.args.classes: is for data.args.target: class; take it out")
        super().__init__(ClassNumbers(args.classes, args.num_classes) if args.target == "class" else None)
        self._length: int | None = None

    def value(self, target: Any, where: str) -> Any:
        """Return the target of one sample; a class's number is preliminary until ``array``."""
        if self._classes is not None:
            return self._classes.number(target, Place(where))
        numbers = numbers_of(target, Place(where), self._length)
        self._length = len(numbers) if isinstance(numbers, list) else 0
        return numbers
