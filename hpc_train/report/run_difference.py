"""What two runs differ in: keys of their experiments, versions of packages, and their code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import HpcTrainError
from hpc_train.paths import RunPaths
from hpc_train.report.changed_keys import changed_keys
from hpc_train.run.code import snapshot as snapshots
from hpc_train.run.code.text_diff import text_diff
from hpc_train.run.create import newest_versions
from hpc_train.run.run_facts import run_facts
from hpc_train.run.versions import Differences as VersionDifferences
from hpc_train.run.versions import differences as version_differences


@dataclass(frozen=True)
class CodeDifference:
    """The difference between two snapshots of the code."""

    files: snapshots.Differences
    #: Unified diffs of the work tree's files, bounded.
    lines: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return ``code`` of ``compare --diff --json``."""
        return {
            "added": self.files.added,
            "changed": self.files.changed,
            "removed": self.files.removed,
            "diff": self.lines,
        }


@dataclass(frozen=True)
class RunDifference:
    """What the second of two runs has other than the first."""

    #: Key → its two values.
    settings: dict[str, tuple[Any, Any]]
    versions: VersionDifferences
    #: None where a run has no snapshot, or it can't be read.
    code: CodeDifference | None
    #: Why there is no ``code``.
    reason: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the differences in ``compare --diff --json``."""
        return {
            "settings": {key: list(values) for key, values in self.settings.items()},
            "versions": {key: list(values) for key, values in self.versions.items()},
            "code": self.code.to_json() if self.code else None,
            "code_unknown": self.reason,
        }


def run_difference(first: RunPaths, second: RunPaths, names: tuple[str, str]) -> RunDifference:
    """Compare two runs. ``names``: of the runs, in the heads of diffs."""
    settings = changed_keys([first, second])
    before, after = (settings[paths] for paths in (first, second))
    versions = version_differences(*(newest_versions(run_facts(paths)) for paths in (first, second)))
    try:
        code, reason = _code_difference(first, second, names)
    except HpcTrainError as error:
        code, reason = None, str(error)
    return RunDifference(_paired(before, after), versions, code, reason)


def _paired(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (before.get(key), after.get(key)) for key in {**before, **after}}


def _code_difference(
    first: RunPaths, second: RunPaths, names: tuple[str, str]
) -> tuple[CodeDifference | None, str | None]:
    """Return the difference, or why it is unknown. Raises StorageError if a snapshot is gone."""
    before, after = snapshots.linked(first), snapshots.linked(second)
    if before is None or after is None:
        return None, f"{names[0] if before is None else names[1]} has no snapshot of its code"
    files = snapshots.differences(before, after)
    return CodeDifference(files, text_diff(before, after, files, names)), None
