"""Writes the tables of docs/parallelism.md: ``python -m tests.parallelism.report``.

Trains every case and keeps what it found in ``results.json`` beside this file. ``--tables`` trains nothing.
Exit code 1 where a case is further from plain PyTorch than it may be, or fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.experiment.config.problems import Problem
from tests.commits import commit
from tests.parallelism.cases import (
    FEATURES,
    STRATEGIES,
    all_cases,
    batchnorm_cases,
    refusals,
    refused_with_batchnorm,
)

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "parallelism.md"
RESULTS = Path(__file__).parent / "results.json"
BEGIN, END = "<!-- table: written by tests/parallelism/report.py -->", "<!-- end of table -->"
#: Their cells are of losses in their own precision; those of all others of float64 alone.
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16 with a scaler": "fp16"}

#: A compiler on a busy machine takes its time.
_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Result:
    """What a case came to; the numbers are None where the case does not compare them or failed."""

    strategy: str
    titles: tuple[str, ...]
    is_within: bool
    losses: float | None = None
    weights: float | None = None
    gradients: float | None = None
    #: BatchNorm's running statistics.
    buffers: float | None = None
    #: How many ranks.
    ranks: int | None = None
    error: str | None = None
    #: Of what trained it.
    date: str = ""
    torch: str = ""
    commit: str = ""

    @property
    def largest(self) -> float | None:
        numbers = (self.losses, self.weights, self.gradients, self.buffers)
        return max((value for value in numbers if value is not None), default=None)


def run(strategies: Sequence[str], known: dict[str, Result]) -> dict[str, Result]:
    """Train the cases of these strategies that are not known yet, or failed; keep each at once."""
    from tests.parallelism.comparing import Comparison

    comparison = Comparison(_LIMIT_S)
    cases = [case for strategy in strategies for case in all_cases(strategy)]
    try:
        # The quick ones first, and those of a size together.
        for case in sorted(cases, key=lambda case: (case.is_compiled, case.shape.ranks)):
            if str(case) not in known or known[str(case)].error:
                known[str(case)] = _result(comparison, case)
                _say(known[str(case)], str(case))
                _write(known)
    finally:
        comparison.close()
    return known


def _result(comparison: Any, case: Any) -> Result:
    import torch

    from tests.parallelism.groups import RankError

    trained_by = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "commit": commit()}
    try:
        found = comparison.deviation(case)
    except (RankError, AssertionError) as error:
        return Result(case.strategy, case.titles, False, error=in_a_line(str(error)), **trained_by)
    numbers = (found.losses, found.weights, found.gradients, found.buffers, case.shape.ranks)
    return Result(case.strategy, case.titles, found.is_within, *numbers, **trained_by)


def in_a_line(text: str) -> str:
    """Return the last error that a rank's traceback names: without the paths of this machine."""
    named = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", text, re.MULTILINE)
    return (named or text.splitlines() or [""])[-1]


def _say(result: Result, case: str) -> None:
    largest = "failed" if result.error else f"{result.largest:.1e}"
    print(f"{'equal' if result.is_within else 'APART'}  {largest}  {case}", file=sys.stderr, flush=True)


def _write(known: dict[str, Result]) -> None:
    cases = {name: vars(result) for name, result in sorted(known.items())}
    RESULTS.write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Result]:
    """Return the results by case."""
    if not RESULTS.exists():
        return {}
    cases = json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]
    return {name: Result(**case | {"titles": tuple(case["titles"])}) for name, case in cases.items()}


def _made_by(results: Sequence[Result]) -> str:
    """Return from when to when, and with which torch."""
    dates = sorted({result.date for result in results})
    versions = sorted({result.torch for result in results})
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, torch {', '.join(versions)}"


def tables(results: Iterable[Result]) -> str:
    """Return features × strategies, and the refusals' words."""
    results = list(results)
    refused = {(strategy, title): problem for strategy, title, problem in refusals()}
    lines = [f"{len(results)} trainings; {_made_by(results)}.", "", f"| | {' | '.join(STRATEGIES)} |"]
    lines.append("| --- |" + " --- |" * len(STRATEGIES))
    notes: dict[str, list[str]] = {}
    for feature in FEATURES:
        cells = []
        for strategy in STRATEGIES:
            if problem := refused.get((strategy, feature.title)):
                cells.append(f"refused ({_note(notes, problem, strategy)})")
                continue
            on_cpu = _cell(results, strategy, feature.title)
            cells.append(on_cpu if feature.on_cpu else "left to `make test-gpu`")
            if problem := refused_with_batchnorm(strategy, feature.title):
                cells[-1] += f"; with BatchNorm refused ({_note(notes, problem, strategy)})"
        lines.append(f"| {feature.title} | {' | '.join(cells)} |")
    lines += ["", *batchnorm_table(results)]
    said = (words.format(strategies=", ".join(under)) for words, under in notes.items())
    lines += ["", *(f"{number}. {words}" for number, words in enumerate(said, start=1))]
    return "\n".join(lines).rstrip() + "\n"


def batchnorm_table(results: Iterable[Result]) -> list[str]:
    """Return ranks × strategies: how far running statistics are from plain PyTorch's in float64; a dash where
    the strategy can't share this model among its ranks.
    """
    known = [result for result in results if result.buffers is not None and "fp64" in result.titles]
    columns = [strategy for strategy in STRATEGIES if batchnorm_cases(strategy)]
    lines = [
        f"| BatchNorm's running statistics | {' | '.join(columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for ranks in (1, 2, 3, 4):
        cells = []
        for strategy in columns:
            found = [r.buffers or 0.0 for r in known if (r.strategy, r.ranks) == (strategy, ranks)]
            is_allowed = any(case.shape.ranks == ranks for case in batchnorm_cases(strategy))
            cells.append(f"{max(found):.0e}" if found else "not run" if is_allowed else "–")
        lines.append(f"| {ranks} rank{'' if ranks == 1 else 's'} | {' | '.join(cells)} |")
    return lines


def _note(notes: dict[str, list[str]], problem: Problem, strategy: str) -> int:
    """Return the number of the note that says so, of any strategy; a new one where there is none."""
    words = f"`{'.'.join(map(str, problem.path))}` {problem.message}; {problem.remedy}"
    plain = words.replace("{", "{{").replace("}", "}}").replace(f"under {strategy}", "under {strategies}")
    under = notes.setdefault(plain, [])
    if strategy not in under:
        under.append(strategy)
    return list(notes).index(plain) + 1


def _cell(results: Iterable[Result], strategy: str, title: str) -> str:
    precision = title if title in PRECISIONS else "fp64"
    found = [r for r in results if r.strategy == strategy and {title, precision} <= {*r.titles}]
    if any(result.error for result in found):
        return "**fails**"
    if any(not result.is_within for result in found):
        return "**apart**"
    sizes = [r.losses if precision in PRECISIONS else r.largest for r in found]
    largest = max((size for size in sizes if size is not None), default=None)
    return "not run" if largest is None else f"{largest:.0e}"


def updated(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with ``text`` between these markers."""
    before, has_begin, rest = page.partition(begin)
    _, has_end, after = rest.partition(end)
    assert has_begin and has_end, f"{PAGE.name} has lost its markers"
    return f"{before}{begin}\n{text}{end}{after}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/parallelism.md.")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="these alone; else all")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="leave out what is known")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    arguments = parser.parse_args(words)
    strategies = arguments.strategy or STRATEGIES
    known = read()
    if not (arguments.goes_on or arguments.tables):
        known = {name: result for name, result in known.items() if result.strategy not in strategies}
    if not arguments.tables:
        known = run(strategies, known)
        # Without those of an earlier table of what is allowed.
        now = {str(case) for each in STRATEGIES for case in all_cases(each)}
        _write({name: result for name, result in known.items() if name in now})
    known = read()
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), tables(known.values())), encoding="utf-8")
    return 0 if all(result.is_within for result in known.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
