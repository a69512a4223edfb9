"""Debian's chromium, driven by Playwright, for the pages that ``report`` writes."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Debian's names of it, and Ubuntu's.
_PROGRAMS = ("chromium", "chromium-browser")


def missing() -> str | None:
    """Return why there is no browser to test with, None if there is one."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        return "axe-playwright-python is not installed"
    if program() is None:
        return "no chromium on this machine; tests/report/install.sh installs Debian's as root"
    return None


def program() -> str | None:
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser. It reaches no network: every host name is unknown to it."""
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=options)
        yield browser
        browser.close()
