"""The versions that a resumed run will use, compared with its earlier ones."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.config.schema import Experiment
from hpc_train.launchers.following import LOCAL
from hpc_train.paths import RunPaths
from hpc_train.run.create import noted_versions
from hpc_train.run.versions import Differences, differences, in_words, versions


@dataclass(frozen=True)
class VersionChange:
    """The differences between the versions that ranks will use and their earlier ones."""

    #: None if the ranks use an interpreter that can't be queried here.
    now: dict[str, str] | None
    differences: Differences = field(default_factory=dict)
    #: The interpreter whose versions are unknown.
    not_looked_at: str | None = None

    @property
    def words(self) -> str | None:
        """Return the message, None if nothing has changed."""
        if self.not_looked_at:
            return f"versions: not compared, because of {self.not_looked_at}"
        if self.differences:
            return f"versions: {in_words(self.differences)}; the weights may differ in the last bit"
        return None


def other_python(launcher: str, experiment: Experiment) -> str | None:
    """Return the key that makes ranks use another interpreter than this one, with its value."""
    environment = experiment.environment
    if launcher == LOCAL:
        return None
    if environment.container is not None:
        return f"environment.container {environment.container}"
    if environment.python is not None and not _is_this(environment.python):
        return f"environment.python {environment.python}"
    return None


def version_change(
    paths: RunPaths, before: str | None, after: str | None, *, new_code: bool
) -> VersionChange:
    """Compare the run's versions with those of this environment.

    ``before``, ``after``: the other interpreter that the run used, and will use.
    """
    if after:
        return VersionChange(None, not_looked_at=after)
    then, now = noted_versions(paths), versions()
    if not new_code and os.path.lexists(paths.code) and "hpc-train" in then:
        now["hpc-train"] = then["hpc-train"]  # ranks import the hpc_train of the run's snapshot
    if before:
        return VersionChange(now, not_looked_at=f"{before}, which the run had")
    return VersionChange(now, differences(then, now))


def _is_this(python: str) -> bool:
    """Return True if ``python`` is this interpreter, by any name in the same folder."""
    # Links are not resolved: a virtual environment's link leads to another Python's folder.
    path, this = Path(python).expanduser(), Path(sys.executable)
    return path.parent == this.parent and path.resolve() == this.resolve()
