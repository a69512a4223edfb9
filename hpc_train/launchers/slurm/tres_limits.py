"""Limits of a QOS or an association, as ``sacctmgr`` prints them: read by ``cluster_facts``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
#: Units of memory, in MB.
_MB = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
#: Field of ``sacctmgr`` → the limit's name in messages: limits for one job, and for all jobs of a user or a
#: group, which a single job may exceed as well.
PER_JOB = {
    "maxtres": "MaxTRESPerJob",
    "maxtrespu": "MaxTRESPerUser",
    "maxtrespa": "MaxTRESPerAccount",
    "grptres": "GrpTRES",
}
QOS_FIELDS = ("name", "maxwall", "maxtrespernode", "flags", "maxsubmitpu", *PER_JOB)


@dataclass(frozen=True)
class Limits:
    """The limits of one QOS or association, in Slurm's units: memory in MB."""

    #: ``QOS long``, ``account vision``: in messages.
    owner: str
    max_wall_s: int | None = None
    #: Slurm's name of the limit → resource → maximum for one job.
    per_job: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    per_node: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, owner: str, fields: Mapping[str, str]) -> Limits:
        """Read fields of ``sacctmgr``; missing or empty fields limit nothing."""
        per_job = {name: tres(fields[key]) for key, name in PER_JOB.items() if tres(fields.get(key, ""))}
        return cls(owner, seconds(fields.get("maxwall")), per_job, tres(fields.get("maxtrespernode", "")))


@dataclass(frozen=True)
class Qos:
    """A quality of service, of ``sacctmgr show qos``."""

    #: In small letters, as Slurm keeps it.
    name: str
    #: In small letters.
    flags: frozenset[str]
    #: Maximum number of a user's queued and running jobs.
    max_submit: int | None
    limits: Limits


def parsed_qos(output: str) -> list[Qos]:
    """Return the QOS of ``sacctmgr``: lines of ``QOS_FIELDS``."""
    listed: list[Qos] = []
    for line in output.split("\n"):
        parts = line.split("|")
        if len(parts) == len(QOS_FIELDS) and parts[0]:
            fields = dict(zip(QOS_FIELDS, parts, strict=True))
            flags = frozenset(fields["flags"].lower().split(",")) - {""}
            name, most = fields["name"].lower(), fields["maxsubmitpu"]
            limits = Limits.parse(f"QOS {name}", fields)
            listed.append(Qos(name, flags, int(most) if most.isdecimal() else None, limits))
    return listed


def tres(text: str) -> dict[str, int]:
    """Return ``cpu=4,gres/gpu=2,mem=100G`` as resource → count, memory in MB; other words are ignored."""
    counts: dict[str, int] = {}
    for word in text.lower().split(","):
        name, _, value = word.rpartition("=")
        match = _SIZE.fullmatch(value.upper())
        if name and match:
            counts[name] = int(float(match[1]) * (_MB[match[2]] if name == "mem" else 1))
    return counts


def seconds(text: str | None) -> int | None:
    """Return the seconds of ``2-00:00:00``, ``10:00`` or ``60``; None for UNLIMITED and any other text."""
    if text is None:
        return None
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    return int(text) if text.isdecimal() else None
