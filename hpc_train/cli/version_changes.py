"""Which versions a resumed run will use, beside those that it had."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.cli.starting import LOCAL
from hpc_train.config.schema import Experiment
from hpc_train.paths import RunPaths
from hpc_train.run_folder.creation import noted_versions
from hpc_train.run_folder.versions import Differences, differences, in_words, versions


@dataclass(frozen=True)
class VersionChange:
    """How the versions that ranks will use differ from those that they had."""

    #: None where the ranks use an interpreter that can't be asked here.
    now: dict[str, str] | None
    differences: Differences = field(default_factory=dict)
    #: Whose versions are not known.
    not_looked_at: str | None = None

    @property
    def words(self) -> str | None:
        """Return what to say, None where all is as it was."""
        if self.not_looked_at:
            return f"versions: not looked at, because of {self.not_looked_at}"
        if self.differences:
            return f"versions: {in_words(self.differences)}; the weights may differ in the last bit"
        return None


def other_python(launcher: str, experiment: Experiment) -> str | None:
    """Return the key that has ranks use another interpreter than this one, with its value."""
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

    ``before``, ``after``: which other interpreter the run used, and will use.
    """
    if after:
        return VersionChange(None, not_looked_at=after)
    then, now = noted_versions(paths), versions()
    if not new_code and os.path.lexists(paths.code) and "hpc-train" in then:
        now["hpc-train"] = then["hpc-train"]  # ranks import the one of the run's snapshot
    if before:
        return VersionChange(now, not_looked_at=f"{before}, which the run had")
    return VersionChange(now, differences(then, now))


def _is_this(python: str) -> bool:
    """Tell whether ``python`` is this interpreter, by whatever name of the same folder."""
    # Links stay: that of a virtual environment leads to another Python's folder.
    path, this = Path(python).expanduser(), Path(sys.executable)
    return path.parent == this.parent and path.resolve() == this.resolve()
