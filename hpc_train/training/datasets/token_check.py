"""Compares token shards with the hashes in their headers, and validation text with training text.

``prepare`` checks all shards. Before a run reads them, the first rank of each node checks them within a time
limit (``training.data_staging``). Intact shards are cached for a day in the user's cache folder, by their
hash, location, inode, size and time of change, so the attempts of a sweep read them once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hpc_train.console import say
from hpc_train.experiment.data_facts import token_shards
from hpc_train.experiment.data_facts.raw_tokens import Shard
from hpc_train.paths import cache_folder
from hpc_train.run.files import read_json, write_json
from hpc_train.training.datasets.base import ArraySplit

#: Assumed: at 1 GB/s these are 60 billion tokens of uint16.
CHECK_LIMIT_S = 120.0
_REMEMBERED_S = 24 * 3600.0
_READERS = 4
_READ_BYTES = 1 << 22
#: Passages of the validation tokens, their length, and their minimum number of different tokens (assumed).
_PASSAGES, _PASSAGE_TOKENS, _MIN_DIFFERENT = 16, 64, 8
_log = logging.getLogger(__name__)


class Passages:
    """Evenly spaced passages of validation tokens, to be looked for in the training tokens.

    A passage of few different tokens, such as blank lines, may well occur in both, and is not compared.
    """

    def __init__(self, val: ArraySplit, dtype: Any) -> None:
        """``dtype``: of the training tokens in memory, as ``look_in`` receives them."""
        indices = np.linspace(0, len(val) - 1, min(len(val), _PASSAGES)).round().astype(np.int64)
        rows = val.batch(torch.from_numpy(indices))[0][:, :_PASSAGE_TOKENS].numpy().astype(dtype)
        self._passages = {row.tobytes() for row in rows if len(np.unique(row)) >= _MIN_DIFFERENT}
        self._absent, self._end = set(self._passages), b""

    def __bool__(self) -> bool:
        """Return True if there are passages that have not been found."""
        return bool(self._absent)

    def look_in(self, tokens: np.ndarray[Any, Any]) -> None:
        """Look for the passages in a part of the training tokens, (n,), that follows the previous part."""
        content = self._end + tokens.tobytes()
        self._absent -= {passage for passage in self._absent if passage in content}
        longest = max(map(len, self._absent), default=1)
        self._end = content[1 - longest :] if longest > 1 else b""

    def report(self, root: Path) -> None:
        """Print how many passages the training tokens contain, if they contain any."""
        if len(self._absent) < len(self._passages):
            count = f"{len(self._passages) - len(self._absent)} of {len(self._passages)}"
            say(
                f"data.root: {root}: {count} compared passages of the validation tokens are also in the "
                "training tokens, and measure nothing new"
            )


def hash_of_file(path: Path) -> str:
    """Return the XXH3-128 hash of a file, in hexadecimal."""
    return _hash(path, 0, math.inf) or ""


def check_all(shards: token_shards.TokenShards) -> None:
    """Read all shards. Raises DamagedShardError for a shard that does not match the hash in its header."""
    _check(_listed(shards), math.inf, lambda fraction: None)


def check_before_use(shards: token_shards.TokenShards, report: Callable[[float], None]) -> None:
    """Check the shards that are not cached as intact, until ``CHECK_LIMIT_S`` have passed.

    ``report`` receives the fraction checked so far. Logs a warning if time was short. Raises
    DamagedShardError. Files of nanoGPT and llm.c have no hash.
    """
    if shards.folder is None:
        return
    memory = cache_folder() / f"tokens-{hashlib.sha256(os.fsencode(shards.folder)).hexdigest()[:20]}.json"
    intact = _remembered(memory)
    todo = [shard for shard in _listed(shards) if _identity(shard) not in intact]
    checked = _check(todo, time.monotonic() + CHECK_LIMIT_S, report)
    now = time.time()
    with suppress(OSError):  # without it they are checked again
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"version": 1, "intact": intact | {_identity(shard): now for shard in checked}})
    if len(checked) < len(todo):
        _log.warning(
            "data.root: %d of the %d token shards in %s were not checked within %.0f s; the next attempt "
            "continues, and `hpc-train prepare` checks all",
            len(todo) - len(checked), len(_listed(shards)), shards.folder, CHECK_LIMIT_S,
        )  # fmt: skip


def _listed(shards: token_shards.TokenShards) -> list[Shard]:
    return [shard for part in shards.parts.values() for shard in part]


def _identity(shard: Shard) -> str:
    status, stored = shard.path.stat(), token_shards.read_header(shard.path)["xxh3_128"]
    path = os.path.realpath(shard.path)
    return json.dumps([path, status.st_ino, status.st_size, status.st_ctime_ns, stored])


def _remembered(memory: Path) -> dict[str, float]:
    """Return identity → time of the check, for checks within the last day."""
    try:
        intact = (read_json(memory) or {}).get("intact")
    except OSError:
        return {}
    if not isinstance(intact, dict):
        return {}
    now = time.time()
    return {
        key: at for key, at in intact.items() if isinstance(at, float) and now - _REMEMBERED_S < at <= now
    }


def _check(shards: list[Shard], deadline: float, report: Callable[[float], None]) -> list[Shard]:
    """Return the intact shards, all if there is time. Raises DamagedShardError."""
    intact = []
    pool = ThreadPoolExecutor(_READERS)
    try:
        hashes = pool.map(lambda shard: _hash(shard.path, token_shards.HEADER_BYTES, deadline), shards)
        for number, (shard, digest) in enumerate(zip(shards, hashes, strict=True), 1):
            if digest is not None and digest != token_shards.read_header(shard.path)["xxh3_128"]:
                raise token_shards.DamagedShardError.of(
                    shard.path, "the hash of its tokens is not that of its header"
                )
            if digest is not None:
                intact.append(shard)
            report(number / len(shards))
    finally:
        pool.shutdown(cancel_futures=True)
    return intact


def _hash(path: Path, offset: int, deadline: float) -> str | None:
    """Return the hash of a file from ``offset`` on; None if ``deadline`` passes before the end."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(_READ_BYTES):
            if time.monotonic() > deadline:
                return None
            digest.update(block)
    return digest.hexdigest()
