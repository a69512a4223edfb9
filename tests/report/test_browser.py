"""The page of ``report`` in a real browser: no error, no request, accessible, and usable by keyboard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hpc_train.paths import RunPaths
from hpc_train.report.html.collecting import collect
from hpc_train.report.html.page import render
from hpc_train.report.metrics_reader import rows_in
from hpc_train.run.spikes import Spike, SpikesFile
from tests.report.browser import chromium, missing, opened, violations
from tests.report.made_experiments import made_experiments
from tests.report.made_runs import made_sweep
from tests.run.runs import write_rows

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
_WIDTHS = (400, 1280, 1600)
_SCHEMES = ("light", "dark")
_ATTACK = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunPaths]:
    runs = made_sweep(tmp_path_factory.mktemp("runs"), 10, steps=200)
    status = json.loads(runs[0].status.read_text())
    runs[0].status.write_text(json.dumps(status | {"reason": _ATTACK}))
    rows = [row | {_ATTACK: 1.0} for row in rows_in(runs[0].metrics)]
    write_rows(runs[0], rows)
    spikes = SpikesFile(collect(runs).runs[0].paths.spikes, 0)
    spikes.append(Spike(51, 9.0, 2.0), [4, 5], "skip")
    spikes.close()
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return pages of 1, 9 and 200 runs of several tasks."""
    folder = tmp_path_factory.mktemp("experiments")
    files = {}
    for count in (1, 9, 200):
        files[count] = folder / f"{count}.html"
        files[count].write_text(render(collect(made_experiments(folder / str(count), count))))
    return files


#: Texts that are cut, too small, or cover others of the same chart; returned as words.
_FLAWS = """() => {
    const seen = (node) => node.checkVisibility();
    const all = (selector, root = document) => [...root.querySelectorAll(selector)].filter(seen);
    const flaws = [];
    if (document.documentElement.scrollWidth > innerWidth) flaws.push("the page is wider than the screen");
    for (const node of all("body *")) {
        const ownText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!ownText || node.closest("script, style, .skip")) continue;
        if (parseFloat(getComputedStyle(node).fontSize) < 11) flaws.push(`small: ${node.textContent}`);
        const box = node.getBoundingClientRect();
        const scrolled = node.closest(".scroll, pre, option") && !node.closest(".runs, .stacked");
        if (!scrolled && (box.left < 0 || box.right > innerWidth)) flaws.push(`cut: ${node.textContent}`);
    }
    for (const frame of all(".frame")) {
        const boxes = all("text", frame).map((text) => [text.textContent, text.getBoundingClientRect()]);
        for (const [place, [one, a]] of boxes.entries()) {
            for (const [other, b] of boxes.slice(place + 1)) {
                const [x, y] = [Math.max(a.left, b.left), Math.max(a.top, b.top)];
                const covers = x < Math.min(a.right, b.right) && y < Math.min(a.bottom, b.bottom);
                if (covers) flaws.push(`${one} covers ${other}`);
            }
        }
        const names = all("text.name", frame).map((text) => text.textContent);
        if (names.length !== 2 || names.includes("")) flaws.push(`axes are called ${names}`);
    }
    for (const scroll of all(".scroll:has(.runs, .stacked)")) {
        const { scrollWidth, clientWidth } = scroll;
        if (scrollWidth > clientWidth) flaws.push(`${scrollWidth} pixels of a table on ${clientWidth}`);
    }
    for (const table of all("table.runs")) {
        const heads = all("th", table.tHead);
        if (heads.length > 8) flaws.push(`${heads.length} columns`);
        const metric = heads.find((head) => head.textContent.startsWith("best "));
        if (!metric) flaws.push("the metric has no column");
    }
    const charts = new Set(all(".charts figure").map((figure) => figure.getBoundingClientRect().left));
    if (innerWidth < 600 && charts.size !== 1) flaws.push("charts are side by side");
    return flaws;
}"""


def test_nothing_is_cut_covered_or_small_at_any_width(browser: Any, pages: dict[int, Path]) -> None:
    """Screenshots are written to the folder ``HPC_TRAIN_SCREENSHOTS`` if it is set."""
    folder = os.environ.get("HPC_TRAIN_SCREENSHOTS")
    for (count, file), width in product(pages.items(), _WIDTHS):
        page, said = opened(browser, file, viewport={"width": width, "height": 900})
        assert (page.evaluate(_FLAWS), _requests(said, file)) == ([], []), (count, width)
        for scheme in _SCHEMES:
            page.emulate_media(color_scheme=scheme)
            if folder:
                page.screenshot(path=Path(folder) / f"{count}-{width}-{scheme}.png", full_page=True)
            if (count, width, scheme) in {(9, 400, "light"), (9, 1600, "dark")}:  # axe takes seconds
                page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
                assert violations(page) == []
        page.context.close()


def test_other_columns_are_behind_a_menu(browser: Any, pages: dict[int, Path]) -> None:
    for width, count in ((1280, 8), (400, 3)):
        page, _ = opened(browser, pages[9], viewport={"width": width, "height": 900})
        table, menu = page.locator("table.runs").first, page.locator("details.menu").first
        heads = table.locator("thead th:visible")
        assert heads.all_inner_texts()[:3] == ["run", "state", "best val/accuracy"]
        assert heads.count() == count
        menu.locator("summary").press("Enter")
        menu.get_by_label("goodput").check()
        assert heads.count() == count + 1 and heads.last.inner_text() == "goodput"
        assert table.locator("tbody tr").first.locator("td:visible").count() == count
        page.keyboard.press("Escape")
        assert menu.get_by_label("goodput").is_hidden()
        page.context.close()


def test_wrong_predictions_are_first_and_filtered_by_class(browser: Any, pages: dict[int, Path]) -> None:
    page, _ = opened(browser, pages[9], viewport={"width": 1280, "height": 900})
    sheet = page.locator(".sheet").first
    captions = sheet.locator("figcaption").all_inner_texts()
    are_wrong = ["(wrong)" in caption for caption in captions]
    assert are_wrong == sorted(are_wrong, reverse=True) and len(set(are_wrong)) == 2
    sheet.get_by_label("Class").select_option("dog (3)")
    shown = sheet.locator("figcaption:visible").all_inner_texts()
    assert len(shown) == 3 and all("dog" in caption for caption in shown)
    assert page.locator(".sheet").nth(1).locator("figure:visible").count() == 8
    crop = sheet.locator("figure:visible svg.crop").first.bounding_box()
    assert crop is not None and crop["width"] >= 128
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
    collected = collect(runs)
    best, label = collected.runs[0], collected.labels[0]
    (value,) = [
        row["accuracy"] for row in rows_in(best.paths.metrics) if row["split"] == "val" and row["step"] == 100
    ]
    assert f"{label} {float(f'{value:.6g}')!r}" in (frame.get_attribute("aria-valuetext") or "")
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


def test_a_spike_is_named_below_the_pointer_and_at_the_cursor(browser: Any, file: Path) -> None:
    page, said = opened(browser, file, viewport={"width": 1200, "height": 900})
    words = "spike at step 51: loss 9 above 2, update skipped (samples 4, 5)"
    figure = page.locator(".charts figure", has_text="▼ 1 spike")
    mark, frame, tip = figure.locator(".spike"), figure.locator(".frame"), page.locator("#tip")
    assert mark.count() == 1 and mark.locator("title").count() == 0
    frame.scroll_into_view_if_needed()
    _wait_for_scrolling(page)
    mark.hover()
    assert words in tip.inner_text()
    frame.focus()
    page.keyboard.press("Home")
    assert words not in (frame.get_attribute("aria-valuetext") or "")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    assert words in (frame.get_attribute("aria-valuetext") or "") and words in tip.inner_text()
    page.locator("#legend button").first.press("Enter")
    assert mark.is_hidden()
    assert _requests(said, file) == []
    page.context.close()


def test_runs_are_sorted_filtered_and_hidden(browser: Any, file: Path) -> None:
    page, said = opened(browser, file, viewport={"width": 1200, "height": 900})
    rows = page.locator("table.runs tbody tr")
    page.locator("table.runs th button", has_text="seed").focus()
    page.keyboard.press("Enter")
    seeds = [int(row.locator("td").nth(4).inner_text()) for row in rows.all()]
    assert seeds == list(range(10))
    assert page.locator("table.runs [aria-sort=ascending]").inner_text().startswith("seed")
    page.keyboard.press("Enter")
    assert rows.first.locator("td").nth(4).inner_text() == "9"
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
    assert page.locator("table.runs tbody tr").count() == 10
    assert page.locator(".frame[role=img]").count() > 5
    box = page.locator(".charts .curve.c0").first.bounding_box()
    assert box is not None and box["width"] > 100
    assert page.locator(".spike title").count() == 1
    assert page.locator("#theme").is_hidden()
    assert page.locator("#attempts table").is_visible()
    assert page.locator("#time tbody tr").count() == 11
    assert _requests(said, file) == []
    page.context.close()
