"""Writes docs/performance.md and its plots from benchmarks/results/.

    python -m benchmarks.performance_page

The output depends on the results alone, and a test compares it with the page. ``make bench`` calls it at its
end; after a single benchmark, run it by hand. ``SECTIONS`` lists all benchmarks.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_cases import CASES
from benchmarks.measuring import MIN_ROUNDS, RESULTS, ROOT
from benchmarks.plot import description, label, number, ratio_plot

DOCS = ROOT / "docs"
PAGE, PLOTS = "performance.md", "plots"
#: Heading → the benchmarks below it, modules of this package, in the order in which ``make bench`` runs them.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Training step": ("step",),
    "Input": ("input", "masks_and_boxes", "token_windows", "augmentation", "data_scale"),
    "Checkpoints": ("checkpoint",),
    "Digests and verification": ("digests",),
    "Start and submission": (
        "submission",
        "shared_jobs",
        "cli_start",
        "run_pages",
        "watch_cpu",
        "plan_scale",
        "time_prediction",
        "compile_start",
    ),
    "Preemption": ("preemption", "restart"),
    "Verified steps and spikes": ("verification", "spikes"),
    "Scripts of the user's own": ("session_overhead",),
    "Memory": ("memory", "memory_prediction", "open_files"),
    "Gradients of a node's CPU ranks": ("node_sum",),
    "Number of ranks": ("ranks",),
    "Pipeline parallelism": ("pipeline",),
    "Whole runs": (
        "headlines",
        "small_data",
        "cifar10",
        "recipes",
        "fine_tuning",
        "examples",
        "epoch_times",
        "first_files",
        "first_pictures",
    ),
    "GPU": ("gpu", "gpu_parts", "gpu_throughput", "gpu_cluster"),
}
#: Not part of ``make bench``.
NEEDS_CUDA = SECTIONS["GPU"]
#: Titles that a benchmark measures in several calls.
EXPECTED: dict[str, tuple[str, ...]] = {
    "gpu_throughput": tuple(case.title(mode) for case in CASES for mode in case.modes()),
    "shared_jobs": ("Sweep of 32 runs on four exclusive nodes: submit to the end of the last run",),
}
#: What no benchmark of this repository measures.
NO_BENCHMARK = (
    "training on several nodes, with NCCL over InfiniBand or Ethernet",
    "training on several GPUs of a node: the throughput of DDP, FSDP, tensor and pipeline parallelism",
    "shared file systems (Lustre, GPFS, NFS): checkpoints were written to a local disk",
    "a scheduler with a real queue: Slurm runs on the same machine, with no other users",
)
_OUTCOMES = ("passed", "failed", "skipped")
EMPTY: dict[str, Any] = {"comparisons": [], "tables": []}
HEAD = """\
# Performance

Measurements of hpc-train and of what it replaces. This page and its plots are generated from
[benchmarks/results](../benchmarks/results) by `python -m benchmarks.performance_page`; a test fails if a
figure here is not in these files.

**How to read it.** Each round runs all arms of a comparison once, in random order, and each ratio is
taken within its round, so that other load on the machine affects all arms alike. Where arms take turns,
each runs for a few seconds while the others are stopped, until all have finished. A ratio is an arm's
time divided by the baseline's: below 1 is faster. Of rates, such as images per second, above 1 is
faster. Dots and figures are medians over the rounds, whiskers and ranges are p10–p90. Ratios carry over
to similar machines, absolute times do not. [Conditions](#conditions) lists machine and versions of each
measurement, [Not measured](#not-measured) what is missing. No test asserts a time.

`make bench` measures everything that needs no GPU and takes hours; `make gpu-day` measures what needs one.
Each benchmark also runs alone, by the command given with it.
"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    write(DOCS, RESULTS)


def cpu_benchmarks() -> list[str]:
    """Return the benchmarks that need no GPU, in the order of the page."""
    return [name for names in SECTIONS.values() for name in names if name not in NEEDS_CUDA]


def write(docs: Path, results: Path) -> None:
    """Write the page and its plots below ``docs``; plots of titles that no longer exist are removed."""
    files = generated(results)
    (docs / PLOTS).mkdir(exist_ok=True)
    for name in stale(docs, results):
        (docs / name).unlink(missing_ok=True)
    for name, text in files.items():
        (docs / name).write_text(text, encoding="utf-8")


def stale(docs: Path, results: Path) -> set[str]:
    """Return the names of files below ``docs`` that are missing, superfluous or not what the results give."""
    files = generated(results)
    plots = {f"{PLOTS}/{path.name}" for path in (docs / PLOTS).glob("*")}
    return {name for name in files.keys() | plots if _read(docs / name) != files.get(name)}


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def generated(results: Path) -> dict[str, str]:
    """Return the files to be written: their texts by name below docs/."""
    page = _Page(results)
    blocks = [HEAD, *page.sections(), *page.not_measured(), *page.conditions()]
    return {PAGE: "\n".join(blocks), **page.plots}


class _Page:
    """The page while it is built: plots, conditions and what is missing are collected on the way."""

    def __init__(self, results: Path) -> None:
        self.results = {
            name: EMPTY | _read_results(results / f"{name}.json")
            for names in SECTIONS.values()
            for name in names
            if (results / f"{name}.json").exists()
        }
        self.plots: dict[str, str] = {}
        self.measured_with: list[Mapping[str, Any]] = []

    def sections(self) -> Iterator[str]:
        for heading, names in SECTIONS.items():
            found = [name for name in names if name in self.results]
            if found:
                yield f"## {heading}\n"
            for name in found:
                yield f"`python -m benchmarks.{name}`: {summary(name)}\n"
                for compared in self.results[name]["comparisons"]:
                    yield from self._comparison(compared)
                for table in self.results[name]["tables"]:
                    yield from self._table(table)

    def _comparison(self, compared: Mapping[str, Any]) -> Iterator[str]:
        title, baseline = compared["title"], compared["baseline"]
        yield f"### {title}\n"
        ratios = {arm: values["ratio"] for arm, values in compared["arms"].items()}
        if ratios:
            name = f"{PLOTS}/{_slug(title)}.svg"
            quantity = _measured(compared["unit"])
            self.plots[name] = ratio_plot(title, baseline, ratios, _is_ours, quantity)
            yield f"![{title}. {description(baseline, ratios, quantity)}]({name})\n"
        yield "| arm | median | ratio (p10–p90) |\n| --- | ---: | ---: |"
        for arm, values in compared["arms"].items():
            median = _quantity(values["median"], compared["unit"])
            yield f"| {_arm(arm)} | {median} | {label(values['ratio'])} |"
        yield f"\n{self._remarks(compared, ratios)}\n"

    def _remarks(self, compared: Mapping[str, Any], ratios: Mapping[str, Mapping[str, Any]]) -> str:
        rounds = compared["rounds"]
        remarks = [f"{rounds} round{'s' * (rounds != 1)}", self._conditions_of(compared)]
        unit = compared["unit"]
        if unit.startswith("seconds "):
            remarks.insert(0, f"Time {unit.removeprefix('seconds ')}")
        elif _measured(unit) == unit:
            remarks.insert(0, "More is faster")
        if "turn_s" in compared:
            remarks.insert(-1, f"the arms take turns of {compared['turn_s']:g} s")
        if rounds < MIN_ROUNDS:
            remarks.append(f"fewer than the {MIN_ROUNDS} rounds that a result needs, so it is provisional")
        if any(ratio["p10"] is None for ratio in ratios.values()):
            remarks.append("p10 and p90 were not recorded")
        return "; ".join(remarks) + "."

    def _table(self, table: Mapping[str, Any]) -> Iterator[str]:
        rows = _with_growth(table)
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield f"### {table['title']}\n"
        yield f"| {table['unit']} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}"
        for name, row in rows.items():
            cells = " | ".join(_cell(row.get(column)) for column in columns)
            yield f"| {_arm(name)} | {cells} |"
        yield f"\n{table.get('remark') or 'Measured once'}; {self._conditions_of(table)}.\n"

    def _conditions_of(self, measured: Mapping[str, Any]) -> str:
        here = measured["conditions"]
        if here not in self.measured_with:
            self.measured_with.append(here)
        return f"[conditions {self.measured_with.index(here) + 1}](#conditions)"

    def not_measured(self) -> Iterator[str]:
        yield "## Not measured\n"
        for names in SECTIONS.values():
            for name in names:
                if name not in self.results:
                    needs = ", which needs a CUDA device" if name in NEEDS_CUDA else ""
                    yield f"- `python -m benchmarks.{name}`{needs}: {summary(name)}"
                    continue
                measured = [*self.results[name]["comparisons"], *self.results[name]["tables"]]
                for each in measured:
                    if each.get("not measured"):
                        yield f"- {each['title']}: {', '.join(each['not measured'])}"
                titles = {each["title"] for each in measured}
                yield from (f"- {title}" for title in EXPECTED.get(name, ()) if title not in titles)
        yield from (f"- {what}" for what in NO_BENCHMARK)
        yield ""

    def conditions(self) -> Iterator[str]:
        yield "## Conditions\n"
        for index, here in enumerate(self.measured_with, 1):
            others = {key: value for key, value in here.items() if key not in ("date", "device", "versions")}
            versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
            facts = [
                here["date"][:10] if "date" in here else "date not recorded",
                here.get("device", "device not recorded"),
                *(f"{key}: {_cell(value)}" for key, value in others.items()),
            ]
            yield f"{index}. {'; '.join(facts)}; {versions}."
        yield ""


def _read_results(file: Path) -> dict[str, Any]:
    """Return a results file; of the outcomes of GPU tests, a table of their numbers by test."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "tests" not in found:
        return found
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for name, test in found["tests"].items():
        for row in ("all", f"`{name.partition('::')[2].partition('[')[0]}`"):
            rows[row][test["outcome"]] += 1
    here = {"date": found["date"], "device": found["device"], "driver": found["driver"]}
    table = {
        "title": "GPU tests",
        "unit": "test",
        "rows": {name: {key: rows[name][key] for key in _OUTCOMES} for name in rows},
        "remark": found.get("remark", "Run once"),
        "conditions": here | {"versions": found["versions"]},
    }
    return {"tables": [table]}


def summary(name: str) -> str:
    """Return the first line of a benchmark's docstring, without importing it."""
    source = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def _with_growth(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of a table; those of ``measuring.growth`` with a column for the exponent."""
    exponents, head = table.get("exponents", {}), f"grows as (n: {table.get('variable')})"
    return {
        name: row if exponents.get(name) is None else {**row, head: f"n^{exponents[name]:.2f}"}
        for name, row in table["rows"].items()
    }


def _is_ours(arm: str) -> bool:
    return arm.startswith("hpc-train")


def _arm(name: str) -> str:
    return f"**{name}**" if _is_ours(name) else name


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _measured(unit: str) -> str:
    """Return what is measured in ``unit``: a time, or a rate, which is called as its unit."""
    if unit.startswith("CPU seconds"):
        return "CPU time"
    return "time" if unit.startswith("seconds") else unit


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "not recorded"
    if not unit.startswith("seconds"):
        return f"{_cell(value)} {unit}"
    factor, name = next((scale for scale in ((1.0, "s"), (1e3, "ms")) if value * scale[0] >= 1), (1e6, "µs"))
    return f"{number(value * factor)} {name}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else number(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " × ".join(map(str, value))
    return (
        f"{value:,}" if isinstance(value, int) else number(value) if isinstance(value, float) else str(value)
    )


if __name__ == "__main__":
    main()
