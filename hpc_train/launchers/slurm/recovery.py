"""What ``begin`` and ``after`` share of a run's recovery: its limits, nodes to leave out, what was lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.errors import ExitCode
from hpc_train.paths import RunPaths
from hpc_train.run_folder import bad_nodes
from hpc_train.run_folder.attempts import AttemptRecord, newest_number, now, read_record
from hpc_train.run_folder.checkpoints import committed
from hpc_train.run_folder.ends import exit_codes, rank_ends
from hpc_train.run_folder.events import noted_signal

if TYPE_CHECKING:
    from hpc_train.config.schema import RecoveryConfig

#: sinfo is asked at a requeue only; one that hangs must not keep the job from starting.
_SINFO_LIMIT_S = 30.0
#: Not ``power*``: whoever switches nodes off has nothing against them.
_GONE = ("down", "fail")


def effective_recovery(paths: RunPaths, attempt: int) -> RecoveryConfig:
    """Return the limits that hold for the attempt. Raises BadFileError where the frozen file is another."""
    from hpc_train.run_folder.creation import effective_experiment  # 0.3 s, which no start needs

    return effective_experiment(paths, attempt).recovery


def nodes_to_leave_out(paths: RunPaths) -> dict[str, str]:
    """Return the nodes that the run's next attempt leaves out, and why."""
    found = records(paths)
    if not any(record.bad_nodes for record in found):
        return {}
    hours = effective_recovery(paths, newest_number(paths) + 1).exclude_nodes_for_h
    return bad_nodes.excluded(found, hours)


def records(paths: RunPaths) -> list[AttemptRecord]:
    """Return the records of all attempts, the first one first."""
    return [record for attempt in paths.attempt_folders() if (record := read_record(attempt)) is not None]


def saved_step(paths: RunPaths, attempt: int) -> int:
    """Return the step of the newest checkpoint that counts for the attempt, 0 without one."""
    return max((checkpoint.step for checkpoint in committed(paths, attempt)), default=0)


def lost(paths: RunPaths, record: AttemptRecord, *, is_requeued: bool = True) -> AttemptRecord:
    """Return the record of an attempt that ended without a word, with what its files and Slurm tell.

    ``is_requeued``: Slurm itself started its job anew; else nobody knows why another begins: a crash.
    """
    attempt = paths.attempt(record.attempt)
    signal, cause = noted_signal(attempt), "lost" if is_requeued else "crash"
    has_stopped = "saved" in record.events or exit_codes(attempt).get(0) == ExitCode.TRY_AGAIN
    if signal is not None and has_stopped:
        cause = "time limit" if signal == "SIGUSR2" else "preemption"
    nodes = _blamed(paths, record) if cause in {"lost", "crash"} else {}
    died = [node for node, how in nodes.items() if how == bad_nodes.DIED]
    what = f"{'node' if len(died) == 1 else 'nodes'} {', '.join(died)} died" if died else cause
    return replace(
        record,
        end=_last_word(attempt.folder) or now(),
        cause=cause,
        reason=f"{what}: it ended before its batch script could say how",
        bad_nodes=record.bad_nodes | nodes,
        saved_step=saved_step(paths, record.attempt),
    )


def _blamed(paths: RunPaths, record: AttemptRecord) -> dict[str, str]:
    """Return the attempt's nodes that are gone now, or were said to be unfit by a rank."""
    found = dict.fromkeys(gone(record.hosts), bad_nodes.DIED)
    for rank, end in rank_ends(paths.attempt(record.attempt)).items():
        if end.node is not None and end.code == ExitCode.BAD_NODE:
            found[end.node] = bad_nodes.FAILED_CHECK
        elif end.node is not None and end.code == ExitCode.HUNG:
            found[end.node] = f"rank {rank} hung"
    return found


def gone(hosts: Sequence[str]) -> list[str]:
    """Return those of the nodes that Slurm calls down, or has not heard of; none where it can't be asked."""
    wanted = bad_nodes.names(hosts)
    if not wanted:
        return []
    command = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(wanted)}", "--format=%N %T"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SINFO_")}
    with suppress(OSError, subprocess.SubprocessError):  # in a container there is none
        done = subprocess.run(
            command, env=clean, capture_output=True, text=True, check=True, timeout=_SINFO_LIMIT_S
        )
        pairs = (line.split() for line in done.stdout.splitlines())
        states = {pair[0]: pair[1].lower() for pair in pairs if len(pair) == 2}
        return sorted(node for node in wanted if _is_gone(states.get(node, "")))
    return []


def _is_gone(state: str) -> bool:
    """``idle*``: it does not respond."""
    return state.startswith(_GONE) or state.endswith("*")


def _last_word(folder: Path) -> str | None:
    with suppress(OSError):
        latest = max((path.stat().st_mtime for path in folder.iterdir()), default=None)
        if latest is not None:
            return datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
    return None


def meets(hosts: Collection[str], nodes: Collection[str]) -> list[str]:
    """Return the nodes that are among the hosts."""
    return sorted(set(hosts) & set(nodes))
