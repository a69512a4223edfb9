"""The page of ``report`` in a real browser: no error, no request, accessible, and usable by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths
from hpc_train.report.html.collecting import collect
from hpc_train.report.html.page import render
from hpc_train.report.metrics_reader import rows_in
from tests.report.browser import chromium, missing, opened, violations
from tests.report.made_runs import made_sweep

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
_WIDTHS = (400, 1600)
_SCHEMES = ("light", "dark")
_ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunPaths]:
    runs = made_sweep(tmp_path_factory.mktemp("runs"), 10, steps=200)
    status = json.loads(runs[0].status.read_text())
    runs[0].status.write_text(json.dumps(status | {"reason": _ATTACK}))
    rows = [row | {_ATTACK: 1.0} for row in rows_in(runs[0].metrics)]
    runs[0].metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs


@pytest.fixture(scope="module")
def file(runs: list[RunPaths], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(collect(runs)))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def _requests(said: list[str], file: Path) -> list[str]:
    own = (f"request: {file.as_uri()}", "request: data:image/png;base64,")
    return [line for line in said if not line.startswith(own)]


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_the_page_is_accessible_and_asks_for_nothing(browser: Any, file: Path, scheme: str) -> None:
    for width in _WIDTHS:
        page, said = opened(browser, file, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert _requests(said, file) == []
        if width == _WIDTHS[_SCHEMES.index(scheme)]:  # axe takes seconds
            assert violations(page) == []
        page.context.close()


def _wait_for_scrolling(page: Any) -> None:
    """Wait until the page has noticed that it was scrolled, in a later frame: it hides the tip then."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


#: The events that a browser sends, some time later, where the page has scrolled below a pointer at rest.
_RESTING = """(area) => {
    area.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, movementX: 0, movementY: 0}));
    area.dispatchEvent(new PointerEvent("pointerleave"));
}"""


def test_values_are_read_by_keyboard_and_by_pointer(browser: Any, file: Path, runs: list[RunPaths]) -> None:
    page, said = opened(browser, file, viewport={"width": 1200, "height": 900})
    frame, tip = page.locator(".frame").first, page.locator("#tip")
    page.locator("#legend button").last.focus()
    page.keyboard.press("Tab")
    assert frame.evaluate("(each) => each === document.activeElement")
    assert frame.get_attribute("role") == "slider" and tip.is_visible()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "step 100" in tip.inner_text().replace("\n", " ")
    best = collect(runs).runs[0]
    (value,) = [
        row["accuracy"] for row in rows_in(best.paths.metrics) if row["split"] == "val" and row["step"] == 100
    ]
    assert f"{best.name} {float(f'{value:.6g}')!r}" in (frame.get_attribute("aria-valuetext") or "")
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    frame.scroll_into_view_if_needed()
    _wait_for_scrolling(page)
    frame.locator(".area").hover(position={"x": 200, "y": 100})
    assert tip.is_visible()
    second = page.locator(".frame").nth(1)
    second.focus()
    page.keyboard.press("End")
    _wait_for_scrolling(page)
    for each in (frame, second):
        each.locator(".area").evaluate(_RESTING)
    assert "step 200" in (second.get_attribute("aria-valuetext") or "") and tip.is_visible()
    assert "step 200" in tip.inner_text()
    second.locator(".area").hover(position={"x": 3, "y": 3})
    page.mouse.move(1, 1)
    assert tip.is_hidden()
    assert _requests(said, file) == []
    page.context.close()


def test_runs_are_sorted_filtered_and_hidden(browser: Any, file: Path) -> None:
    page, said = opened(browser, file, viewport={"width": 1200, "height": 900})
    rows = page.locator("#table tbody tr")
    page.locator("#table th button", has_text="seed").focus()
    page.keyboard.press("Enter")
    seeds = [int(row.locator("td").nth(2).inner_text()) for row in rows.all()]
    assert seeds == list(range(10))
    assert page.locator("#table [aria-sort=ascending]").inner_text().startswith("seed")
    page.keyboard.press("Enter")
    assert rows.first.locator("td").nth(2).inner_text() == "9"
    page.get_by_label("Filter").fill("failed")
    assert [row.is_visible() for row in rows.all()].count(True) == 1
    assert page.locator("#found").inner_text() == "1 of 10 runs"
    shown = page.locator(".charts path[data-run='0']:not(.off)").count()
    button = page.locator("#legend button").first
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert shown > 0 and page.locator(".charts path[data-run='0']:not(.off)").count() == 0
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    for _ in range(2):
        page.locator("#theme").press("Enter")
    assert page.locator("#theme").inner_text() == "Theme: dark" and page.evaluate(background) != before
    assert _requests(said, file) == []
    page.context.close()


def test_without_scripts_the_page_shows_its_tables_and_charts(browser: Any, file: Path) -> None:
    page, said = opened(browser, file, java_script_enabled=False, viewport={"width": 1200, "height": 900})
    assert page.locator("#table tbody tr").count() == 10
    assert page.locator(".frame[role=img]").count() > 5
    box = page.locator(".charts .curve.c0").first.bounding_box()
    assert box is not None and box["width"] > 100
    assert page.locator("#theme").is_hidden()
    assert page.locator("#attempts table").is_visible()
    assert page.locator("#time tbody tr").count() == 11
    assert _requests(said, file) == []
    page.context.close()
