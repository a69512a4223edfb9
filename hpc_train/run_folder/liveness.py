"""Whether an attempt still lives, and the end of what a dead launcher left behind."""

from __future__ import annotations

import signal

from hpc_train.paths import RunPaths
from hpc_train.run_folder.attempts import AttemptRecord, newest_number, read_record

#: Assumed: a process in an uninterruptible write on a slow disk may take that long to go.
_KILL_LIMIT_S = 30.0


def living(record: AttemptRecord) -> bool | None:
    """Tell whether the attempt's launcher lives; None where that can't be seen from here."""
    if record.end is not None or record.launcher_process is None:
        return False
    return record.launcher_process.is_alive()


def newest_record(paths: RunPaths) -> AttemptRecord | None:
    """Return the record of the newest attempt, or None before the first."""
    return read_record(paths.attempt(newest_number(paths)))


def end_living(paths: RunPaths) -> AttemptRecord | None:
    """Make sure that no rank of the newest attempt writes any more, before another attempt begins.

    Returns its record where its launcher lives or, on another machine, may live: then nothing was done
    and no attempt may begin. Ranks that outlived their launcher are killed; a process that the record names
    is left alone unless its own environment says that it is such a rank. Raises TryAgainError where one
    does not end.
    """
    record = newest_record(paths)
    if record is None:
        return None
    if living(record) is not False:
        return record
    number = newest_number(paths)
    sent = {rank: rank.send(signal.SIGKILL, paths.folder, number) for rank in record.rank_processes}
    for process in (rank for rank, was_sent in sent.items() if was_sent):
        process.wait(_KILL_LIMIT_S)
    return None
