"""Fingerprints of the files that a run is trained on: its data folder and its file of weights.

The run id excludes ``data.root``, because the path differs between machines, and knows weights only by their
path. So a run stores fingerprints of both when it is created, and ``submit`` and ``resume`` compare them. A
fingerprint contains no path. Nothing here reads more than a login node can afford.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Experiment
from hpc_train.data_facts.by_name import data_facts
from hpc_train.data_facts.data_size import IMAGE_EXTENSIONS
from hpc_train.paths import cache_folder, expanded

DATA, WEIGHTS = "data.root", "model.pretrained"
_SPLITS, _TEXTS = ("train", "val"), ("train.txt", "val.txt")
#: Beside the folders of the images.
_ANNOTATIONS = ("train.json", "val.json", "test.json")
#: The folder of the validation images where there is none called ``val``.
_TEST = "test"
#: Assumed: how long a user waits. ImageNet's 1.3 million names take about 2 s from a local disk.
LIMIT_S = 10.0
#: Files per folder whose size is included: each costs a stat, which is slow on a network disk.
_SIZED_PER_FOLDER = 4
#: Of a single file: evenly spaced blocks, including the first and the last.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
#: A folder changed just now may change again within the same tick of its file system's clock.
_SETTLED_NS = 3_000_000_000
#: With more folders, looking at each costs as much as reading them.
_MAX_CACHED_FOLDERS = 20_000
#: Of the cached fingerprint; version 1 did not say it, and knew nothing of ``test``.
_CACHE_VERSION = 2
#: Runs are created by several threads, which mostly share their data: one of them reads these.
_LOCK = threading.Lock()


def fingerprints(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Return key → fingerprint, in parts, of the files that are visible from here."""
    data, weights = experiment.data, experiment.model.pretrained
    found = {}
    facts = data_facts(data.name)
    if data.root is not None and facts.is_in_root:
        if facts.fingerprint is not None:
            found[DATA] = facts.fingerprint(data)
        elif facts.listing is not None:
            found[DATA] = _of_files(facts.listing(data))
        else:
            found[DATA] = _fingerprint_of(data.root)
    if isinstance(weights, str):
        found[WEIGHTS] = _fingerprint_of(weights)
    return {key: parts for key, parts in found.items() if parts}


def other_inputs(then: object, now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the keys whose files ``now`` differ from ``then``, both like ``fingerprints``.

    What is unknown on either side counts as equal.
    """
    if not isinstance(then, Mapping):
        return []
    return [key for key, parts in now.items() if _differ(then.get(key), parts)]


def file_fingerprint(path: str) -> dict[str, str]:
    """Return the fingerprint of one file, read again at each call; empty if it can't be read."""
    try:
        return {"file": _of_file(Path(path))}
    except OSError:  # the ranks may be able to read it
        return {}


def _differ(then: object, now: Mapping[str, str]) -> bool:
    return isinstance(then, Mapping) and any(then[part] != now[part] for part in now if part in then)


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
        return texts or annotations | image_fingerprint(path, LIMIT_S)
    except OSError:  # the ranks may be able to read it
        return {}


def _of_files(paths: Sequence[Path]) -> dict[str, str]:
    """Return a hash of the names and of blocks of each file; empty if one can't be read from here."""
    with _LOCK:
        return _hashed(tuple(os.path.realpath(path) for path in paths))


@cache
def _hashed(paths: tuple[str, ...]) -> dict[str, str]:
    digest = hashlib.sha256()
    try:
        for path in map(Path, paths):
            _add(digest, path.name, _of_file(path, blocks=max(2, _BLOCKS // len(paths))))
    except OSError:  # the ranks may be able to read it
        return {}
    return {"files": digest.hexdigest()[:32]} if paths else {}


def _of_file(path: Path, blocks: int = _BLOCKS) -> str:
    """Return a hash of the file's size and of blocks spread over it."""
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
    """Return hashes of the class names, and of the images of each split if there is time; no limit: always.

    Empty without a folder of training images. Raises OSError if a folder can't be read.
    """
    root = os.path.realpath(root)
    file = cache_folder() / f"data-{hashlib.sha256(os.fsencode(root)).hexdigest()[:20]}.json"
    known = _read(file)
    if known is not None and known["folders"] == _times(root, known["folders"]):
        found: dict[str, str] = known["fingerprint"]
        return found
    classes = _classes(root)
    if classes is None:
        return {}
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    times = {".": os.stat(root).st_mtime_ns}  # noqa: PTH116
    by_part = {"images": hashlib.sha256()}
    splits: dict[str, str] = dict.fromkeys(_SPLITS, "images")
    if not os.path.isdir(os.path.join(root, _SPLITS[1])) and os.path.isdir(os.path.join(root, _TEST)):  # noqa: PTH112, PTH118
        # A part of its own, which older runs, that did not look there, don't have.
        by_part["test"], splits[_TEST] = hashlib.sha256(), "test"
    for split, inner, names in _walk(root, splits):
        if time.monotonic() > deadline:
            return {"classes": classes}
        folder = os.path.join(root, inner)  # noqa: PTH118
        times[inner] = os.stat(folder).st_mtime_ns  # noqa: PTH116
        sizes = [os.stat(os.path.join(folder, name)).st_size for name in names[:_SIZED_PER_FOLDER]]  # noqa: PTH116, PTH118
        _add(by_part[splits[split]], inner, *names, *map(str, sizes))
    hashes = {part: digest.hexdigest()[:32] for part, digest in by_part.items()}
    fingerprint = {"classes": classes, **hashes}
    _write(file, {"version": _CACHE_VERSION, "folders": times, "fingerprint": fingerprint})
    return fingerprint


def _walk(root: str, splits: Iterable[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the split and each of its folders, relative to ``root``, with its images, sorted, without hidden
    ones.
    """
    for split in splits:
        for folder, folders, names in os.walk(os.path.join(root, split), followlinks=True):  # noqa: PTH118
            visible = sorted(name for name in folders if not name.startswith("."))
            folders[:] = [name for name in visible if not _is_cycle(os.path.join(folder, name), root)]  # noqa: PTH118
            images = (name for name in names if name.lower().endswith(IMAGE_EXTENSIONS) and name[0] != ".")
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
    """Return a hash of the class names; None without a folder of training images."""
    try:
        with os.scandir(os.path.join(root, _SPLITS[0])) as entries:  # noqa: PTH118
            names = sorted(each.name for each in entries if each.is_dir() and not each.name.startswith("."))
    except FileNotFoundError:
        return None
    digest = hashlib.sha256()
    _add(digest, *names)
    return digest.hexdigest()[:32]


def _add(digest: Any, *texts: str) -> None:
    for text in texts:
        digest.update(os.fsencode(text) + b"\0")
    digest.update(b"\0")


def _times(root: str, folders: Mapping[str, int]) -> dict[str, int]:
    """Return the modification time of each folder; folders that are gone are omitted."""
    found = {}
    for inner in folders:
        with suppress(OSError):
            found[inner] = os.stat(os.path.join(root, inner)).st_mtime_ns  # noqa: PTH116, PTH118
    return found


def _read(file: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = (
        isinstance(known, dict)
        and known.get("version") == _CACHE_VERSION
        and all(isinstance(known.get(part), dict) for part in ("folders", "fingerprint"))
    )
    return known if is_ours else None


def _write(file: Path, known: Mapping[str, Any]) -> None:
    times: Mapping[str, int] = known["folders"]
    if len(times) > _MAX_CACHED_FOLDERS or max(times.values()) > time.time_ns() - _SETTLED_NS:
        return
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError, ValueError):  # without a cache it is read again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known), encoding="utf-8")
        temporary.replace(file)
