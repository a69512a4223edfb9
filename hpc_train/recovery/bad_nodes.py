"""Which nodes a run excludes for a time, according to its attempts' records. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from hpc_train.run.attempts import AttemptRecord

#: How a node's entry begins that is left out at once: it said itself that it is not fit.
FAILED_CHECK = "failed its check"
DIED = "died"
#: So many attempts a node may end before it is left out.
_TOLERATED = 1
#: What Slurm may be given as a node's name.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
#: What CUDA, NCCL and the kernel's driver say of a device that is at fault, rather than the program.
_DEVICE_ERROR = re.compile(
    r"uncorrectable ecc|\bxid \(|unspecified launch failure|fallen off the bus|gpu is lost"
    r"|unhandled cuda error|cuda error: (unknown error|hardware|an illegal instruction|the launch timed out)"
    r"|no cuda-capable device|nvlink error|cudaErrorECCUncorrectable|system not yet initialized"
    r"|busy or unavailable|driver/library version mismatch|unsupported display driver",
    re.IGNORECASE,
)
#: What NCCL or gloo says before it aborts a rank that has lost another one.
_LOST_A_PEER = re.compile(
    r"remote process exited|ncclRemoteError|connection closed by (remote )?peer|nccl operation timed out"
    r"|watchdog caught collective operation timeout",
    re.IGNORECASE,
)
#: Before the message of a line that torch's C++ code logs: rank, time, file and group.
_LOG_PREFIX = re.compile(r"^(\[[^\]]*\]:?\s*)+")


def excluded(records: Sequence[AttemptRecord], hours: float, now: datetime | None = None) -> dict[str, str]:
    """Return the nodes to exclude, and why: by the records of a run, the first one first.

    A node that failed its check, or ended two attempts, is excluded for these hours since the last time.
    """
    by_node = _by_node(records)
    if not by_node:
        return {}
    since = (now or datetime.now(UTC)) - timedelta(hours=hours)
    found: dict[str, str] = {}
    for node, entries in sorted(by_node.items()):
        why = _why(entries)
        if why is not None and _is_name(node) and _time(entries[-1][0]) > since:
            found[node] = why
    return found


def _by_node(records: Sequence[AttemptRecord]) -> dict[str, list[tuple[AttemptRecord, str]]]:
    nodes: dict[str, list[tuple[AttemptRecord, str]]] = {}
    for record in records:
        for node, how in record.bad_nodes.items():
            nodes.setdefault(node, []).append((record, how))
    return nodes


def _why(entries: Sequence[tuple[AttemptRecord, str]]) -> str | None:
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
    """Tell whether an error's text is that of a device at fault."""
    return _DEVICE_ERROR.search(text) is not None


def lost_a_peer(line: str) -> bool:
    """Return True if a line of a log reports that its rank was aborted over a peer that is gone or silent."""
    return _LOST_A_PEER.search(line) is not None and not is_device_error(line)


def abort_line(log: str) -> str | None:
    """Return the message with which CUDA, NCCL or gloo aborted the process, in front of its C++ frames.

    That of a device counts more than that of a program's kernel, and both more than that of a lost peer.
    """
    lines = log.splitlines()
    for is_one in (is_device_error, lambda line: "CUDA error: " in line, lost_a_peer):
        for line in lines:
            if is_one(line):
                return _LOG_PREFIX.sub("", line.strip())
    return None


def names(nodes: Iterable[str]) -> list[str]:
    """Return those that can be named to Slurm."""
    return [node for node in nodes if _is_name(node)]
