"""``make docs``: every page is on a shelf, every link leads to a page, nothing is loaded from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY

_LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src="?(?:https?:)?//|<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*//"""
)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert pages.keys() - {"404"} == {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    for name, html in pages.items():
        assert not _LOADED.search(html), name
        assert "__config" in html and 'data-md-component="source"' not in html, "asks GitHub's API"
    assert "/blob/main/tests/plugin_example" in pages["plugins"]
    assert not list(tmp_path.rglob("*.py"))
