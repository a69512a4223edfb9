"""Changes to runs that go into a queue: made before the submission, undone if the scheduler refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import BadFileError
from hpc_train.launchers.base import StartRequest
from hpc_train.paths import RunPaths
from hpc_train.run.attempts import newest_number
from hpc_train.run.files import write_text


@contextmanager
def prepared(runs: Sequence[StartRequest]) -> Iterator[None]:
    """Prepare the runs' next attempts; undo all changes on a BadFileError."""
    before = []
    try:
        for run in runs:
            before.append(_Before.of(run.paths))
            run.prepare(newest_number(run.paths) + 1)
            run.paths.cancelled.unlink(missing_ok=True)
        yield
    except BadFileError:
        for state in before:
            state.restore()
        raise


@dataclass(frozen=True)
class _Before:
    """The small files of a run that starting it changes."""

    texts: dict[Path, str | None]

    @classmethod
    def of(cls, paths: RunPaths) -> _Before:
        files = (paths.run, paths.status, paths.cancelled)
        return cls({path: path.read_text("utf-8") if path.exists() else None for path in files})

    def restore(self) -> None:
        for path, text in self.texts.items():
            if not path.parent.exists():
                return  # the launcher has removed a run that was never queued
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_text(path, text, sync=True)
