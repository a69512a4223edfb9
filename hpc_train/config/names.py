"""Which models and data sets timm and torchvision know, and what has to be known of a model of theirs: asked
of a child process once and kept in a cache.

``validate`` answers at once on a login node because it imports neither. Where the child fails or the cache
can't be written, a name counts as unknown and nobody is told off: the worker finds out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import platformdirs

from hpc_train.errors import printable

_log = logging.getLogger(__name__)

CHILD_LIMIT_S = 60
#: What is asked for without arguments, and with a model's name.
_NAMES, _FACTS = "hpc_train.models.names", "hpc_train.strategies.model_facts"
_PACKAGES = ("hpc-train", "timm", "torchvision", "torch")


def known_names(kind: str) -> list[str] | None:
    """Return the names of a kind (``timm``, ``torchvision``, ``datasets``, ``timm_optimizers``,
    ``torch_schedules``); None where they can't be had."""
    names = _answer(()).get(kind)
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def has_batchnorm(name: str, args: dict[str, Any]) -> bool | None:
    """Tell whether ``timm/…`` or ``torchvision/…`` has BatchNorm layers; None where that is not known."""
    found = facts(name, args).get("has_batchnorm")
    return found if isinstance(found, bool) else None


def facts(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return what ``hpc_train.strategies.model_facts`` tells of ``timm/…`` or ``torchvision/…``; nothing
    where that is not known.
    """
    if name.partition("/")[0] not in {"timm", "torchvision"}:
        return {}
    return _answer((name, "--args", json.dumps(args)))


def cache_folder() -> Path:
    """Return ``$HPC_TRAIN_CACHE``, else the user's cache folder."""
    given = os.environ.get("HPC_TRAIN_CACHE")
    return Path(given).expanduser() if given else platformdirs.user_cache_path("hpc-train")


def forget_answers() -> None:
    """Drop what this process remembers, not what the disk holds."""
    _answer.cache_clear()


@cache
def _answer(arguments: tuple[str, ...]) -> dict[str, Any]:
    file = _cache_file(arguments)
    answer = _read(file)
    if answer is None:
        answer = _ask(arguments)
        if answer:
            _write(file, answer)
    return answer


def _cache_file(arguments: tuple[str, ...]) -> Path:
    versions = [f"{package} {_version(package)}" for package in _PACKAGES]
    digest = hashlib.sha256(json.dumps([versions, arguments]).encode()).hexdigest()
    return cache_folder() / f"names-{digest[:20]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _ask(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the child's answer, empty where it gave none in time."""
    package_root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", _FACTS if arguments else _NAMES, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHILD_LIMIT_S,
            check=True,
            env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _log.warning("names could not be checked: %s", _last_line(error))
        return {}
    return answer if isinstance(answer, dict) else {}


def _last_line(error: Exception) -> str:
    """Return the child's last word on why it failed, or what kept it from answering."""
    said = getattr(error, "stderr", None) or b""
    lines = said.decode("utf-8", "replace").split("\n") if isinstance(said, bytes) else []
    return printable(next((line for line in reversed(lines) if line.strip()), str(error)))


def _write(file: Path, answer: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(answer), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        pass  # the next command asks again
