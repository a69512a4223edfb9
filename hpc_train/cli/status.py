"""``status``, and how the state of a run is shown anywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.cli.printing import JSON_VERSION, cell_text, columns, put, put_json, say
from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run_folder.files import read_json
from hpc_train.run_folder.finding import find_runs
from hpc_train.run_folder.status import current_status

_HEADS = ("run", "experiment", "state", "step", "attempt", "reason")
_STYLES = {"running": "cyan", "completed": "green", "failed": "red", "cancelled": "yellow"}


@dataclass(frozen=True)
class RunRow:
    """One entry of ``status --json`` (DESIGN §5, a contract)."""

    id: str
    name: str
    state: str
    step: int
    total_steps: int | None
    attempt: int
    reason: str | None
    path: str

    @classmethod
    def of(cls, paths: RunPaths) -> RunRow:
        """Read where the run stands now; one whose launcher has died is corrected."""
        now = current_status(paths)
        facts = read_json(paths.run) or {}
        return cls(
            id=str(facts.get("id", paths.folder.name)),
            name=str(facts.get("name", paths.folder.parent.name)),
            state=now.state,
            step=now.step,
            total_steps=now.total_steps,
            attempt=now.attempt,
            reason=now.reason,
            path=str(paths.folder.absolute()),
        )

    @property
    def progress(self) -> str:
        return f"{self.step}/{'?' if self.total_steps is None else self.total_steps}"

    @property
    def cells(self) -> list[str]:
        return [self.id, self.name, self.state, self.progress, str(self.attempt), self.reason or ""]


def status(words: Sequence[str], *, as_json: bool) -> ExitCode:
    """Show the runs that are meant, or all."""
    rows = [RunRow.of(paths) for paths in find_runs(words)]
    if as_json:
        put_json(rows_json(rows))
    elif not rows:
        say("no runs yet; `hpc-train submit FILE` starts some")
    elif sys.stdout.isatty():
        _print_table(rows)
    else:
        for line in columns([_HEADS, *(row.cells for row in rows)]):
            put(line)
    return ExitCode.DONE


def rows_json(rows: Sequence[RunRow]) -> dict[str, Any]:
    return {"version": JSON_VERSION, "runs": [asdict(row) for row in rows]}


def _print_table(rows: Sequence[RunRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADS, box=None, pad_edge=False)
    for row in rows:
        # Text objects: what stands in a file is never read as rich's markup.
        table.add_row(*(Text(cell_text(cell), style=_STYLES.get(cell, "")) for cell in row.cells))
    Console().print(table)
