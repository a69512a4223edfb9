"""Drives a run through faults to its end, and checks that it equals the uninterrupted run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.paths import RunPaths
from hpc_train.run.attempts import AttemptRecord, read_record
from hpc_train.run.checkpoints import verify
from hpc_train.run.run_status import read_status
from tests.end_to_end.runs import assert_equal_to_the_bit
from tests.faults.faults import STEPS_AFTER, Fault, nothing
from tests.faults.on_slurm import SlurmRun
from tests.faults.runs import HELD_ROW, LocalRun, Run, living_processes, step_of, wait

_LEAVE_S = 60.0


def survive(run: Run, faults: Sequence[Fault], quiet: RunPaths) -> None:
    """Let each fault strike, see the run complete, compare it with ``quiet``. Raises AssertionError."""
    for fault in faults:
        strike(run, fault)
    complete(run)
    assert_whole(run, quiet)


def strike(run: Run, fault: Fault, ready: Callable[[], object] = nothing, **environment: str) -> None:
    """Let the fault strike at its step, see the attempt end for the right reason and the next one begin.

    ``ready`` is called right before the strike. ``environment`` is the next attempt's own, of a local run.
    """
    wait(lambda: run.attempt() > 0, lambda: f"the first attempt\n{run.account()}")
    attempt = run.attempt()
    run.hold.at(fault.step, since_row=HELD_ROW)
    wait(
        lambda: run.hold.is_reached() or run.is_over(attempt),
        lambda: f"step {fault.step} of attempt {attempt}\n{run.account()}",
    )
    assert not run.is_over(attempt), f"over before {fault} struck\n{run.account()}"
    ready()
    cure = fault.strike(run)
    if not fault.asks_all:
        run.hold.at(1, since_attempt=attempt + 1, since_row=HELD_ROW)
    try:
        if not fault.ends and _goes_on(run, fault, attempt):
            return
        wait(lambda: run.is_over(attempt), lambda: f"no end by {fault}\n{run.account()}")
        run.hold.at(1, since_attempt=attempt + 1, since_row=HELD_ROW)
        check_end(run, fault, attempt)
    finally:
        cure()
    if fault.is_final and isinstance(run, SlurmRun):
        run.resume()
    run.go_on(attempt, **environment)


def _goes_on(run: Run, fault: Fault, attempt: int) -> bool:
    """Wait until the attempt has survived the fault (True) or ended of it."""
    wait(
        lambda: run.is_over(attempt) or fault.is_past(run),
        lambda: f"{fault} to strike\n{run.account()}",
    )
    then = step_of(run.paths, attempt)
    wait(
        lambda: run.is_over(attempt) or step_of(run.paths, attempt) >= then + STEPS_AFTER,
        lambda: f"the end of attempt {attempt}, or more steps, after {fault}\n{run.account()}",
    )
    return not run.is_over(attempt) or read_status(run.paths).state == "completed"


def check_end(run: Run, fault: Fault, attempt: int) -> None:
    """Raise AssertionError where the attempt did not end as this fault ends it."""
    if isinstance(run, LocalRun):
        assert run.code() in fault.codes, f"exit code {run.code()} after {fault}\n{run.account()}"
        reason = read_status(run.paths).reason or ""
    else:
        reason = _record(run, attempt).reason or ""
    cause = _record(run, attempt).cause
    # The local launcher gives none; nor does a job that Slurm itself took back, until the next one begins.
    assert cause is None or cause in fault.causes, f"{cause} after {fault}\n{run.account()}"
    if fault.reason:
        assert re.search(re.escape(fault.reason), reason), f"{reason!r} after {fault}\n{run.account()}"


def _record(run: Run, attempt: int) -> AttemptRecord:
    record = read_record(run.paths.attempt(attempt))
    assert record is not None, run.account()
    return record


def complete(run: Run) -> None:
    """See the run complete, and its processes gone."""

    run.hold.release()

    def is_over() -> bool:
        return run.is_over(run.attempt()) and read_status(run.paths).state in {"completed", "failed"}

    wait(is_over, run.account)
    if isinstance(run, LocalRun):
        assert run.code() == 0, run.account()
    status = read_status(run.paths)
    assert status.state == "completed", run.account()
    assert status.step == status.total_steps, run.account()
    # The batch script has a few more words to say.
    wait(
        lambda: not living_processes(run.paths),
        lambda: f"the end of the run's processes: {_commands(living_processes(run.paths))}",
        _LEAVE_S,
    )


def _commands(pids: Sequence[int]) -> list[str]:
    """Return the command lines of processes that live."""
    found = []
    for pid in pids:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            found.append(f"{pid}: {b' '.join(words).decode(errors='replace')}")
    return found


def assert_whole(
    run: Run, quiet: RunPaths, assert_equal: Callable[[RunPaths, RunPaths], None] = assert_equal_to_the_bit
) -> None:
    """Raise AssertionError where the run differs from ``quiet``, or contains something half-written."""
    for folder in run.paths.checkpoints.iterdir():
        assert re.fullmatch(r"step-\d{8}", folder.name), f"{folder.name} was left behind"
    for checkpoint in run.paths.checkpoint_folders():
        assert verify(checkpoint) == [], checkpoint
    try:
        assert_equal(quiet, run.paths)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.account()}") from error
