"""The versions of Python and of the packages that affect a run's numbers, and their differences.

Called at creation and by ``resume`` on the login node, and by ranks; none of the packages is imported.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hpc_train import __version__

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
_TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)

#: Package → its earlier and its current version; None: not installed.
Differences = dict[str, tuple[str | None, str | None]]


def versions() -> dict[str, str]:
    """Return the versions in this interpreter's environment; packages that are not installed are omitted."""
    installed = {"hpc-train": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            distribution = metadata.distribution(package)
            # PyPI's metadata omits the CUDA version that torch was built with: 2.15.0 for 2.15.0+cu132.
            cuda_build = _torch_version(distribution) if package == "torch" else None
            installed[package] = cuda_build or distribution.version
        except metadata.PackageNotFoundError:
            continue  # the cluster's environment may differ from the login node's
    return installed


def _torch_version(distribution: metadata.Distribution) -> str | None:
    try:
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = _TORCH_VERSION.search(text)
    return match[1] if match else None


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    """Return the differences, in the order of ``then``, new packages last."""
    keys = dict.fromkeys([*then, *now])
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def in_words(differences: Differences) -> str:
    """Return ``torch 2.14.0 → 2.15.0, numpy none → 2.4.6``."""
    pairs = [f"{key} {then or 'none'} → {now or 'none'}" for key, (then, now) in differences.items()]
    return ", ".join(pairs)
