"""Nodes that a run excludes for a time, determined from its attempts' records. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from hpc_train.run.attempts import AttemptRecord

#: Prefix of the entry of a node that failed its own check and is therefore excluded at once.
FAILED_CHECK = "failed its check"
DIED = "died"
UNEQUAL = "computed other numbers than another node"
#: Number of attempts that a node may end before it is excluded.
_TOLERATED = 1
#: Valid node names for Slurm.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
#: Messages of CUDA, NCCL and the kernel driver about a faulty device, as opposed to a fault of the program.
_DEVICE_ERROR = re.compile(
    r"uncorrectable ecc|\bxid \(|unspecified launch failure|fallen off the bus|gpu is lost"
    r"|unhandled cuda error|cuda error: (unknown error|hardware|an illegal instruction|the launch timed out)"
    r"|no cuda-capable device|nvlink error|cudaErrorECCUncorrectable|system not yet initialized"
    r"|busy or unavailable|driver/library version mismatch|unsupported display driver",
    re.IGNORECASE,
)
#: Messages of NCCL and gloo before they abort a rank that has lost a peer.
_LOST_A_PEER = re.compile(
    r"remote process exited|ncclRemoteError|connection closed by (remote )?peer|nccl operation timed out"
    r"|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
#: Prefix of log lines of torch's C++ code: rank, time, file and group.
_LOG_PREFIX = re.compile(r"^(\[[^\]]*\]:?\s*)+")


def excluded(records: Sequence[AttemptRecord], hours: float, now: datetime | None = None) -> dict[str, str]:
    """Return the nodes to exclude and the reasons, from the records of a run in order.

    A node that failed its check, or ended two attempts, is excluded for ``hours`` since the last time.
    """
    by_node = _by_node(records)
    if not by_node:
        return {}
    since = (now or datetime.now(UTC)) - timedelta(hours=hours)
    reasons: dict[str, str] = {}
    for node, entries in sorted(by_node.items()):
        why = _reason(entries)
        if why is not None and _is_name(node) and _time(entries[-1][0]) > since:
            reasons[node] = why
    return reasons


def _by_node(records: Sequence[AttemptRecord]) -> dict[str, list[tuple[AttemptRecord, str]]]:
    nodes: dict[str, list[tuple[AttemptRecord, str]]] = {}
    for record in records:
        for node, how in record.bad_nodes.items():
            nodes.setdefault(node, []).append((record, how))
    return nodes


def _reason(entries: Sequence[tuple[AttemptRecord, str]]) -> str | None:
    ways = [how for _, how in entries]
    checks = [how for how in ways if how.startswith(FAILED_CHECK)]
    if checks:
        return checks[-1]
    if len(ways) <= _TOLERATED:
        return None
    times = "twice" if len(ways) == 2 else f"{len(ways)} times"
    return f"ended attempts {times}: {ways[-1]}"


def _time(record: AttemptRecord) -> datetime:
    time = datetime.fromisoformat(record.end or record.start)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _is_name(node: str) -> bool:
    return _NODE.fullmatch(node) is not None


def exclusion_words(nodes: dict[str, str]) -> str:
    """Return text like ``excludes n2 (failed its check: …)``; empty without nodes."""
    return f"excludes {', '.join(f'{node} ({why})' for node, why in nodes.items())}" if nodes else ""


def is_device_error(text: str) -> bool:
    """Return True if an error's text reports a faulty device."""
    return _DEVICE_ERROR.search(text) is not None


def lost_a_peer(line: str) -> bool:
    """Return True if a line of a log reports that its rank was aborted because of a lost or silent peer."""
    return _LOST_A_PEER.search(line) is not None and not is_device_error(line)


def abort_line(log: str) -> str | None:
    """Return the message with which CUDA, NCCL or gloo aborted the process, without its C++ frames.

    A device error takes precedence over an error of a program's kernel, and both over a lost peer.
    """
    lines = log.splitlines()
    for matches in (is_device_error, lambda line: "CUDA error: " in line, lost_a_peer):
        for line in lines:
            if matches(line):
                return _LOG_PREFIX.sub("", line.strip())
    return None


def names(nodes: Iterable[str]) -> list[str]:
    """Return the nodes whose names are valid for Slurm."""
    return [node for node in nodes if _is_name(node)]
