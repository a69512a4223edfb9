"""What ``submit`` and ``resume`` share: an attempt handed to a launcher, and the account of how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from hpc_train.cli.metrics import Row, told, validation_rows
from hpc_train.cli.next_steps import next_steps
from hpc_train.cli.printing import cell_text, put, put_json, say
from hpc_train.cli.progress import Progress
from hpc_train.cli.status import RunRow, rows_json
from hpc_train.config.schema import Experiment
from hpc_train.errors import ExitCode, TryAgainError, UsageError, UserError
from hpc_train.launchers.base import Launcher, LaunchRequest, QueueingLauncher
from hpc_train.launchers.outcome import one_line
from hpc_train.paths import RunPaths
from hpc_train.registry import is_factory, load, nearest, parts, refusing_exit
from hpc_train.run_folder.attempts import claim_exactly
from hpc_train.run_folder.creation import effective_experiment, note_change
from hpc_train.run_folder.files import read_json, write_json
from hpc_train.run_folder.finding import run_name, run_names
from hpc_train.run_folder.liveness import newest_record
from hpc_train.run_folder.status import GOING_ON, INTERRUPTED, STOPPED_BY_CTRL_C, read_status, write_status
from hpc_train.run_folder.trust import check_run

LOCAL = "local"


def load_launcher(name: str) -> Launcher | QueueingLauncher:
    """Return the launcher plug-in; raises UsageError where there is none of that name."""
    if not is_factory(name) and name not in parts("launchers"):
        known = sorted(parts("launchers"))
        close = nearest(name, known)
        meant = f"did you mean {close}?" if close else f"write one of {', '.join(known)}"
        raise UsageError(f"--launcher: nothing is called {name!r}; {meant}")
    make = cast(Callable[[], "Launcher | QueueingLauncher"], load("launchers", name))
    with refusing_exit(f"--launcher: {name!r}: constructing it"):
        return make()


def choose_devices(launcher: str, experiment: Experiment, devices: int | None) -> int | None:
    """Return how many ranks the local launcher will start; what was asked for with another one.

    Raises UsageError where this machine can't start so many.
    """
    if launcher != LOCAL:
        return devices
    from hpc_train.launchers.local import choose_num_ranks

    return choose_num_ranks(devices, experiment.device)


def start_attempt(
    paths: RunPaths,
    launcher: str,
    devices: int | None,
    overrides: Sequence[str] = (),
    *,
    after: int = 0,
    prepare: Callable[[int], None] = lambda attempt: None,
) -> ExitCode:
    """Claim the attempt after ``after`` and hand it to the launcher of that name; returns how it ended.

    ``after``: the newest attempt when the caller saw that it had ended; 0: there was none. ``overrides`` are
    noted for the attempt and later ones; ``prepare`` makes other changes to the run. Both happen after the
    claim, so that a command that comes too late changes nothing. Raises TryAgainError there, UntrustedError
    where another user could have written the run's files.
    """
    check_run(paths)
    plugin = load_launcher(launcher)
    assert not isinstance(plugin, QueueingLauncher), "its attempts are claimed where they start"
    number = after + 1
    if not claim_exactly(paths, number, launcher):
        raise TryAgainError(f"{run_name(paths)}: another command has just started it; see `hpc-train status`")
    try:
        prepare(number)
        _note_launcher(paths, launcher)
        paths.cancelled.unlink(missing_ok=True)
        write_status(paths, replace(read_status(paths), state="pending", attempt=number, reason=None))
        if overrides:
            note_change(paths, number, overrides)
        request = LaunchRequest(paths, effective_experiment(paths, number), number, devices)
        with refusing_exit(f"--launcher: {launcher!r}: launch()"):
            code = _launch(plugin, request)
    except BaseException as error:
        _end(paths, number, *_reason(error))
        raise
    if code != ExitCode.DONE:
        is_stopped = code in {ExitCode.INTERRUPTED, ExitCode.TRY_AGAIN}
        state = INTERRUPTED if is_stopped else "failed"
        _end(paths, number, state, f"launcher {launcher}: exit code {int(code)}")
    return code


def _note_launcher(paths: RunPaths, launcher: str) -> None:
    """Write down who has the run from now on, where that was another one: who is asked how it stands."""
    facts = read_json(paths.run)
    if facts is not None and facts.get("launcher") != launcher:
        write_json(paths.run, facts | {"launcher": launcher}, sync=True)


def _launch(launcher: Launcher, request: LaunchRequest) -> ExitCode:
    progress = Progress(request.paths, request.attempt)
    try:
        return launcher.launch(request, poll=progress.update)
    finally:
        progress.close()


def _end(paths: RunPaths, number: int, state: str, reason: str) -> None:
    """Write down how the attempt ended, unless its launcher or its ranks have."""
    with suppress(OSError):  # the disk that broke it, maybe; that is told already
        status = read_status(paths)
        if status.attempt == number and status.state in {"pending", "running"}:
            write_status(paths, replace(status, state=state, reason=one_line(reason)))


def _reason(error: BaseException) -> tuple[str, str]:
    """Return the run's state and reason after an error that its launcher did not handle."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, STOPPED_BY_CTRL_C
    return "failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def report(rows: Sequence[RunRow], *, as_json: bool) -> None:
    """Print one line a run, or JSON, to stdout."""
    if as_json:
        put_json(rows_json(rows))
        return
    names = run_names([row.paths for row in rows])
    for row in rows:
        cells = (names[row.paths], row.state, row.progress, row.path)
        put("  ".join(cell_text(cell) for cell in cells))


def say_end(paths: RunPaths, code: ExitCode) -> None:
    """Say how the run stands, what it reached, where everything is, and how it goes on."""
    row, name = RunRow.of(paths), run_name(paths)
    if code == ExitCode.DONE and row.state in GOING_ON:
        state = "queued" if row.state == "pending" else row.state
        say(f"{name}: {state}; `hpc-train status {name}` shows where it stands")
        say(f"  everything {row.path}")
        return
    record = newest_record(paths)
    has_said_why = record is not None and record.launcher == LOCAL
    reason = f" ({row.reason})" if row.reason and not has_said_why else ""
    say(f"{name}: {row.state}{reason} at step {row.progress}")
    if rows := validation_rows(paths.metrics):
        say(f"  last val   step {rows[-1].get('step')}: {told(rows[-1])}")
        best = _best(rows)
        if best is not None:
            say(f"  best val   step {best.get('step')}: {told(best)}")
    say(f"  everything {row.path}")
    if row.state != "completed":
        for line in next_steps(paths, read_status(paths)):
            say(f"  {line}")


def _best(rows: Sequence[Row]) -> Row | None:
    """Return the row of highest accuracy, or of least loss where there is none; None without either."""
    by_accuracy = [row for row in rows if isinstance(row.get("accuracy"), float)]
    if by_accuracy:
        return max(by_accuracy, key=lambda row: float(row["accuracy"]))
    by_loss = [row for row in rows if isinstance(row.get("loss"), float)]
    return min(by_loss, key=lambda row: float(row["loss"])) if by_loss else None
