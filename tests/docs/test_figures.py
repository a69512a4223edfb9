"""What pages say of costs is in benchmarks/results/."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, compile_start, memory, open_files, performance_page, pipeline, preemption
from benchmarks import input as input_benchmark
from benchmarks.measuring import RESULTS
from tests.docs.pages import PAGES, REPOSITORY

DOCS = REPOSITORY / "docs"
#: What cites a measurement: the paragraphs that name a benchmark, and the tables right after them.
_CITING = re.compile(r"benchmarks[./](?!results\b)\w+|benchmarks/results/|performance\.md|make bench")
_TABLE = re.compile(r"^\s*\|")
_FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|times\b|/\s?\d)|\d+ open files")
#: Figures of trained models, and of time and memory that something took.
_TRAINED = re.compile(r"(?:accuracy|mIoU|mAP50|mAP|loss|perplexity)(?: of)? (\d*\.\d+)")
_TOOK = re.compile(
    r"\b(?:took|reached|opens|keeps|uses)\b[^.;]*? (\d[\d.,]*\d|\d) (?:s|ms|MB|GB|MiB|GiB|minutes)\b"
)
#: Measured times in words have no result to be compared with.
_VAGUE = re.compile(r"\b(?:under|about) (?:a|one|two|three|four|five) (?:seconds?|minutes?)\b")
_RESULT = re.compile(r"benchmarks/results/(\w+)\.json")
_EXAMPLES = REPOSITORY / "examples"
_NOT_TRAINED = "not trained to its end"


def test_the_page_is_what_the_results_give() -> None:
    assert performance_page.stale(DOCS, RESULTS) == set(), "run python -m benchmarks.performance_page"


def test_a_figure_that_is_not_in_the_results_makes_the_page_stale(tmp_path: Path) -> None:
    performance_page.write(tmp_path, RESULTS)
    assert performance_page.stale(tmp_path, RESULTS) == set()
    page, plot = tmp_path / "performance.md", next((tmp_path / "plots").iterdir())
    figure = re.findall(r"\(\d\.\d+–", page.read_text())[0]
    page.write_text(page.read_text().replace(figure, "(0.01–", 1))
    plot.write_text(plot.read_text().replace('cx="', 'cx="1', 1))
    (tmp_path / "plots" / "old.svg").touch()
    assert performance_page.stale(tmp_path, RESULTS) == {page.name, f"plots/{plot.name}", "plots/old.svg"}
    performance_page.write(tmp_path, RESULTS)
    assert performance_page.stale(tmp_path, RESULTS) == set()


def test_what_has_no_result_is_listed_as_not_measured(tmp_path: Path) -> None:
    for name in ("step", "memory"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    found = json.loads((tmp_path / "step.json").read_text())
    found["comparisons"][0]["not measured"] = ["Fabric"]
    (tmp_path / "step.json").write_text(json.dumps(found))
    page = performance_page.generated(tmp_path)["performance.md"]
    listed = page.partition("## Not measured")[2].partition("## Conditions")[0]
    assert f"- {found['comparisons'][0]['title']}: Fabric\n" in listed
    assert "- `python -m benchmarks.preemption`: " in listed and "benchmarks.memory`" not in listed
    assert "- `python -m benchmarks.gpu_throughput`, which needs a CUDA device: " in listed


@pytest.mark.parametrize("target", checkpoint.TARGETS, ids=": ".join)
def test_a_save_costs_no_more_than_it_may(target: tuple[str, str]) -> None:
    assert checkpoint.ratio(_result("checkpoint")["comparisons"], *target) <= checkpoint.TARGETS[target]


def test_pages_say_what_was_measured() -> None:
    missing = [(page, said) for page, said in _said() if said not in _words(DOCS / page)]
    assert missing == []


def test_a_figure_of_a_paragraph_that_names_a_benchmark_was_measured() -> None:
    unknown = {}
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "performance.md"):
            continue
        known = [said for name, said in _said() if Path(name).name == page.name]
        for paragraph in _citing(page.read_text(encoding="utf-8")):
            if found := _figures(paragraph, known):
                unknown[page.name, paragraph[:60]] = found
    assert unknown == {}


def test_a_figure_of_time_memory_or_training_names_its_result() -> None:
    wrong = {}
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "performance.md"):
            continue
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in _paragraphs(prose):
            if unknown := _without_result(paragraph):
                wrong[page.name, paragraph[:60]] = unknown
    assert wrong == {}


def test_a_figure_without_a_result_is_found() -> None:
    cited = "It took {1} s and reached an accuracy of {0} ([result](../benchmarks/results/headlines.json))."
    assert _without_result("Reached an accuracy of 0.82.") == ["0.82"]
    assert _without_result(cited.format("0.82", "160")) == []
    assert _without_result(cited.format("0.83", "160")) == ["0.83"]
    assert _without_result(cited.format("0.82", "161")) == ["161"]
    assert _without_result("It trains in under two minutes.") == ["under two minutes"]


@pytest.mark.parametrize("name", sorted(path.stem for path in _EXAMPLES.glob("*.yaml")))
def test_an_example_has_a_figure_with_its_result_or_was_not_trained(name: str) -> None:
    (row,) = re.findall(rf"^\| \[{name}\]\(.*$", (_EXAMPLES / "README.md").read_text(), re.MULTILINE)
    time, figure = (cell.strip() for cell in row.strip("| ").split("|")[-2:])
    results = _RESULT.findall(figure)
    assert bool(results) != figure.startswith(_NOT_TRAINED), row
    own = re.sub(r"published[^|]*", "", re.sub(r"\(.*?\)", "", figure))
    values = re.findall(r"\d+\.\d+", own)
    assert bool(values) == bool(results)
    seconds = re.findall(r"\d+", time)
    assert [value for value in values + seconds if not _is_in(value, results, name)] == [], row
    said = re.sub(r"\[result\]\(\.\./(.*?)\)", r"\1", figure)
    assert f"\n# Result: {said}\n" in (_EXAMPLES / f"{name}.yaml").read_text()


def test_each_cell_of_the_comparison_has_a_source() -> None:
    section = (REPOSITORY / "README.md").read_text().split("## How it compares")[1].split("\n## ")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if _TABLE.match(line)]
    links = set(re.findall(r"^\[([\w-]+)\]: https://", section, re.MULTILINE))
    wrong, used = [], set()
    for _, *cells in rows:
        assert len(cells) == len(head) - 1
        for cell in cells:
            link = re.fullmatch(r"\[[^]]+\](?:\[([\w-]+)\]|\((docs/[\w./#-]+)\))", cell)
            wrong += [] if link and (link[2] or link[1] in links) else [cell]
            used |= {link[1]} if link and link[1] else set()
    assert rows and wrong == []
    assert links == used
    assert re.search(r"compared with the linked pages on\s20\d\d-\d\d-\d\d\.", section)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items and rows of tables, each as one line."""
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\|)", text):
        yield " ".join(paragraph.split())


def _without_result(paragraph: str) -> list[str]:
    """Return the figures that the results files named in the paragraph do not contain."""
    values = [*_TRAINED.findall(paragraph), *_TOOK.findall(paragraph)]
    unknown = [value for value in values if not _is_in(value, _RESULT.findall(paragraph))]
    return unknown + _VAGUE.findall(paragraph)


def _is_in(value: str, results: list[str], example: str = "") -> bool:
    """Return True if a results file contains the value, rounded as it is written.

    ``example``: of a file with tables about single examples, only its own counts.
    """
    digits = len(value.partition(".")[2])
    for name in results:
        tables = [*_result(name).get("tables", []), *_result(name).get("comparisons", [])]
        own = [table for table in tables if f"examples/{example}.yaml" in table["title"]]
        others = [table for table in tables if "examples/" not in table["title"]]
        numbers = re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", json.dumps(own or (others if example else tables)))
        if any(round(float(number), digits) == float(value.replace(",", "")) for number in numbers):
            return True
    return False


def test_a_planted_figure_is_found() -> None:
    text = "`make bench`: 1.5 times as fast.\n\n| a | 3 / 4 |\n\nAlso 5 % of it.\n"
    assert [_figures(each, ["1.5 times as"]) for each in _citing(text)] == [[], ["3 / 4"]]


def _figures(paragraph: str, known: list[str]) -> list[str]:
    for said in known:
        paragraph = paragraph.replace(said, "")
    return _FIGURE.findall(paragraph)


def _citing(text: str) -> Iterator[str]:
    """Yield paragraphs that name a benchmark, and each table that follows one."""
    cites = False
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        is_table = _TABLE.match(paragraph) is not None
        cites = bool(_CITING.search(paragraph)) or (cites and is_table)
        if cites:
            yield " ".join(paragraph.split())


def _words(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


def _said() -> list[tuple[str, str]]:
    """Return what pages say of measurements, made from the results: page and words."""
    return [
        *(("recovery.md", said) for said in _of_checkpoints()),
        *(("cluster.md", said) for said in _of_packs()),
        *(("preemption.md", said) for said in _of_preemption()),
        *(("parallelism.md", said) for said in _of_bubbles()),
        *(("parallelism.md", said) for said in _of_memory()),
        *(("parallelism.md", said) for said in _of_compilation()),
        *(("architecture.md", said) for said in _of_open_files()),
        *(("watch.md", said) for said in _of_watching()),
        *(("language_models.md", said) for said in _of_shakespeare()),
        *(("gpu.md", said) for said in _of_gpu_tests()),
        *(("../README.md", said) for said in _of_the_comparison()),
    ]


def _of_checkpoints() -> Iterator[str]:
    compared = _result("checkpoint")["comparisons"]
    blocked, dcp = checkpoint.BLOCKED, checkpoint.BLOCKED_DCP

    def percent(title: str, arm: str, digits: int = 0) -> str:
        return f"{100 * checkpoint.ratio(compared, title, arm):.{digits}f} %"

    yield f"{percent(blocked, checkpoint.ASYNC, 1)} of the time that `torch.save`"
    yield f"{percent(dcp, checkpoint.ASYNC)} of the time that DCP"
    yield f"{percent(blocked, checkpoint.NO_OVERLAP)} and {percent(dcp, checkpoint.NO_OVERLAP)}"
    whole = checkpoint.ratio(compared, checkpoint.COMPLETE, checkpoint.SYNC)
    yield f"{whole:.2f} times a raw write"
    during = checkpoint.ratio(compared, checkpoint.STEP, checkpoint.DURING)
    yield f"{during:.2f} times as long as one alone"
    resume = checkpoint.ratio(compared, checkpoint.LOAD, checkpoint.RESUME)
    yield f"{resume:.2f} times as long as `torch.load`"


def _of_watching() -> Iterator[str]:
    (found,) = _result("watch_cpu")["tables"]
    share = found["rows"]["200 runs, 4 written to"]["share of a core, %"]
    yield f"it took [{share:.1f} % of a core]"


def _of_shakespeare() -> Iterator[str]:
    (row,) = _rows("examples", "examples/shakespeare.yaml, whole command").values()
    yield f"{100 * row['accuracy']:.0f} % of characters correct"


def _of_gpu_tests() -> Iterator[str]:
    outcomes = [test["outcome"] for test in _result("gpu")["tests"].values()]
    yield f"{outcomes.count('passed')} passed; {outcomes.count('failed')} failed"


def _of_the_comparison() -> Iterator[str]:
    titles = [f"{title}: parts" for title in preemption.TITLES.values() if "first step" not in title]
    for side in (preemption.OURS, preemption.PEER):
        spans = sorted(_rows("preemption", title)[side]["signal to first step, s"] for title in titles)
        yield f"[{spans[0]:.0f} to {spans[-1]:.0f} s](docs/performance.md#preemption)"


def _of_packs() -> Iterator[str]:
    title = "CIFAR-10 as JPEG files, padded crop, flip: packed cache and folder"
    gain = checkpoint.ratio(_result("input")["comparisons"], title, input_benchmark.PACKED)
    yield f"{gain:.1f} times as many images per CPU second as the folder"
    title = "JPEG files of 500 x 375, random resized crop to 224, flip: packed cache and folder"
    gain = checkpoint.ratio(_result("input")["comparisons"], title, input_benchmark.PIXELS)
    yield f"{gain:.1f} times as many images per CPU second as the folder with random resized crops"


def _of_preemption() -> Iterator[str]:
    result = _result("preemption")
    factors = [
        1 / checkpoint.ratio(result["comparisons"], preemption.TITLES[how], preemption.OURS)
        for how in ("USR2", "preemption")
    ]
    yield f"takes {factors[0]:.0f} times as long after the time limit's warning"
    yield f"takes {factors[1]:.0f} times as long, and also loses"
    lost = _rows("preemption", f"{preemption.TITLES['preemption']}: parts")
    ours, theirs = (lost[side][preemption.LOST] for side in (preemption.OURS, preemption.PEER))
    yield f"({theirs:.0f} there, {ours:.0f} here)"


def _of_bubbles() -> Iterator[str]:
    rows = _rows("pipeline", pipeline.TITLE)
    for schedule in pipeline.SCHEDULES:
        measured, formula = (rows[f"{schedule}, {kind}"] for kind in ("measured", "formula"))
        cells = [f"{100 * measured[slots]:.0f} / {100 * formula[slots]:.0f}" for slots in measured]
        yield f"| `{schedule}` | {' | '.join(cells)} |"


def _of_memory() -> Iterator[str]:
    rows = _rows("memory", memory.TITLE)
    for strategy in memory.STRATEGIES:
        measured, formula = (rows[f"{strategy}, {kind}"] for kind in ("measured", "formula"))
        cells = [f"{measured[part]:.1f} / {formula[part]:.1f}" for part in measured]
        yield f"` {'(2 × 2) ' * (strategy == 'hsdp')}| {' | '.join(cells)} |"


def _of_compilation() -> Iterator[str]:
    for row, title in (("`true`: 12 equal blocks", "blocks"), ("`{scope: model}`: 4 blocks", "model")):
        found = _result("compile_start")["comparisons"]
        (arms,) = (each["arms"] for each in found if each["title"] == compile_start.TITLES[title])
        cold_s, warm_s = (arms[arm]["median"] for arm in (compile_start.COLD, compile_start.WARM))
        yield f"| {row} | {cold_s:.1f} s | {warm_s:.1f} s |"
    for scope, mode in compile_start.settings("cuda"):
        row = "false" if scope == "eager" else compile_start.row_title(scope, mode)
        cells = [cell for device in compile_start.MODES for cell in _of_mode(device, scope, mode)]
        yield f"| `{row}` | {' | '.join(cells)} |"


def _of_mode(device: str, scope: str, mode: str) -> list[str]:
    """Return the cells of a mode on a device; the GPU's results may be absent."""
    if mode not in compile_start.MODES[device]:
        return ["as `default`"] * 2
    tables = {table["title"]: table["rows"] for table in _result("compile_start")["tables"]}
    rows = tables.get(compile_start.MODES_TITLE[device], {})
    row = rows.get(compile_start.row_title(scope, mode))
    return ["not measured"] * 2 if row is None else [f"{row[step]:.3g} s" for step in ("first step", "step")]


def _of_open_files() -> Iterator[str]:
    rows = _rows("open_files", open_files.SLOPE)
    files, of_rank_0 = (rows[who]["ddp"] for who in ("another rank", "rank 0"))
    yield f"{files:.1f} open files per peer on a rank, {of_rank_0:.1f} on rank 0"


def _rows(name: str, title: str) -> dict[str, dict[str, float]]:
    (found,) = (table for table in _result(name)["tables"] if table["title"] == title)
    rows: dict[str, dict[str, float]] = found["rows"]
    return rows


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
