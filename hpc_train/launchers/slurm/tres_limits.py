"""Limits of a QOS or an association, as ``sacctmgr`` prints them: read by ``cluster_facts``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d\d)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
#: Units of memory, in MB.
_MB = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}
#: Field of ``sacctmgr`` → how messages name the limit: what one job may have, and a user's or a group's jobs
#: together, which one job alone may exceed as well.
PER_JOB = {
    "maxtres": "MaxTRESPerJob",
    "maxtrespu": "MaxTRESPerUser",
    "maxtrespa": "MaxTRESPerAccount",
    "grptres": "GrpTRES",
}
QOS_FIELDS = ("name", "maxwall", "maxtrespernode", "flags", "maxsubmitpu", *PER_JOB)


@dataclass(frozen=True)
class Limits:
    """What one QOS or association allows. Numbers as Slurm counts: memory in MB."""

    #: ``QOS long``, ``account vision``: in messages.
    owner: str
    max_wall_s: int | None = None
    #: Name of the limit, as Slurm has it → resource → the most that one job may have.
    per_job: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    per_node: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, owner: str, fields: Mapping[str, str]) -> Limits:
        """Read fields of ``sacctmgr``; those that are missing or empty limit nothing."""
        per_job = {name: tres(fields[key]) for key, name in PER_JOB.items() if tres(fields.get(key, ""))}
        return cls(owner, seconds(fields.get("maxwall")), per_job, tres(fields.get("maxtrespernode", "")))


@dataclass(frozen=True)
class Qos:
    """A quality of service, of ``sacctmgr show qos``."""

    #: In small letters, as Slurm keeps it.
    name: str
    #: In small letters.
    flags: frozenset[str]
    #: Jobs that one user may have in the queue and running.
    max_submit: int | None
    limits: Limits


def parsed_qos(said: str) -> list[Qos]:
    """Return the QOS of ``sacctmgr``: lines of ``QOS_FIELDS``."""
    found: list[Qos] = []
    for line in said.split("\n"):
        parts = line.split("|")
        if len(parts) == len(QOS_FIELDS) and parts[0]:
            fields = dict(zip(QOS_FIELDS, parts, strict=True))
            flags = frozenset(fields["flags"].lower().split(",")) - {""}
            name, most = fields["name"].lower(), fields["maxsubmitpu"]
            limits = Limits.parse(f"QOS {name}", fields)
            found.append(Qos(name, flags, int(most) if most.isdecimal() else None, limits))
    return found


def tres(text: str) -> dict[str, int]:
    """Return ``cpu=4,gres/gpu=2,mem=100G`` as resource → count, memory in MB; other words are ignored."""
    found: dict[str, int] = {}
    for word in text.lower().split(","):
        name, _, value = word.rpartition("=")
        match = _SIZE.fullmatch(value.upper())
        if name and match:
            found[name] = int(float(match[1]) * (_MB[match[2]] if name == "mem" else 1))
    return found


def seconds(text: str | None) -> int | None:
    """Return the seconds of ``2-00:00:00``, ``10:00`` or ``60``; None for UNLIMITED and any other text."""
    if text is None:
        return None
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, secs = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    return int(text) if text.isdecimal() else None
