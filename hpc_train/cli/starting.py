"""Starting runs and the stages of a file, and how they ended: for ``submit``, ``resume`` and ``search``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from hpc_train.cli.changes import as_override, key_of, swept_values
from hpc_train.cli.run_row import RunRow, best_checkpoint, notes_in_words, rows_json
from hpc_train.console import columns, put, put_json, say
from hpc_train.errors import BadFileError, ExitCode, HpcTrainError
from hpc_train.experiment.config.schema import Experiment, Job
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import DEFAULT, statuses
from hpc_train.paths import ExperimentPaths, RunPaths, from_here
from hpc_train.report.metrics_reader import Row, in_words, main_metric, validation_rows
from hpc_train.report.progress_display import Progress
from hpc_train.run import frozen_experiment, liveness, stage_order
from hpc_train.run.attempts import AttemptRecord, newest_number
from hpc_train.run.best import BestSoFar, goal_of
from hpc_train.run.checkpoints import committed, is_left_over
from hpc_train.run.code.snapshot import folder_in_tree, linked
from hpc_train.run.create import effective_experiment, origin_of, refused_changes
from hpc_train.run.files import read_json, read_text, tail_text
from hpc_train.run.find import run_name, run_names
from hpc_train.run.run_status import CANCELLED, GOING_ON, INTERRUPTED, RunStatus, read_status, run_facts

#: A traceback frame in one of the user's files: in the snapshot, or a program's copy of it.
_OWN_FRAME = (
    r'^ +File "[^"\n]*/(?:(?:\.code/[0-9a-f]+|code)/tree|{run}/work)/'
    r'(?![^"\n]*/(?:site|dist)-packages/)([^"\n]+)", line (\d+)'
)
_ERROR_BYTES = 1 << 16
_LR = "optimization.optimizer.lr"


def start(launcher: Launcher, runs: Sequence[StartRequest]) -> ExitCode:
    """Start the runs of one experiment, within the launcher's ``submitting``; print their status."""
    folder = runs[0].paths.siblings
    code = launcher.start(folder, runs)
    if launcher.is_queue:
        _say_queued([run.paths for run in runs])
    else:
        say_end(runs[0].paths, code)
    return code


@contextmanager
def polling(paths: RunPaths, attempt: int) -> Iterator[Callable[[], None]]:
    """Show the attempt's progress while its launcher follows it."""
    progress = Progress(paths, attempt)
    try:
        yield progress.update
    finally:
        progress.close()


def _say_queued(runs: Sequence[RunPaths]) -> None:
    first = runs[0]
    which, folder = run_name(first), first.folder
    if len(runs) > 1:
        which, folder = first.siblings.folder.name, first.siblings.folder
    say(f"{which}: queued, in {folder}")
    _say_details(
        ("status", f"`hpc-train status {which}`"),
        ("log", f"`hpc-train logs -f {run_name(first)}`"),
        ("log files", f"{from_here(first.attempts)}/<attempt>/rank-<rank>.log"),
    )


def _say_details(*details: tuple[str, str]) -> None:
    say(*columns([(f"  {label}", text) for label, text in details]))


def report(rows: Sequence[RunRow], *, as_json: bool) -> None:
    """Print one line per run, or JSON, to stdout."""
    if as_json:
        put_json(rows_json(rows))
        return
    names = run_names([row.paths for row in rows])
    lines = ((names[row.paths], row.state, row.progress, row.path) for row in rows)
    put(*("  ".join(line) for line in lines))


def say_end(paths: RunPaths, code: ExitCode) -> None:
    """Print the run's status, its results, its folder, and the next command."""
    row, name = RunRow.of(paths), run_name(paths)
    if code == ExitCode.DONE and row.state in GOING_ON:
        say(f"{name}: {'queued' if row.state == 'pending' else row.state}")
        _say_details(("run folder", from_here(paths.folder)), ("status", f"`hpc-train status {name}`"))
        return
    record = liveness.newest_record(paths)
    has_said_why = record is not None and record.launcher == LOCAL
    reason = f" ({row.reason})" if row.reason and not has_said_why else ""
    say(f"{name}: {row.state}{reason} at step {row.progress}")
    details = [*_results(paths, validation_rows(paths.metrics)), ("run folder", from_here(paths.folder))]
    if paths.metrics.exists():
        details.append(("metrics", from_here(paths.metrics)))
    details += [*notes_in_words(paths), *_profile(paths)]
    steps = next_steps(paths, read_status(paths))
    _say_details(*details, *zip(("next", *[""] * len(steps)), steps, strict=False))


def _profile(paths: RunPaths) -> list[tuple[str, str]]:
    attempts = paths.attempt_folders()
    table = attempts[-1].profile_table if attempts else None
    if table is None or not table.is_file():
        return []
    limits = [line for line in read_text(table).splitlines() if line.startswith("limited by: ")]
    return [("profile", from_here(table)), *(("", line) for line in limits[:1])]


def _results(paths: RunPaths, rows: Sequence[Row]) -> list[tuple[str, str]]:
    if not rows:
        return []
    last, best = rows[-1], _best(paths, rows)
    results = [("last val", f"step {last.get('step')}: {in_words(last)}")]
    if best is last:
        return [("last val", f"{results[0][1]} (the best)")]
    return results if best is None else [*results, ("best val", f"step {best.get('step')}: {in_words(best)}")]


def _best(paths: RunPaths, rows: Sequence[Row]) -> Row | None:
    """Return the best row by the metric of ``checkpoint.best`` or else ``early_stopping``, or without both by
    the one that evaluates the newest row; None without any.
    """
    main = main_metric(rows[-1])
    for best in (*_chosen(paths), *([BestSoFar(main, goal_of(main))] if main else [])):
        best_row = None
        for row in rows:
            if best.metric in row and best.add(row.get("step", 0), row[best.metric]):
                best_row = row
        if best_row is not None:
            return best_row
    return None


def _chosen(paths: RunPaths) -> list[BestSoFar]:
    """Return the metric by which the run itself selects its best evaluation, if it does."""
    try:
        experiment = effective_experiment(paths, newest_number(paths))
    except BadFileError:
        return []
    chosen = experiment.checkpoint.best or experiment.early_stopping
    return [] if chosen is None else [BestSoFar(chosen.metric, chosen.mode)]


def finish_submissions(launcher: Launcher, folder: ExperimentPaths) -> None:
    """Finish the incomplete submission of a command that died: such runs count as running."""
    if launcher.is_queue and folder.folder.is_dir():
        with launcher.submitting(folder):
            pass


def starts_again(paths: RunPaths, status: RunStatus) -> bool:
    """Return True if a submit starts the run again: it failed or was interrupted before it saved anything.

    This loses nothing, and the run uses the current code and file: it can't fail again because of an error
    that has been fixed. A cancelled run is only started by ``resume``.
    """
    return status.state in {"failed", INTERRUPTED} and not has_saved(paths) and not paths.work.is_dir()


def next_steps(paths: RunPaths, status: RunStatus, changes: Sequence[str] = ()) -> list[str]:
    """Return the options for a run that has ended with ``status``, one per line; none for a completed run
    that has saved nothing.

    ``changes``: ``KEY=VALUE`` to resume with, for changes of the experiment file since.
    """
    if status.state == "completed":
        export = _weights_command(paths)
        best = best_checkpoint(paths)
        weights = f"the weights of its best checkpoint ({best})" if best else "its weights"
        return [f"`{shlex.join(export)}` writes {weights}"] if export and has_saved(paths) else []
    resume = shlex.join(["hpc-train", "resume", run_name(paths), *changes])
    continues = f"`{resume}` {_continues(paths)}"
    if status.state != "failed":
        return [continues]
    record = liveness.newest_record(paths)
    if record is not None and record.cause == "diverged":
        return _after_divergence(paths)
    if refused := refused_changes(paths):
        return [f"`{resume}` omits {' '.join(refused)} and {_continues(paths)}"]
    if _all_damaged(paths):
        return [f"no checkpoint is intact: `{new_run_command(paths, [])} --new` starts again at step 0"]
    if not has_saved(paths) and not paths.work.is_dir():
        return ["fix the cause and submit the file again: the run then uses the current code and file"]
    is_crash = record is None or record.cause in {None, "crash"}
    if is_crash and (place := own_code_place(paths)):
        return [f"the error is in your code, {place}: fix it, then `{resume} --code new` {_continues(paths)}"]
    if record is not None and record.cause == "user error":
        return [f"fix what the message names, then {continues}"]
    return [continues]


def _weights_command(paths: RunPaths) -> Sequence[str]:
    try:
        job = effective_experiment(paths, newest_number(paths))
    except BadFileError:  # its file is damaged
        return ()
    return workload_of(job).weights_command(run_name(paths))


def has_saved(paths: RunPaths) -> bool:
    """Return True if the run has a checkpoint, intact or damaged, that starting again would lose."""
    return any(not is_left_over(path) for path in paths.checkpoints.glob("step-*"))


def _all_damaged(paths: RunPaths) -> bool:
    """Return True if the run has checkpoints, none of which a resume would load."""
    try:
        return has_saved(paths) and not committed(paths)
    except (BadFileError, OSError):
        return False


def own_code_place(paths: RunPaths) -> str | None:
    """Return ``file:line`` of the innermost frame in the user's files, from the folder of ``submit``."""
    attempt = paths.attempt(newest_number(paths))
    pattern = re.compile(_OWN_FRAME.format(run=re.escape(paths.folder.name)), re.MULTILINE)
    for error in attempt.files_of_ranks(".error").values():
        if frames := pattern.findall(tail_text(error, _ERROR_BYTES)):
            file, line = frames[-1]
            with suppress(HpcTrainError):  # the snapshot is gone
                if (code := linked(paths)) is not None:
                    file = file.removeprefix(f"{folder_in_tree(code)}/")
            return f"{file}:{line}"
    return None


def new_run_command(paths: RunPaths, changes: Sequence[str]) -> str:
    """Return the ``submit`` command of a run like this one, with other values of some keys."""
    origin = origin_of(paths)
    file = Path(origin.file if origin else paths.experiment)
    overrides = [
        word for word in (origin.overrides if origin else []) if key_of(word).split(".")[0] != "sweep"
    ]
    swept = _swept(paths) if origin else []
    latest = {key_of(word): word for word in [*overrides, *swept, *changes]}
    return shlex.join(["hpc-train", "submit", from_here(file), *latest.values(), *_launcher_options(paths)])


def other_run(paths: RunPaths, head: str, overrides: Sequence[str]) -> str:
    """Return ``head`` and the commands that train with keys that a resume can't change: as a separate run."""
    lines = [f"{head}:", f"  from step 0: `{new_run_command(paths, overrides)}`"]
    if has_saved(paths):
        command = new_run_command(paths, [*overrides, f"model.init_from={run_name(paths)}"])
        lines.append(f"  from its weights: `{command}`")
    return "\n".join(lines)


def _swept(paths: RunPaths) -> list[str]:
    """Return the values that a sweep gave the run, and the argument that disables the sweep."""
    try:
        data = frozen_experiment.read(paths).model_dump(mode="json")
    except BadFileError:
        return []
    values = [as_override(key, value) for key, value in swept_values(paths, data).items()]
    return ["sweep={}", *values] if values else []


def _launcher_options(paths: RunPaths) -> list[str]:
    launcher = str((read_json(paths.run) or {}).get("launcher") or LOCAL)
    if launcher == DEFAULT:
        return []
    record: AttemptRecord | None = liveness.newest_record(paths)
    devices = [] if record is None or record.devices is None else ["--devices", str(record.devices)]
    return ["--local", *devices] if launcher == LOCAL else ["--launcher", launcher]


def next_attempt_words(paths: RunPaths, overrides: Sequence[str]) -> str:
    """Return the next action of a resume: attempt, starting step and changes."""
    changed = f", from now on with {' '.join(overrides)}" if overrides else ""
    return f"attempt {newest_number(paths) + 1} {_continues(paths)}{changed}"


def _continues(paths: RunPaths) -> str:
    """Return the start of the run's next attempt, as the end of a sentence."""
    try:
        saved = committed(paths)
    except (BadFileError, OSError):
        return "continues it"
    if saved:
        return f"continues from step {saved[0].step}"
    if paths.work.is_dir():  # a program's own checkpoint, if it has one
        return "continues it"
    return "finds no intact checkpoint" if has_saved(paths) else "starts at step 0, as nothing was saved"


def _after_divergence(paths: RunPaths) -> list[str]:
    """The run is deterministic, so resuming it unchanged produces the same NaN."""
    steps = ["resuming it unchanged would diverge again; start a changed run, for example with"]
    try:
        experiment: Job = effective_experiment(paths, newest_number(paths) + 1)
    except BadFileError:
        return steps[:1]
    if not isinstance(experiment, Experiment):
        return steps[:1]
    optimization = experiment.optimization
    lower = as_override(_LR, optimization.optimizer.lr / 2)
    steps.append(f"  half the learning rate: `{new_run_command(paths, [lower])}`")
    if optimization.clip_grad_norm is None:
        clip = new_run_command(paths, ["optimization.clip_grad_norm=1.0"])
        steps.append(f"  clipped gradients: `{clip}`")
    if optimization.on_non_finite == "stop":
        skip = new_run_command(paths, ["optimization.on_non_finite=skip"])
        steps.append(f"  such steps skipped: `{skip}`")
    return steps


class Submission(Protocol):
    """The submission of one stage."""

    #: Whether later stages may load the weights of its run.
    has_weights: bool

    def create(self) -> RunPaths:
        """Create the run, unless it exists."""

    def start_all(self) -> tuple[ExitCode, list[RunPaths]]:
        """Create the run, if it does not exist, and start it."""


def start_stages(
    launcher: Launcher, count: int, submission: Callable[[int, str | None, str | None], Submission]
) -> tuple[ExitCode, list[RunPaths]]:
    """Start the stages: in a queue each waits for the former one, elsewhere each is followed to its end.

    Elsewhere all runs are created before the first one starts. Stops at a stage that does not complete.
    ``submission``: of the stage of this index, with its ``Stage.after`` and ``weights``. Return the worst
    exit code, and the runs.
    """
    runs: list[RunPaths] = []
    codes = [ExitCode.DONE]
    after = weights = None
    created: list[Submission] = []
    for index in range(count):
        created.append(submission(index, after, weights))
        if launcher.is_queue:
            say(f"stage {index + 1} of {count}:")
            code, (paths,) = created[-1].start_all()
            codes.append(code)
        else:
            paths = created[-1].create()
        runs.append(paths)
        after = f"{paths.siblings.folder.name}/{paths.folder.name}"
        weights = after if created[-1].has_weights else weights
        if launcher.is_queue and not _leads_on(paths, is_queue=True, left=count - index - 1):
            return max(codes), runs
    if launcher.is_queue:
        return max(codes), runs
    for index, paths in enumerate(runs):
        say(f"stage {index + 1} of {count}: {run_name(paths)}")
        if read_status(paths).state != CANCELLED or stage_order.has_begun(paths):
            codes.append(created[index].start_all()[0])
        if not _leads_on(paths, is_queue=False, left=count - index - 1):
            break
    return max(codes), runs


def _leads_on(paths: RunPaths, *, is_queue: bool, left: int) -> bool:
    """Return True if the next stage may be submitted; else print how the ``left`` later ones continue."""
    (status,) = statuses([paths])
    if status.state == "completed" or (is_queue and status.state in GOING_ON):
        return True
    if left:
        name = run_name(paths)
        say(f"{name}: {status.state}; `hpc-train resume {name}` lets the {left} later stages follow")
    return False


def is_created_only(paths: RunPaths, launcher: Launcher, name: str) -> bool:
    """Return True for a stage that a command has created for the launcher of this name, and not started."""
    facts = run_facts(paths)
    is_of_launcher = not launcher.is_queue and facts.get("launcher") == name
    return is_of_launcher and bool(facts.get("stage")) and not stage_order.has_begun(paths)


def say_waiting(paths: RunPaths, resumed: Sequence[RunPaths]) -> ExitCode:
    """Print why a stage is not resumed by itself, unless a run that is ``resumed`` lets it follow."""
    if any(paths in stage_order.later(run) for run in resumed):
        return ExitCode.DONE
    before = stage_order.former(paths)
    assert before is not None
    say(f"{run_name(paths)}: {stage_order.waiting_words(paths)}; nothing started")
    return ExitCode.DONE if read_status(before).state in GOING_ON else ExitCode.FAILED
