"""``make docs``: every page is on a shelf, every link leads to a page, nothing is loaded from other hosts.

The site is opened in chromium as a reader opens it: from its files, without a server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY
from tests.report.browser import chromium, missing, opened, violations
from tests.waiting import HANG_LIMIT_S

pytestmark = pytest.mark.slow
needs_browser = pytest.mark.skipif(missing() is not None, reason=missing() or "")
_LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]* src="?(?:https?:)?//|<link[^>]*rel="?(?:stylesheet|preconnect)[^>]*//"""
)
#: The first page, one with commands, one with a diagram, the one with the widest tables.
_OPENED = ("index", "tutorial", "explain_model_parallelism", "reference_file")
_WIDTHS = {"light": (400, 1600), "dark": (1600, 400)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANG_LIMIT_S,
    )
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def test_the_site_builds_without_a_warning(site: Path) -> None:
    pages = {path.stem: path.read_text() for path in site.glob("*.html")}
    assert pages.keys() - {"404"} == {path.stem for path in (REPOSITORY / "docs").glob("*.md")}
    for name, html in pages.items():
        assert not _LOADED.search(html), name
        assert "__config" in html and 'data-md-component="source"' not in html, "asks GitHub's API"
    assert "/blob/main/tests/plugin_example" in pages["plugins"]
    assert not list(site.rglob("*.py"))


@needs_browser
@pytest.mark.parametrize("scheme", _WIDTHS)
def test_pages_are_accessible_and_load_only_the_site(browser: Any, site: Path, scheme: str) -> None:
    for name in _OPENED:
        for width in _WIDTHS[scheme]:
            file = site / f"{name}.html"
            page, said = opened(browser, file, viewport={"width": width, "height": 900}, color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
            assert [line for line in said if not _is_of(site, line)] == []
            if width == _WIDTHS[scheme][0] and (name, scheme) != ("reference_file", "dark"):  # a long page
                assert violations(page) == [], (name, width)
            page.context.close()


@needs_browser
def test_the_colours_are_switched_and_kept(browser: Any, site: Path) -> None:
    page, said = opened(browser, site / "index.html", color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.get_by_title("Dark mode").click()
    page.goto((site / "glossary.html").as_uri())
    assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert page.evaluate(background) != before and [line for line in said if not _is_of(site, line)] == []
    page.context.close()


@needs_browser
def test_a_search_leads_to_the_page(browser: Any, site: Path) -> None:
    page, said = opened(browser, site / "index.html", viewport={"width": 1200, "height": 900})
    page.get_by_role("textbox", name="Search").press_sequentially("gradient accumulation")
    found = page.locator(".md-search-result__link")
    found.first.wait_for(timeout=1000 * HANG_LIMIT_S)
    assert any("parallelism.html" in (each.get_attribute("href") or "") for each in found.all())
    found.first.click()
    assert "gradient accumulation" in page.locator("article").inner_text().lower()
    assert [line for line in said if not _is_of(site, line)] == []
    page.context.close()


def _is_of(site: Path, line: str) -> bool:
    return line.startswith((f"request: {site.as_uri()}/", "request: data:image/"))
