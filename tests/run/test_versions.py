"""Versions that decide on numbers, and how two sets of them differ."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpc_train import __version__
from hpc_train.run.versions import differences, in_words, installed_packages, versions
from tests.waiting import HANG_LIMIT_S


def test_versions_are_those_that_ranks_import() -> None:
    import torch

    found = versions()
    names = ["hpc-train", "python", "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg"]
    assert list(found) == names
    assert found["hpc-train"] == __version__
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__, "with the CUDA that it was built with"


def test_nothing_is_imported_to_find_out() -> None:
    code = (
        "import sys; from hpc_train.run.versions import versions; versions(); "
        "sys.exit(bool({'torch', 'torchvision', 'timm', 'numpy', 'PIL', 'simplejpeg'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=HANG_LIMIT_S).returncode == 0


def test_a_missing_package_is_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == "timm":
            raise metadata.PackageNotFoundError
        return known(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    assert "timm" not in versions()


def test_differences_name_what_changed_came_and_went() -> None:
    then = {"python": "3.11.2", "torch": "2.14.0+cu130", "timm": "1.0.20"}
    now = {"python": "3.11.2", "torch": "2.14.0+cu132", "numpy": "2.4.6"}
    found = differences(then, now)
    assert found == {
        "torch": ("2.14.0+cu130", "2.14.0+cu132"),
        "timm": ("1.0.20", None),
        "numpy": (None, "2.4.6"),
    }
    assert in_words(found) == "torch 2.14.0+cu130 → 2.14.0+cu132, timm 1.0.20 → none, numpy none → 2.4.6"
    assert differences(then, then) == {}


def test_packages_are_identified_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the interpreter in their scripts, nor by who installed them."""

    def install(folder: str, record: str, direct_url: str = "") -> Path:
        info = tmp_path / folder / "Some.Package-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Some.Package\nVersion: 1.0\n")
        (info / "RECORD").write_text(record)
        (info / "direct_url.json").write_text(direct_url)
        return info.parent

    own = "some/__init__.py,sha256=aaa,10\nsome/__pycache__/x.pyc,,\n"
    other = f"../bin/some,sha256=ccc,5\n{own}Some.Package-1.0.dist-info/INSTALLER,sha256=ddd,4\n"
    entries = []
    for folder in (
        install("one", own),
        install("other", other),
        install("changed", own.replace("aaa", "bbb")),
        install("editable", own, '{"dir_info": {"editable": true}, "url": "file:///home/ada"}'),
    ):
        monkeypatch.setattr(sys, "path", [str(folder)])
        entries.append(installed_packages())
    one, same, changed, editable = (entry["some-package"] for entry in entries)
    assert one["version"] == "1.0" and one == same and changed["sha256"] not in (None, one["sha256"])
    assert editable["sha256"] is None
