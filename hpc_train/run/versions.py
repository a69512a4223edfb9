"""The versions of Python and of the packages that affect a run's numbers, their differences, and the CPU.

Called at creation and by ``resume`` on the login node, and by ranks; none of the packages is imported.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hpc_train import __version__

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
_CPU_INFO = Path("/proc/cpuinfo")
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


def installed_packages() -> dict[str, dict[str, str | None]]:
    """Return ``version`` and ``sha256`` of each installed package but this one, by its normalized name.

    The hash is that of the hashes of its files in ``RECORD``: the same for two installations of one wheel;
    None without them, as for an editable installation.
    """
    packages: dict[str, dict[str, str | None]] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name and name != "hpc-train":  # of several, Python imports the first
            entry = {"version": distribution.version, "sha256": _record_hash(distribution)}
            packages.setdefault(name, entry)
    return dict(sorted(packages.items()))


def _record_hash(distribution: metadata.Distribution) -> str | None:
    if '"editable": true' in (distribution.read_text("direct_url.json") or ""):
        return None
    entries = []
    for line in (distribution.read_text("RECORD") or "").splitlines():
        path, _, digest_and_size = line.partition(",sha256=")
        # Scripts name the interpreter, and an installer adds files of its own.
        is_installers = ".dist-info/" in path and not path.endswith(("/METADATA", "/WHEEL"))
        if digest_and_size and not path.startswith(("..", "/")) and not is_installers:
            entries.append(line)
    return hashlib.sha256("\n".join(sorted(entries)).encode()).hexdigest() if entries else None


def cpu_model() -> str:
    """Return the model of this machine's CPU, or its architecture."""
    with suppress(OSError, UnicodeDecodeError):
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> Differences:
    """Return the differences, in the order of ``then``, new packages last."""
    keys = dict.fromkeys([*then, *now])
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def in_words(differences: Differences) -> str:
    """Return ``torch 2.14.0 → 2.15.0, numpy none → 2.4.6``."""
    pairs = [f"{key} {then or 'none'} → {now or 'none'}" for key, (then, now) in differences.items()]
    return ", ".join(pairs)
