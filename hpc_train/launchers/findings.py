"""``Finding``: an entry of ``doctor``'s report, one for each check of a machine or cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    #: Runs would fail, or lose work that they need not lose.
    ERROR = "error"
    #: Runs work, but with less than they could have, or only under a condition that ``why`` names.
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """The result of one check. Texts may contain names of a cluster: print them by ``console`` only."""

    #: ``error``, ``warning`` or ``ok``.
    level: Level
    #: Name of the check, the same in all versions.
    check: str
    #: The observation, with its value.
    what: str
    #: Its source: a command, a file, a node.
    source: str = ""
    #: The consequence for a run. Empty for ``ok``.
    why: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as an entry of ``findings`` of ``doctor --json``."""
        return asdict(self) | {"level": str(self.level)}
