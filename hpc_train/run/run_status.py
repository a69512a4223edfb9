"""``run.json`` and ``status.json``: the facts, and the status (a contract), of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import now
from hpc_train.run.file_shapes import decoded, encoded
from hpc_train.run.files import read_json, write_json
from hpc_train.run.storage_errors import retried

#: ``interrupted``: stopped by a signal from its owner (Ctrl-C), with its progress saved.
STATES = ("pending", "running", "requeued", "completed", "interrupted", "failed", "cancelled", "unknown")
#: States that a run leaves automatically.
GOING_ON = {"pending", "running", "requeued"}
INTERRUPTED = "interrupted"
STOPPED_BY_CTRL_C = "stopped by Ctrl-C"
CANCELLED = "cancelled"
CANCELLED_BY = "hpc-train cancel"
#: Keys that the file always has.
_REQUIRED = {"state", "step", "epoch", "attempt"}
#: Keys that the file omits while they are empty.
_OPTIONAL = {"compiling", "slow_ranks", "best"}
#: Why ranks are slow, with the number; and the maximum number of named ranks.
_SLOW = {"forward": "forward {:.2f} × the median", "data_wait": "waits {:.0%} of a step longer for data"}
_MAX_SLOW = 4


@dataclass(frozen=True)
class RunStatus:
    """The content of ``status.json`` without its version."""

    state: Annotated[str, STATES.__contains__] = "pending"
    #: Optimizer steps done.
    step: int = 0
    #: None until the size of the data is known.
    total_steps: int | None = None
    epoch: float = 0.0
    #: From 1; 0 before the first.
    attempt: int = 0
    reason: str | None = None
    #: While rank 0 compiles: ``graph``, from 1, and ``since``, the start of compiling all graphs (UTC).
    compiling: dict[str, Any] | None = None
    #: Slow ranks, by rank: ``forward``, the time of a forward pass relative to the median of all ranks, or
    #: ``data_wait``, how much longer than the median it waits for data, as a share of a step.
    slow_ranks: dict[str, Any] | None = None
    #: The best evaluation so far (``Best``, and ``mode``) by the metric of ``checkpoint.best``, else of
    #: ``early_stopping``, else the task's main metric.
    best: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        assert self.state in STATES, self.state

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``status.json``."""
        data = {"version": 1} | encoded(self)
        return {key: value for key, value in data.items() if key not in _OPTIONAL or value}

    @property
    def activity(self) -> str:
        """The current activity of a run if it is not training, such as ``compiling graph 3, 40 s so far``."""
        if self.state != "running" or not self.compiling:
            return ""
        graph = self.compiling.get("graph")
        text = f"compiling graph {graph}" if isinstance(graph, int) else "compiling"
        with suppress(ValueError, TypeError, OverflowError):
            since = datetime.fromisoformat(str(self.compiling.get("since")))
            text += f", {max(0.0, (datetime.now(UTC) - since).total_seconds()):.0f} s so far"
        return text

    @property
    def slow_words(self) -> str:
        """The ranks that are slower than the others, such as ``rank 3: forward 1.24 x the median``."""
        slow = []
        for rank, ratios in (self.slow_ranks or {}).items():
            for name, template in _SLOW.items():
                if rank.isdecimal() and isinstance(ratios, dict) and isinstance(ratios.get(name), float):
                    slow.append(f"rank {rank}: {template.format(ratios[name])}")
        return "; ".join([*slow[:_MAX_SLOW], *(["…"] if len(slow) > _MAX_SLOW else [])])


def read_status(paths: RunPaths) -> RunStatus:
    """Return the content of ``status.json``; state ``unknown`` if it is missing or invalid."""
    data = read_json(paths.status) or {}
    status = decoded(RunStatus, data) if data.keys() >= _REQUIRED else None
    return status or RunStatus(state="unknown", reason=f"{paths.status.name} can't be read")


def write_status(paths: RunPaths, status: RunStatus) -> None:
    """Replace ``status.json``; retries on temporary errors of a file server."""
    retried(lambda: try_status(paths, status), paths.status)


def try_status(paths: RunPaths, status: RunStatus) -> None:
    """Replace ``status.json``, or raise OSError at once."""
    write_json(paths.status, status.to_json())


def mark_cancelled(paths: RunPaths) -> None:
    """Write the marker that makes ``cancel`` final, whatever launcher and ranks write later."""
    if not paths.cancelled.exists():
        write_json(paths.cancelled, {"version": 1, "time": now()}, sync=True)


def write_cancelled(paths: RunPaths) -> None:
    """Write ``cancelled`` once the ranks have ended; a run that completed before stays so."""
    status = read_status(paths)
    if status.state == "completed":
        paths.cancelled.unlink(missing_ok=True)
    elif status.state != CANCELLED:
        write_status(paths, replace(status, state=CANCELLED, reason=CANCELLED_BY))


#: More runs than a user has: with one more than this, each entry would be evicted before it is needed again.
#: An entry takes a few kilobytes.
_MAX_RUNS = 100_000


def run_facts(paths: RunPaths) -> Mapping[str, Any]:
    """Return ``run.json``, cached, so not to be changed; empty if it can't be read."""
    try:
        seen = os.stat(paths.run)  # noqa: PTH116  (this is called for each run)
    except OSError:
        return {}
    return _read(str(paths.run), seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def recorded_values(paths: RunPaths) -> Mapping[str, Any]:
    """Return the keys that the sweep varied and the run's values; empty if they can't be read."""
    values = run_facts(paths).get("values")
    return values if isinstance(values, dict) else {}


def extended_run(paths: RunPaths) -> RunPaths | None:
    """Return the completed run that this one extends, which may be gone; None if it began at step 0."""
    name = Path(str((run_facts(paths).get("extends") or {}).get("run", ""))).name
    return RunPaths(paths.siblings.folder / name) if name else None


def extensions(paths: RunPaths) -> list[str]:
    """Return the ids of the runs that extend this one, oldest first."""
    return list(run_facts(paths).get("extended_by") or ())


def extension_words(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of the run that this one (``run_facts``) extends, and of its extensions."""
    old = facts.get("extends")
    words = [("extends", f"{old.get('run')} from step {old.get('step')}")] if old else []
    return words + [("extended by", name) for name in facts.get("extended_by") or ()]


@lru_cache(_MAX_RUNS)
def _read(path: str, inode: int, size: int, modified_ns: int, changed_ns: int) -> Mapping[str, Any]:
    return read_json(Path(path)) or {}
