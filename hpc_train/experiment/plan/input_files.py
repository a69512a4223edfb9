"""Fingerprints of the files that a run is trained on: its data folder and its file of weights.

The run id excludes ``data.root``, because the path differs between machines, and contains only the path of
weights. So a run stores fingerprints of both when it is created, and ``submit`` and ``resume`` compare them.
Reading is bounded to suit a login node: ``data_facts.file_content`` has the limits.

A fingerprint has parts, which are compared one by one, so that a run of an earlier version is compared by the
parts that it recorded:

    classes, images, test    names of an image folder, and sizes of some files
    samples                  content of an even sample of the images or other samples
    content                  content of the files that list the samples or contain them
    files, train.json, …     the same, of fewer bytes, as 0.2 recorded it
    location                 a hash of the path, of data whose files only the user's code knows

The name of a pack (images packed into one file by ``hpc-train prepare``, below ``data.cache``) contains a
hash of its source's resolved location and fingerprint, so other images have another file.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train.errors import BadFileError
from hpc_train.experiment.config.schema import Experiment
from hpc_train.experiment.config.training_sections import DataConfig
from hpc_train.experiment.data_facts.by_name import data_facts
from hpc_train.experiment.data_facts.data_size import IMAGE_EXTENSIONS
from hpc_train.experiment.data_facts.file_content import SETTLED_NS, EvenSample, files_digest, sample_digest
from hpc_train.paths import cache_folder, expanded

DATA, WEIGHTS = "data.root", "model.pretrained"
_SPLITS, _TEXTS = ("train", "val"), ("train.txt", "val.txt")
#: Entries beside the folders of the images.
_ANNOTATIONS = ("train.json", "val.json", "test.json")
#: The folder of the validation images if there is none called ``val``.
_TEST = "test"
#: Acceptable wait of a user, assumed. ImageNet's 1.3 million names take about 2 s from a local disk.
LIMIT_S = 10.0
#: The limit for data of the user's own code, whose root may be any folder.
_OWN_LIMIT_S = 3.0
#: Files per folder whose size is included: each costs a stat, which is slow on a network disk.
_SIZED_PER_FOLDER = 4
#: Blocks read of a single file: evenly spaced, including the first and the last.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
#: With more folders, a stat of each costs as much as reading them.
_MAX_CACHED_FOLDERS = 20_000
#: Version of the cached names; version 2 identified folders by modification times, which an archive restores.
_CACHE_VERSION = 3
#: Runs are created by several threads, which mostly share their data: one of them reads these.
_LOCK = threading.Lock()


def fingerprints(experiment: Experiment, recorded: object = None) -> dict[str, dict[str, str]]:
    """Return key → fingerprint, in parts, of the files that are visible from here.

    ``recorded``: the fingerprints to compare with, which may need a part that only earlier versions recorded.
    """
    weights = experiment.model.pretrained
    by_key = {DATA: _data_parts(experiment.data, _parts_of(recorded, DATA))}
    if isinstance(weights, str):
        by_key[WEIGHTS] = _fingerprint_of(weights)
    return {key: parts for key, parts in by_key.items() if parts}


def other_inputs(then: object, now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the keys whose ``fingerprints`` differ; a part missing on either side counts as equal."""
    return [key for key, parts in now.items() if _differ(_parts_of(then, key), parts)]


def file_fingerprint(path: str) -> dict[str, str]:
    """Return the fingerprint of one file, read again at each call; empty if it can't be read."""
    try:
        return {"file": _of_file(Path(path))}
    except OSError:  # the ranks may be able to read it
        return {}


def _parts_of(fingerprints: object, key: str) -> Mapping[str, str]:
    parts = fingerprints.get(key) if isinstance(fingerprints, Mapping) else None
    return parts if isinstance(parts, Mapping) else {}


def _differ(then: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Compare common parts. Data of the user's own code may gain files, such as caches, in its folder."""
    if "location" in now and then.get("location") == now["location"]:
        return False
    return any(then[part] != now[part] for part in now if part in then and part != "location")


def _data_parts(data: DataConfig, recorded: Mapping[str, str]) -> dict[str, str]:
    facts = data_facts(data.name)
    if data.root is None or (facts.implementation and not facts.is_in_root):
        return {}  # the name identifies the data
    if facts.fingerprint is not None:
        return facts.fingerprint(data)
    if facts.listing is not None:
        with _LOCK:
            parts = _listed(data.model_dump_json(include={"name", "root", "args"}))
        paths = facts.listing(data)
        return parts | (_of_files(paths) if "files" in recorded and "content" not in recorded else {})
    if facts.is_in_root:
        return _fingerprint_of(data.root)
    with _LOCK:
        return _of_own_data(os.path.realpath(expanded(data.root)))


def _fingerprint_of(path: str) -> dict[str, str]:
    with _LOCK:
        return _fingerprint(os.path.realpath(expanded(path)))


@cache
def _fingerprint(path: str) -> dict[str, str]:
    try:
        if Path(path).is_file():
            return {"file": _of_file(Path(path))}
        texts, annotations = (
            {name: _of_file(Path(path, name)) for name in names if Path(path, name).is_file()}
            for names in (_TEXTS, _ANNOTATIONS)
        )
        if texts:
            return texts
        names, sample = _names(path, LIMIT_S)
    except OSError:  # the ranks may be able to read it
        return {}
    content = _readable("content", lambda: files_digest([Path(path, name) for name in annotations]))
    samples = _readable("samples", lambda: sample_digest(path, sample))
    return annotations | names | (content if annotations else {}) | (samples if sample else {})


@cache
def _listed(section: str) -> dict[str, str]:
    """Return the parts of data stored in listed files. ``section``: name, root and args, as JSON."""
    data = DataConfig.model_validate_json(section)
    facts = data_facts(data.name)
    assert facts.listing is not None
    paths = facts.listing(data)
    if not paths:
        return {}
    parts = _readable("content", lambda: files_digest(paths))
    names: Sequence[str] = ()
    with suppress(OSError, ValueError, ImportError, csv.Error):
        names = facts.listed_names(data) if facts.listed_names is not None else ()
    root = os.path.realpath(expanded(str(data.root)))
    return parts | (_readable("samples", lambda: sample_digest(root, names)) if names else {})


@cache
def _of_own_data(root: str) -> dict[str, str]:
    """Return the parts of a folder or file that only the user's code understands."""
    location = {"location": hashlib.sha256(os.fsencode(root)).hexdigest()[:32]}
    if Path(root).is_file():
        return location | _readable("content", lambda: files_digest([Path(root)]))
    deadline, sample, count = time.monotonic() + _OWN_LIMIT_S, EvenSample[str](), 0
    for _, inner, names in _walk(root, [""], suffixes=("",)):
        if time.monotonic() > deadline:
            return location
        count += len(names)
        for name in names:
            sample.add(f"{inner}/{name}")
    samples = _readable("samples", lambda: f"{count}-{sample_digest(root, sample.kept)}")
    return location | (samples if count else {})


def _readable(part: str, digest: Callable[[], str]) -> dict[str, str]:
    """Return a part; empty if its files can't be read from here: the ranks may be able to."""
    try:
        return {part: digest()}
    except (OSError, ValueError):  # a list may contain names that no file can have
        return {}


def _of_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return the part ``files`` of 0.2; empty if a file can't be read from here."""
    digest = hashlib.sha256()
    try:
        for path in paths:
            real = Path(os.path.realpath(path))
            _add(digest, real.name, _of_file(real, blocks=max(2, _BLOCKS // len(paths))))
    except OSError:
        return {}
    return {"files": digest.hexdigest()[:32]}


def _of_file(path: Path, blocks: int = _BLOCKS) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        last = max(0, size - _BLOCK_BYTES)
        for offset in sorted({last * block // (blocks - 1) for block in range(blocks)}):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def image_fingerprint(root: str, limit_s: float | None = None) -> dict[str, str]:
    """Return hashes of the class names and, within ``limit_s`` (None: no limit), of the images of each split
    and of the content of a sample of them.

    Empty without a folder of training images. Raises OSError if a folder or an image can't be read.
    """
    root = os.path.realpath(root)
    names, sample = _names(root, limit_s)
    return names | ({"samples": sample_digest(root, sample)} if sample else {})


def _names(root: str, limit_s: float | None) -> tuple[dict[str, str], list[str]]:
    """Return the hashes of names and sizes below ``root``, and the names of an even sample of the images.

    The names are cached as long as no folder has changed.
    """
    file = cache_folder() / f"data-{hashlib.sha256(os.fsencode(root)).hexdigest()[:20]}.json"
    cached = _read(file)
    if cached is not None and cached["folders"] == _times(root, cached["folders"]):
        return cached["fingerprint"], cached["sample"]
    classes = _classes(root)
    if classes is None:
        return {}, []
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    times, sample = _times(root, ["."]), EvenSample[str]()
    by_part = {"images": hashlib.sha256()}
    splits: dict[str, str] = dict.fromkeys(_SPLITS, "images")
    if not os.path.isdir(os.path.join(root, _SPLITS[1])) and os.path.isdir(os.path.join(root, _TEST)):  # noqa: PTH112, PTH118
        by_part["test"], splits[_TEST] = hashlib.sha256(), "test"
    for split, inner, names in _walk(root, splits):
        if time.monotonic() > deadline:
            return {"classes": classes}, []
        folder = os.path.join(root, inner)  # noqa: PTH118
        times |= _times(root, [inner])
        sizes = [os.stat(os.path.join(folder, name)).st_size for name in names[:_SIZED_PER_FOLDER]]  # noqa: PTH116, PTH118
        _add(by_part[splits[split]], inner, *names, *map(str, sizes))
        for name in names:
            sample.add(f"{inner}/{name}")
    hashes = {part: digest.hexdigest()[:32] for part, digest in by_part.items()}
    fingerprint = {"classes": classes, **hashes}
    _write(file, {"folders": times, "fingerprint": fingerprint, "sample": sample.kept})
    return fingerprint, sample.kept


def _walk(
    root: str, splits: Iterable[str], suffixes: tuple[str, ...] = IMAGE_EXTENSIONS
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield split and each of its folders, relative to ``root``, with sorted images, except hidden ones."""
    for split in splits:
        for folder, folders, names in os.walk(os.path.join(root, split), followlinks=True):  # noqa: PTH118
            visible = sorted(name for name in folders if not name.startswith("."))
            folders[:] = [name for name in visible if not _is_cycle(os.path.join(folder, name), root)]  # noqa: PTH118
            images = (name for name in names if name.lower().endswith(suffixes) and name[0] != ".")
            yield split, os.path.relpath(folder, root), sorted(images)


def _is_cycle(path: str, root: str) -> bool:
    """Whether the folder is a link to one of the folders above it, up to ``root``."""
    if not os.path.islink(path):  # noqa: PTH114
        return False
    above = path
    while above != root:
        above = os.path.dirname(above)  # noqa: PTH120
        if os.path.samefile(path, above):  # noqa: PTH121
            return True
    return False


def _classes(root: str) -> str | None:
    try:
        with os.scandir(os.path.join(root, _SPLITS[0])) as entries:  # noqa: PTH118
            names = sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    except FileNotFoundError:
        return None
    digest = hashlib.sha256()
    _add(digest, *names)
    return digest.hexdigest()[:32]


def _add(digest: Any, *texts: str) -> None:
    for text in texts:
        digest.update(os.fsencode(text) + b"\0")
    digest.update(b"\0")


def _times(root: str, folders: Iterable[str]) -> dict[str, int]:
    """Return the time of each folder's last change of entries or status; missing folders are omitted."""
    times = {}
    for inner in folders:
        with suppress(OSError):
            times[inner] = os.stat(os.path.join(root, inner)).st_ctime_ns  # noqa: PTH116, PTH118
    return times


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = (
        isinstance(content, dict)
        and content.get("version") == _CACHE_VERSION
        and all(isinstance(content.get(part), dict) for part in ("folders", "fingerprint"))
        and isinstance(content.get("sample"), list)
    )
    return content if is_ours else None


def _write(file: Path, names: Mapping[str, Any]) -> None:
    times: Mapping[str, int] = names["folders"]
    if len(times) > _MAX_CACHED_FOLDERS or max(times.values()) > time.time_ns() - SETTLED_NS:
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError, ValueError):  # without a cache the folder is read again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": _CACHE_VERSION, **names}), encoding="utf-8")
        temporary.replace(file)


def pack_files(data: DataConfig, limit_s: float | None = None) -> list[Path] | None:
    """Return the possible packs of the current content of ``data.root``, whether they exist or not.

    The first contains small decoded images of one size; the other, decoded images of any size with
    ``data.cache_pixels``, else the image files. Decoded images depend on the number of channels; the choice
    of images of any size to decode depends on the size of random crops, which is in the name. None if the
    images can't be listed within ``limit_s``, or are not on this machine. Raises BadFileError if an image is
    missing or may not be read, OSError if the disk fails.
    """
    assert data.cache is not None and data.root is not None, "the file has both keys"
    root = os.path.realpath(expanded(data.root))
    try:
        fingerprint = image_fingerprint(root, limit_s)
    except (FileNotFoundError, PermissionError) as error:
        raise BadFileError(
            f"data.root: {error.filename} can't be read: {error.strerror}; fix it or remove it"
        ) from error
    if "images" not in fingerprint:
        return None
    digest = hashlib.sha256(json.dumps([root, fingerprint], sort_keys=True).encode()).hexdigest()[:20]
    decoded = f"{digest}-{data_facts(data.name).channels(data)}{_conversion(data)}"
    names = f"{decoded}.pack", f"{decoded}-{_pixels(data)}.pack" if data.cache_pixels else f"{digest}.pack"
    return [expanded(data.cache) / name for name in names]


def _conversion(data: DataConfig) -> str:
    """Return the part of the name for keys that change the pixels of decoded images; empty without them."""
    scaled = "" if data.value_range is None else "-{}to{}".format(*data.value_range)
    return scaled + ("-upright" if data.exif_orientation == "apply" else "")


def _pixels(data: DataConfig) -> str:
    crops_to = data.height_and_width if data.augment.random_resized_crop is not None else None
    return "pixels" if crops_to is None else f"pixels{min(crops_to)}"


def missing_pack(data: DataConfig) -> tuple[str, str]:
    """Return the problem and the remedy if no pack matches the current ``data.root``."""
    message = f"{data.cache} has no pack of the images that {data.root} contains now"
    return message, "run `hpc-train prepare` with this file, which writes it"
