"""Nothing that comes from a run acts in the page: markup, quotes, control characters, template syntax."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from hpc_train.paths import RunPaths
from hpc_train.report.html import limits
from hpc_train.report.html.collecting import Collected, collect
from hpc_train.report.html.page import render
from hpc_train.run.files import read_json
from hpc_train.run.spikes import Spike, SpikesFile
from hpc_train.training.evaluation_outputs import png
from hpc_train.training.tasks.drawing import DESCRIPTION
from tests.report.made_runs import made_sweep

_FRAGMENTS = (
    "<script>alert(1)</script>", "</script>", "</style>", "</title>", "<!--", "-->", "]]>", "<![CDATA[",
    '"', "'", "`", "&lt;", "&#60;", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "{{ 7*7 }}",
    "{% raw %}", "\u202e", "\u2066", "\x00", "\x1b[31m", "\x7f", "\x85", "\ud800", "\ufeff", "\u2028", "\n",
    "\t", "=", "/", "é", "1e999",
)  # fmt: skip
_PARTS = st.lists(st.one_of(st.sampled_from(_FRAGMENTS), st.text(max_size=6)), min_size=1, max_size=4)
_HOSTILE = st.lists(_PARTS.map("".join), min_size=8, max_size=20).map(cycle)
_NUMBERS = st.lists(
    st.one_of(st.floats(), st.integers(), st.just(2**70), st.booleans(), st.none(), st.text(max_size=3)),
    min_size=3,
    max_size=8,
).map(cycle)
#: Characters that act on a terminal or on the order of text, and line separators of JavaScript.
_ACTING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_TAGS = {
    "html", "head", "meta", "title", "style", "body", "a", "header", "div", "p", "h1", "h2", "h3", "button",
    "nav", "ul", "li", "main", "dl", "dt", "dd", "span", "section", "label", "input", "table", "thead",
    "tbody", "tr", "th", "td", "figure", "figcaption", "svg", "text", "line", "path", "circle", "rect",
    "img", "details", "summary", "pre", "footer", "script", "image", "use", "defs", "select", "option",
}  # fmt: skip
_ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "class", "href", "id", "type", "hidden",
    "aria-label", "aria-labelledby", "aria-hidden", "aria-pressed", "tabindex", "role", "scope", "title",
    "for", "data-key", "data-run", "data-chart", "width", "height", "x", "y", "x1", "x2", "y1", "y2", "dx",
    "dy", "cx", "cy", "r", "rx", "d", "viewbox", "preserveaspectratio", "src", "alt", "open", "text-anchor",
    "transform", "aria-sort", "data-classes", "value", "fill",
}  # fmt: skip


class _Parsed(HTMLParser):
    """The elements of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._is_in_script = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links += [value or "" for name, value in attributes if name in {"href", "src"}]
        self._is_in_script = tag == "script"
        if self._is_in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_in_script = False

    def handle_data(self, text: str) -> None:
        if self._is_in_script:
            self.scripts[-1] += text
        self.text.append(text)

    def handle_comment(self, text: str) -> None:
        self.tags.add(f"<!--{text}")

    def unknown_decl(self, text: str) -> None:
        self.tags.add(f"<![{text}")


def _check(page: str, script: str) -> _Parsed:
    page.encode()  # no lone surrogates
    parsed = _Parsed(page)
    assert parsed.tags <= _TAGS
    assert parsed.attributes <= _ATTRIBUTES
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in parsed.links)
    assert len(parsed.scripts) == 2 and parsed.scripts[1] == script
    json.loads(parsed.scripts[0])
    assert not _ACTING.search(page)
    return parsed


@cache
def _script() -> str:
    return _Parsed(render(Collected([]))).scripts[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunPaths]:
    return made_sweep(tmp_path_factory.mktemp("fuzz"), 2, steps=20)


@pytest.mark.slow
@given(texts=_HOSTILE, numbers=_NUMBERS)
@settings(max_examples=40, phases=[Phase.reuse, Phase.generate])
def test_run_texts_are_escaped(texts: Iterator[str], numbers: Iterator[Any], runs: list[RunPaths]) -> None:
    for paths in runs:
        _spoil(paths, texts, numbers)
    collected = collect(runs)
    renamed = [replace(run, name=next(texts), experiment=next(texts)) for run in collected.runs]
    _check(render(Collected([replace(collected.rankings[0], runs=renamed)])), _script())


def _spoil(paths: RunPaths, texts: Iterator[str], numbers: Iterator[Any]) -> None:
    def hostile() -> str:
        return next(texts)

    facts = read_json(paths.run) or {}
    facts |= {
        "versions": {hostile(): hostile()},
        "code": {"commit": hostile(), "snapshot": hostile()},
        "source": {"file": hostile(), "overrides": [hostile()]},
        "changes": {"1": [hostile()]},
        "created": hostile(),
    }
    paths.run.write_text(json.dumps(facts))
    resolved = json.loads(paths.resolved.read_text())
    paths.resolved.write_text(
        json.dumps(resolved | {"model": {"name": hostile(), "args": {hostile(): hostile()}}})
    )
    status = json.loads(paths.status.read_text())
    paths.status.write_text(json.dumps(status | {"reason": hostile()}))
    rows = [
        {"split": split, "step": step, "attempt": 1, hostile(): next(numbers), "loss": next(numbers)}
        for step, split in ((1, "train"), (2, "val"), (3, hostile()), (next(numbers), "train"))
    ]
    rows += [{"split": "train", "step": step, "attempt": 1, "step_s": next(numbers)} for step in (4, 10**400)]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), errors="replace")
    spikes = [{name: next(numbers) for name in ("loss", "loss_limit", "grad_norm")} for _ in range(3)]
    spikes = [spike | {"step": step} for spike, step in zip(spikes, (3, next(numbers), 10**18), strict=True)]
    paths.spikes.write_text("".join(json.dumps(spike) + "\n" for spike in spikes), errors="replace")
    record = json.loads(paths.attempt(1).record.read_text())
    changes: dict[str, Any] = {"reason": hostile(), "hosts": [hostile()], "cause": hostile()}
    paths.attempt(1).record.write_text(json.dumps(record | changes))
    names = [
        hostile().replace("\x00", "").replace("\n", "").replace("\r", "").replace('"', '""') for _ in range(2)
    ]
    table = f'class,"{names[0]}","{names[1]}"\n"{names[0]}",3,1\n"{names[1]}",0,2\n'
    evaluation = paths.evaluation(20)
    shutil.rmtree(evaluation, ignore_errors=True)
    evaluation.mkdir(parents=True)
    (evaluation / "confusion_matrix.csv").write_text(table, "utf-8", "replace")
    (evaluation / "per_class.csv").write_text(f'"{names[0]}",b\n"{names[1]}",2\n', "utf-8", "replace")
    stem = re.sub("[/\x00]", "", hostile()).encode("utf-8", "replace").decode()[:20]
    sheet = Image.new("RGB", (1, 1))
    facts: dict[str, Any] = {"title": hostile(), "parts": [(hostile(), 0, 0, 1, 1)], "lines": [hostile()]}
    facts |= {"legend": [(hostile(), "#ff0000"), ("a", hostile())], "classes": [hostile(), hostile()]}
    sheet.info[DESCRIPTION] = [facts, {"title": hostile(), "parts": [(hostile(), next(numbers))]}]
    (evaluation / f"p{stem}.png").write_bytes(png(sheet))
    (evaluation / "sample.txt").write_text(hostile(), "utf-8", "replace")
    paths.experiment.write_text(hostile(), "utf-8", "replace")


def test_the_page_describes_the_runs_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made_sweep(tmp_path, 12, steps=100)
    page = render(collect(runs))
    text = " ".join(" ".join(_check(page, _script()).text).split())
    for words in (
        "12 runs", "compared by val/accuracy (max)", "1 failed", "Learning rate", "Throughput", "samples/s",
        "% of the step", "GiB", "lr=0.03 weight_decay=0.0005 seed=9", "weight_decay", "2026-11-20 09:00",
        "preempted at step 30", "rank 1 on n2: killed by SIGKILL", "Per-class IoU", "4 other runs in gray",
        "4c2f8a90d1e7b3562f0c9d84a1b7e6035d9c2f11 with uncommitted changes", "prediction-0", "torch",
    ):  # fmt: skip
        assert words in text, words
    assert page.count("data:image/png;base64,") == 2 * 4
    assert page.count("<td>700</td>") == 4
    monkeypatch.setattr(limits, "TABLE_COLUMNS", 1)
    assert "<td>700</td>" not in render(collect(runs))


def test_spikes_of_colored_runs_are_marked_with_action_and_samples(tmp_path: Path) -> None:
    runs = made_sweep(tmp_path, 10, steps=100)
    best, *_, gray = (run.paths for run in collect(runs).runs)
    for paths in (best, gray):
        file = SpikesFile(paths.spikes, 0)
        file.append(Spike(50, 9.0, 2.0, 3.0), [4, 5], "skip")
        file.append(Spike(75, None, None, -1.0, 3.0), range(9), "report")
        file.close()
    page = render(collect(runs))
    parsed = _check(page, _script())
    # The loss is above the scale, a norm of the second one below it.
    places = re.findall(r'<svg class="spike c(\d)" data-run="\d" x="([\d.]+)%" y="([\d.]+)%">', page)
    assert [place[:2] for place in places] == [("0", "50.0"), ("0", "50.0"), ("0", "75.0")]
    assert places[0][2] == "0.0" and 0 < float(places[1][2]) < 100 and places[2][2] == "100.0"
    words = "spike at step 50: loss 9 above 2, update skipped (samples 4, 5)"
    assert parsed.text.count(words) == 2 and page.count("▼ 1 spike<") == page.count("▼ 2 spikes<") == 1
    marked = [chart["spikes"] for chart in json.loads(parsed.scripts[0])["charts"] if chart["spikes"]]
    assert [len(spikes) for spikes in marked] == [1, 2] and marked[0] == [[0, 50, words]]


def test_runs_without_anything_have_a_page(tmp_path: Path) -> None:
    assert "0 runs" in render(Collected([]))
    (paths,) = made_sweep(tmp_path, 1, steps=20)
    for path in (paths.metrics, paths.attempt(1).record, paths.experiment, paths.status):
        path.unlink()
    text = " ".join(_check(render(collect([paths])), _script()).text)
    assert "no metric yet" in text and "experiment.yaml can't be read" in text
