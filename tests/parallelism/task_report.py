"""Writes the table of tasks in docs/parallelism.md: ``python -m tests.parallelism.task_report``.

Trains every cell and keeps what it found in ``task_results.json`` beside this file; ``--tables`` trains
nothing.
Exit code 1 where a cell is further from plain PyTorch than it may be, or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parallelism.cases import STRATEGIES
from tests.parallelism.report import PAGE, in_a_line, updated
from tests.parallelism.task_cases import CASES, Cell, TaskCase, cells, refused
from tests.waiting import HANG_LIMIT_S

#: A rank whose peer refuses the case waits for it this long.
_LIMIT_S = HANG_LIMIT_S
RESULTS = Path(__file__).parent / "task_results.json"
BEGIN, END = "<!-- tasks: written by tests/parallelism/task_report.py -->", "<!-- end of tasks -->"


@dataclass(frozen=True)
class Result:
    """What a cell came to; the numbers are None where its ranks refuse it, or it failed."""

    is_within: bool
    losses: float | None = None
    weights: float | None = None
    refused: str | None = None
    error: str | None = None
    date: str = ""
    torch: str = ""

    @property
    def text(self) -> str:
        if self.error:
            return "**fails**"
        if not self.is_within:
            return "**apart**"
        return f"{max(self.losses or 0.0, self.weights or 0.0):.0e}"


def run(known: dict[str, Result]) -> dict[str, Result]:
    """Train the cells that are not known yet, or failed."""
    import torch

    from tests.parallelism import task_data, task_training
    from tests.parallelism.groups import Groups, RankError

    groups = Groups(_LIMIT_S)
    references: dict[tuple[str, str], Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "data"
        os.environ["HPC_TRAIN_CACHE"] = str(root / "cache")
        task_data.write(root)
        for cell in cells():
            if str(cell) in known and not known[str(cell)].error:
                continue
            key = (cell.case.title, cell.precision)
            trained_by = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
            try:
                found = groups.run(cell.ranks, task_training.train, *_arguments(cell), root)
                if key not in references:
                    (references[key],) = groups.run(1, task_training.plain, *key, root)
                apart = task_training.difference(cell, found, references[key])
                known[str(cell)] = Result(apart.is_within, apart.losses, apart.weights, **trained_by)
            except (RankError, AssertionError) as error:
                known[str(cell)] = _failed(str(error).replace(str(root), "…"), trained_by)
            print(cell, known[str(cell)], file=sys.stderr, flush=True)
            _write(known)
    groups.close()
    return known


def _arguments(cell: Cell) -> tuple[str, str, str]:
    return cell.case.title, cell.strategy, cell.precision


def _failed(said: str, trained_by: Mapping[str, str]) -> Result:
    """Return that ranks refuse to start where one of them says so: the others wait for it, or are gone."""
    if found := re.search(r"^hpc_train\.errors\.BadFileError: (.*)", said, re.MULTILINE):
        return Result(True, refused=found[1], **trained_by)
    return Result(False, error=in_a_line(said), **trained_by)


def _write(known: Mapping[str, Result]) -> None:
    cells_now = {str(cell) for cell in cells()}
    kept = {name: vars(result) for name, result in sorted(known.items()) if name in cells_now}
    RESULTS.write_text(json.dumps({"cells": kept}, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Result]:
    """Return the results by cell."""
    if not RESULTS.exists():
        return {}
    return {
        name: Result(**each)
        for name, each in json.loads(RESULTS.read_text(encoding="utf-8"))["cells"].items()
    }


def table(results: Mapping[str, Result]) -> str:
    """Return cases × strategies, and the refusals' words."""
    notes: list[str] = []
    lines = [f"| task: model, data | fp32 | {' | '.join(STRATEGIES)} |"]
    lines.append("| --- | --- |" + " --- |" * len(STRATEGIES))
    for case in CASES:
        of_strategies = [_cell(case, strategy, results, notes) for strategy in STRATEGIES]
        lines.append(f"| {case.title} | {' | '.join([_fp32(case, results), *of_strategies])} |")
    return "\n".join([*lines, "", *(f"{n}. {note}" for n, note in enumerate(notes, start=1))]).rstrip() + "\n"


def _fp32(case: TaskCase, results: Mapping[str, Result]) -> str:
    return _largest(results, [f"{case.title}, ddp, fp32, {ranks} ranks" for ranks in (1, 2)])


def _cell(case: TaskCase, strategy: str, results: Mapping[str, Result], notes: list[str]) -> str:
    said = None
    if problem := refused(case, strategy):
        said = f"`{'.'.join(map(str, problem.path))}` {problem.message}; {problem.remedy}"
    elif (result := results.get(f"{case.title}, {strategy}, fp64, 2 ranks")) is not None:
        said = result.refused
    if said is not None:
        if said not in notes:
            notes.append(said)
        return f"refused ({notes.index(said) + 1})"
    ranks = (1, 2) if strategy == "ddp" else (2,)
    return _largest(results, [f"{case.title}, {strategy}, fp64, {each} ranks" for each in ranks])


def _largest(results: Mapping[str, Result], names: Sequence[str]) -> str:
    if any(name not in results for name in names):
        return "not run"
    texts = [results[name].text for name in names]
    return next((text for text in texts if text.startswith("**")), None) or max(texts, key=float)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the table of tasks in docs/parallelism.md.")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="leave out what is known")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    arguments = parser.parse_args(words)
    known = read() if arguments.goes_on or arguments.tables else {}
    if not arguments.tables:
        known = run(known)
    page = updated(PAGE.read_text(encoding="utf-8"), table(known), BEGIN, END)
    PAGE.write_text(page, encoding="utf-8")
    return 0 if all(result.is_within for result in known.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
