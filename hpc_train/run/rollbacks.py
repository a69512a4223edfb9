"""``rollbacks.jsonl``: the steps that a run rolled back, and the data windows that it has skipped since.

A checkpoint has the windows that were skipped before it. A replay also needs those that were skipped later,
and for a step that was rolled back, those that were skipped when it was trained. Training writes the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from typing_extensions import override

from hpc_train.errors import BadFileError
from hpc_train.paths import RunPaths
from hpc_train.run.checkpoints import committed, read_object
from hpc_train.run.file_shapes import Count, decoded
from hpc_train.run.files import UnreadableFileError, open_regular
from hpc_train.run.growing_file import GrowingFile


@dataclass(frozen=True)
class Rollback:
    """A line. ``step``: as in the rows of metrics. ``window``: the data that this step read."""

    step: Count
    window: Count


class RollbacksFile(GrowingFile):
    """The rollbacks whose windows this attempt skips from its start, followed by its own.

    An attempt that continues from a checkpoint before a rollback meets that step again.
    """

    def __init__(self, path: Path, skipped: Collection[int]) -> None:
        self._skipped = skipped
        super().__init__(path)

    @override
    def copy_kept(self, old: BinaryIO, new: BinaryIO) -> None:
        for line in old:
            rollback = _parsed(line)
            if rollback is not None and rollback.window in self._skipped:
                new.write(line)

    def append(self, rollback: Rollback) -> None:
        """Write a rollback to the operating system."""
        self.write(json.dumps(asdict(rollback)).encode() + b"\n")


def read_rollbacks(paths: RunPaths) -> list[Rollback]:
    """Return the run's rollbacks in their order; lines that can't be read are omitted."""
    with suppress(FileNotFoundError, UnreadableFileError), open_regular(paths.rollbacks) as file:
        return [rollback for line in file if (rollback := _parsed(line)) is not None]
    return []


def skipped_windows(paths: RunPaths, rolled_back: int | None = None) -> frozenset[int]:
    """Return the data windows that the run skipped when it trained its steps for the last time.

    A window that is skipped at a rollback does not change the steps before, so these are all windows; without
    those skipped since the step ``rolled_back`` was rolled back. A checkpoint has those of earlier rollbacks.
    """
    rollbacks = read_rollbacks(paths)
    windows = {rollback.window for rollback in rollbacks}
    for checkpoint in committed(paths):
        with suppress(BadFileError, KeyError, TypeError):
            windows.update(read_object(checkpoint.state)["extra"]["position"]["skipped"])
            break
    if rolled_back is not None:
        steps = [rollback.step for rollback in rollbacks]
        newest = len(steps) - 1 - steps[::-1].index(rolled_back)
        windows -= {rollback.window for rollback in rollbacks[newest:]}
    return frozenset(windows)


def _parsed(line: bytes) -> Rollback | None:
    with suppress(ValueError, RecursionError):
        return decoded(Rollback, json.loads(line))
    return None
