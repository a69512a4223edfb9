"""The results of seeded random faults: a line per seed, and a file to which they are added.

So a series can be stopped and continued with the other seeds.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.commits import commit

#: Characters of an error in the file.
_ERROR_LENGTH = 500


class Result(Protocol):
    """The result of a seed; ``error`` is empty if all is as expected."""

    @property
    def seed(self) -> int: ...

    @property
    def error(self) -> str: ...

    def line(self) -> str:
        """Return the line that is printed."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the result as an entry of the file."""
        ...


R = TypeVar("R", bound=Result)
#: Makes the facts at the head of a file from all of its entries.
Facts = Callable[[list[dict[str, Any]]], dict[str, Any]]


def failed_results(results: Iterable[R], folder: Path, file: Path | None, facts: Facts) -> list[R]:
    """Print the results as they come and add them to ``file``; return those with an error.

    ``folder``: of the runs, which the caller keeps after an error.
    """
    failed = []
    for result in results:
        print(result.line(), flush=True)
        if file is not None:
            _add(file, result, facts)
        if result.error:
            failed.append(result)
            print(f"{result.error}\nkept: {folder}", file=sys.stderr, flush=True)
    return failed


def _add(file: Path, result: Result, facts: Facts) -> None:
    """Add the result of a seed, in the place of an earlier one of it; first the date and the versions."""
    data: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    runs = {int(run["seed"]): run for run in data.get("runs", [])}
    runs[result.seed] = result.to_json() | {"error": result.error[:_ERROR_LENGTH], "commit": commit()}
    ordered = [runs[seed] for seed in sorted(runs)]
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(head | facts(ordered) | {"runs": ordered}, indent=1) + "\n")
    temporary.rename(file)
