"""What the batch script calls after srun, on the first node: why the attempt ended, and whether it goes on.

``python -m hpc_train.launchers.slurm.after SUBMISSION CODE`` (srun's exit code) writes that down and prints
``requeue 75`` or ``stop CODE``; the script does the rest, for in a container nobody can ask Slurm.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from hpc_train.errors import HpcTrainError
from hpc_train.launchers.outcome import log_tail, one_line
from hpc_train.launchers.slurm.begin import MARK, BatchJob, say
from hpc_train.launchers.slurm.verdict import Facts, Verdict, judge
from hpc_train.paths import AttemptPaths, RunPaths
from hpc_train.run_folder.attempts import (
    AttemptRecord,
    newest_number,
    now,
    now_ms,
    read_record,
    write_record,
)
from hpc_train.run_folder.ends import exit_codes
from hpc_train.run_folder.events import noted_signal
from hpc_train.run_folder.status import read_status, write_status

_OUTPUT_BYTES = 1 << 16
#: A traceback's last lines say what it is; more is in the file.
_ERROR_BYTES = 1 << 16
GIVEN_UP = "stop 1"


def after(folder: Path, srun_code: int, environ: Mapping[str, str]) -> str:
    """Judge the attempt, write the verdict into the run's folder, return what the script does next."""
    ended = now_ms()
    job = BatchJob.of(folder, environ)
    number = int(environ["HPC_TRAIN_ATTEMPT"])
    if newest_number(job.paths) > number:
        say(f"attempt {newest_number(job.paths)} of run {job.paths.folder.name} goes on instead of {number}")
        return GIVEN_UP
    record = read_record(job.paths.attempt(number))
    if record is None:
        raise HpcTrainError(f"{job.paths.attempt(number).record}: missing or not JSON")
    verdict = judge(gather(job, record, srun_code))
    _write(job.paths, record, verdict, srun_code, ended)
    if verdict.reason is not None:
        say(f"{verdict.state}: {verdict.reason}")
    return verdict.words


def gather(job: BatchJob, record: AttemptRecord, srun_code: int) -> Facts:
    """Read what the attempt has left behind."""
    paths, attempt = job.paths, job.paths.attempt(record.attempt)
    status, earlier = read_status(paths), _earlier(job, record)
    signal = noted_signal(attempt)
    return Facts(
        srun_code=srun_code,
        is_completed=status.state == "completed",
        is_cancelled=paths.cancelled.exists(),
        errors=_errors(attempt),
        codes=exit_codes(attempt),
        signal=signal,
        is_early=signal == "SIGUSR2" and _is_early(paths, record),
        step=status.step,
        has_stepped="first_step" in record.events,
        output=_output(job, record.attempt),
        logs=_last_lines(attempt),
        crashes_before=sum(each.cause == "crash" for each in earlier),
        idle_before=len(list(takewhile(_is_idle, reversed(earlier)))),
    )


def _earlier(job: BatchJob, record: AttemptRecord) -> list[AttemptRecord]:
    """Return this job's attempts before this one, the first one first."""
    found = [read_record(each) for each in job.paths.attempt_folders() if each.number < record.attempt]
    return [each for each in found if each is not None and job.owns(each)]


def _is_idle(record: AttemptRecord) -> bool:
    return record.cause == "time limit" and "first_step" not in record.events


def _is_early(paths: RunPaths, record: AttemptRecord) -> bool:
    """Tell whether the signal came before half of the time limit, which no warning of ours does.

    Some sites send the warning's signal at preemption.
    """
    from hpc_train.run_folder.creation import effective_experiment  # 0.3 s, which a requeue seldom needs

    slurm = effective_experiment(paths, record.attempt).slurm
    if slurm is None or slurm.time_limit is None or not {"begin", "signal"} <= record.events.keys():
        return False
    lasted = datetime.fromisoformat(record.events["signal"]) - datetime.fromisoformat(record.events["begin"])
    # Slurm may be a minute early; limits that short have no room to tell.
    return lasted.total_seconds() < slurm.time_limit * 60 / 2 - 60


def _errors(attempt: AttemptPaths) -> dict[int, str]:
    """Return the ranks' errors, the first one first."""
    found = []
    for path in attempt.folder.glob("rank-*.error"):
        rank = path.stem.removeprefix("rank-")
        if rank.isdecimal():
            text = _end_of(path, _ERROR_BYTES).strip()
            found.append((path.stat().st_mtime_ns, int(rank), text or "said nothing"))
    return {rank: text for _, rank, text in sorted(found)}


def _last_lines(attempt: AttemptPaths) -> dict[int, str]:
    """Return the logs' last lines by rank. Only srun's few words need them, so a thousand are not read."""
    found: dict[int, str] = {}
    for path in sorted(attempt.folder.glob("rank-*.log")):
        rank = path.stem.removeprefix("rank-")
        if rank.isdecimal():
            is_wanted = len(found) < 64
            lines = log_tail(path).strip().splitlines() if is_wanted else []
            found[int(rank)] = lines[-1] if lines else ""
    return found


def _output(job: BatchJob, number: int) -> str:
    """Return what the batch script has printed since ``begin`` said that this attempt begins."""
    text = ""
    for ending in ("out", "err"):
        path = job.submission.folder / f"{job.job}_0_log.{ending}"  # by submitit
        with suppress(OSError):
            text += _end_of(path, _OUTPUT_BYTES)
    # Kept whole where the mark is not there: it lies further back than what is read.
    return text.rpartition(f"{MARK} {number} ")[2]


def _end_of(path: Path, nbytes: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
        return file.read().decode("utf-8", "replace")


def _write(paths: RunPaths, record: AttemptRecord, verdict: Verdict, srun_code: int, ended: str) -> None:
    attempt = paths.attempt(record.attempt)
    events = record.events | {"end": ended}
    if verdict.state == "requeued":
        events["requeue"] = now_ms()
    told = replace(
        record,
        end=now(),
        cause=verdict.cause,
        reason=verdict.reason,
        events=events,
        exit_codes=_all_codes(record.ranks or 0, exit_codes(attempt), srun_code),
    )
    write_record(attempt, told)
    if verdict.state != "completed":
        status = read_status(paths)
        write_status(paths, replace(status, state=verdict.state, reason=verdict.reason))


def _all_codes(num_ranks: int, known: dict[int, int], srun_code: int) -> list[int] | None:
    """Return the ranks' codes where every one is known: srun's is the highest of all."""
    if srun_code == 0 or (srun_code == 75 and known.get(0) == 75):
        return [srun_code] * num_ranks
    return [known[rank] for rank in range(num_ranks)] if known.keys() >= set(range(num_ranks)) else None


def main(words: Iterable[str]) -> int:
    folder, code = words
    answer = GIVEN_UP
    try:
        answer = after(Path(folder).absolute(), int(code), os.environ)
    except BaseException as error:  # whatever it is, the script must know what to do
        traceback.print_exc()
        with suppress(BaseException):
            paths = BatchJob.of(Path(folder).absolute(), os.environ).paths
            reason = one_line(f"how the attempt ended could not be judged: {type(error).__name__}: {error}")
            write_status(paths, replace(read_status(paths), state="failed", reason=reason))
    print(answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
