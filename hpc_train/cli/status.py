"""``status``, and how the state of a run is shown anywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.cli.layout import layout_of, ranks_of
from hpc_train.cli.micro_batch import found_in_words
from hpc_train.cli.printing import JSON_VERSION, cell_text, columns, put, put_json, say
from hpc_train.cli.recovery import recovery_of
from hpc_train.cli.restarts import Restart, newest_restart
from hpc_train.cli.standing import standings
from hpc_train.errors import ExitCode
from hpc_train.launchers.tracebacks import shortened_traceback
from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import newest_number
from hpc_train.run_folder.budgets import Left
from hpc_train.run_folder.files import read_json, read_text
from hpc_train.run_folder.finding import find_runs, run_names
from hpc_train.run_folder.liveness import newest_record
from hpc_train.run_folder.micro_batch import kept_size
from hpc_train.run_folder.status import RunStatus, read_status

_HEADS = ("run", "experiment", "state", "step", "attempt", "reason")
_STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "interrupted": "yellow",
    "cancelled": "yellow",
}


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
    #: Of the newest job: ``12_3``, or ``12``.
    job: str | None = None
    #: The newest interruption in its parts, in seconds.
    restart: Restart | None = None
    #: What the newest job has left before it gives up; None where nobody requeues.
    budget: Left | None = None
    #: What ``micro_batch_size: auto`` came to; None where the file has a number, or it is not known yet.
    micro_batch_size: int | None = None
    #: By node, why the run's next attempt leaves it out.
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    #: The swept keys and their values; None where 0.1 made the run, which did not note them.
    values: dict[str, Any] | None = None
    #: Of the code that the run uses: ``commit``, ``dirty``, ``snapshot``; None where nothing is known of it.
    code: dict[str, Any] | None = None
    #: Of the newest attempt; before the first, as planned.
    ranks: int | None = None
    #: The arithmetic of a step with those ranks, as ``plan`` shows it.
    micro_batches: int | None = None
    accumulation: int | None = None
    precision: str | None = None

    @classmethod
    def of(cls, paths: RunPaths) -> RunRow:
        """Read where the run stands now; one whose launcher has died is corrected."""
        return rows_of([paths])[0]

    @classmethod
    def at(cls, paths: RunPaths, now: RunStatus) -> RunRow:
        facts = read_json(paths.run) or {}
        jobs = facts.get("slurm_job_ids") or [None]
        recovery = recovery_of(paths, now)
        record = newest_record(paths)
        layout = layout_of(paths, facts, record)
        values = facts.get("values")
        return cls(
            id=str(facts.get("id", paths.folder.name)),
            name=str(facts.get("name", paths.folder.parent.name)),
            state=now.state,
            step=now.step,
            total_steps=now.total_steps,
            attempt=now.attempt,
            reason="; ".join(filter(None, (now.reason, *recovery.words))) or None,
            path=str(paths.folder.absolute()),
            job=None if jobs[-1] is None else str(jobs[-1]),
            restart=newest_restart(paths),
            budget=recovery.budget,
            micro_batch_size=kept_size(paths),
            excluded_nodes=recovery.excluded_nodes,
            values=values if isinstance(values, dict) else None,
            code=_code(facts),
            ranks=ranks_of(facts, record),
            micro_batches=layout.micro_batches if layout else None,
            accumulation=layout.accumulation if layout else None,
            precision=layout.precision if layout else None,
        )

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.path))

    @property
    def progress(self) -> str:
        return f"{self.step}/{'?' if self.total_steps is None else self.total_steps}"

    def cells(self, name: str) -> list[str]:
        return [name, self.name, self.state, self.progress, str(self.attempt), self.reason or ""]


def status(words: Sequence[str], *, as_json: bool) -> ExitCode:
    """Show the runs that are meant, or all."""
    runs = find_runs(words)
    rows = rows_of(runs)
    if as_json:
        put_json(rows_json(rows))
        return ExitCode.DONE
    if not rows:
        say("no runs yet; `hpc-train submit FILE` starts some")
    else:
        names = run_names(runs)
        cells = [row.cells(names[row.paths]) for row in rows]
        if sys.stdout.isatty():
            _print_table(cells)
        else:
            for line in columns([_HEADS, *cells]):
                put(line)
    if len(rows) == 1 and rows[0].micro_batch_size is not None:
        say(found_in_words(rows[0].micro_batch_size))
    if len(rows) == 1 and rows[0].state == "failed":
        _print_error(runs[0])
    return ExitCode.DONE


def rows_of(runs: Sequence[RunPaths]) -> list[RunRow]:
    """Read where the runs stand now; a scheduler is asked once for all of its runs."""
    return [RunRow.at(paths, now) for paths, now in zip(runs, standings(runs), strict=True)]


def rows_json(rows: Sequence[RunRow]) -> dict[str, Any]:
    return {"version": JSON_VERSION, "runs": [asdict(row) for row in rows]}


def _code(facts: dict[str, Any]) -> dict[str, Any] | None:
    noted = facts.get("code")
    if not isinstance(noted, dict):
        return None
    return {key: noted.get(key) for key in ("commit", "dirty", "snapshot")}


def _print_error(paths: RunPaths) -> None:
    """Print what the newest attempt's rank said as it failed; of a long traceback the user's own frames."""
    newest = paths.attempt(newest_number(paths))
    errors = sorted(path for path in newest.folder.glob("rank-*.error") if path.is_file())
    # The one that the reason names: the others' follow from it.
    reason = read_status(paths).reason or ""
    told = [path for path in errors if reason.startswith(f"rank {path.stem.removeprefix('rank-')}:")]
    for path in (told or errors)[:1]:
        text = read_text(path, errors="replace").rstrip()
        rank = path.stem.removeprefix("rank-")
        put("")
        put(shortened_traceback(text, newest.log(int(rank)) if rank.isdecimal() else path))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADS, box=None, pad_edge=False)
    for row in rows:
        # Text objects: what stands in a file is never read as rich's markup.
        table.add_row(*(Text(cell_text(cell), style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
