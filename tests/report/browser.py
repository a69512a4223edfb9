"""Debian's chromium, driven by Playwright, for the pages of ``report`` and the docs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def opened(browser: Any, file: Path, **options: Any) -> tuple[Any, list[str]]:
    """Return the page, and what it says on the console, raises or requests beside its own file."""
    page = browser.new_context(**options).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: said.append(f"request: {request.url}"))
    page.goto(file.as_uri())
    return page, said


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """Return what axe finds, which takes seconds: the rule, and the elements that break it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
