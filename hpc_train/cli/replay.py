"""``replay``: repeats steps of a run on this machine and shows their batches, losses and gradients."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hpc_train.cli.changes import runs_and_overrides
from hpc_train.cli.code import is_new
from hpc_train.cli.evaluate import experiment_of, one_run, ranks_folder
from hpc_train.cli.replay_options import ReplayOptions
from hpc_train.cli.replayed_run import ReplayedRun, TrainedSteps, prepared, replayed_lines, thread_variables
from hpc_train.console import put, put_json, say
from hpc_train.errors import ExitCode, UsageError, counted
from hpc_train.experiment.config.fields import MAX_MINUTES
from hpc_train.experiment.config.schema import Experiment
from hpc_train.launchers.base import LaunchRequest
from hpc_train.launchers.local import LocalLauncher
from hpc_train.launchers.rank_processes import default_command
from hpc_train.paths import RunPaths
from hpc_train.rank.env import count_gpus
from hpc_train.report import parted_steps, replayed_steps
from hpc_train.report.parted_steps import step_numbers
from hpc_train.report.replayed_steps import MicroBatch, NonFinite, Range, Replayed, ReplayedStep
from hpc_train.run.code.snapshot import linked
from hpc_train.run.files import write_json
from hpc_train.run.find import refuse_target, run_name
from hpc_train.run.metric_rows import finite
from hpc_train.run.rollbacks import read_rollbacks
from hpc_train.run.run_status import read_status
from hpc_train.run.trust import check_run

#: Sections that may change. All others determine which samples a step reads, or the model.
_CHANGEABLE = (
    "data",
    "parallel",
    "device",
    "deterministic",
    "precision",
    "compile",
    "activation_checkpointing",
    "optimization",
)
#: Keys of them that determine which samples a step reads.
_FIXED = ("optimization.global_batch_size", "data.augment.repeats")
#: The digest of a step's samples depends on this key; the samples themselves do not.
_MICRO_BATCH = "optimization.micro_batch_size="
_NUMBERS = ["samples", "loss", "grad_norm"]


@dataclass(frozen=True)
class Stretch:
    """The steps of a run to repeat.

    ``ranks_of_run``: the number of ranks that trained the last of them. ``earlier_ranks``: those that trained
    the steps before, if a resume changed the ranks. ``rolled_back``: repeat the last step with the data that
    the run has skipped since.
    """

    run: RunPaths
    begin: int
    first: int
    last: int
    ranks_of_run: int | None
    earlier_ranks: Sequence[int | None] = ()
    rolled_back: bool = False


@dataclass(frozen=True)
class Extras:
    """The results of a replay besides the numbers of its steps; paths are those of files to write."""

    save_batch: Path | None = None
    save_samples: Path | None = None
    profile: Path | None = None
    activations: bool = False
    debugger: bool = False

    @classmethod
    def of(cls, options: ReplayOptions) -> Extras:
        """Return the options' values. Raises UsageError or StorageError for a path that can't be written."""
        _refuse_output("--save-batch", options.save_batch, ".safetensors")
        _refuse_output("--save-samples", options.save_samples)
        _refuse_output("--profile", options.profile, ".json.gz")
        return cls(**{name: getattr(options, name) for name in vars(NO_EXTRAS)})

    def request(self) -> dict[str, bool]:
        """Return their keys of ``replay.json``."""
        return {name: bool(value) for name, value in vars(self).items()}

    def move(self, run: RunPaths) -> None:
        """Move the files that the ranks of ``run`` have written."""
        targets = {
            run.replayed_batch(0): self.save_batch,
            run.replayed_samples: self.save_samples,
            run.attempt(1).profile_trace: self.profile,
        }
        for source, target in targets.items():
            if target is not None and source.exists():
                shutil.move(source, target.absolute())
        if self.save_samples is not None and not self.save_samples.exists():
            say("--save-samples: the inputs are neither images nor tokens; --save-batch FILE writes them")


#: Only the numbers.
NO_EXTRAS = Extras()


def replay(options: ReplayOptions) -> ExitCode:
    """Repeat the steps and print them; exit code 1 if a step differs on as many ranks as the run had.

    Writes nothing into the run's folder.
    """
    run_words, overrides = runs_and_overrides(options.runs_and_overrides)
    paths = one_run("replay", run_words)
    _refuse_fixed([*overrides, *options.changes])
    extras = Extras.of(options)
    check_run(paths)
    run = ReplayedRun(paths, run_name(paths), is_new(options.code))
    stretch, attempt = _stretch(run, options.step, options.to or options.step)
    variables = thread_variables(run.machine(stretch.begin))
    snapshot = None if run.uses_new_code else linked(paths)
    variants = [[]] if not options.changes else [[], options.changes]
    experiments = [prepared(experiment_of(paths, attempt, [*overrides, *changes])) for changes in variants]
    num_ranks = options.devices or number_of_ranks(experiments[0], stretch)
    if extras.activations:
        _refuse_compiled(experiments)
    if extras.debugger:
        _refuse_debugger(options, num_ranks)
        experiments = [_without_hang_limit(experiment) for experiment in experiments]
    report_begin(stretch, num_ranks)
    replays: list[Replayed] = []
    for changes, experiment in zip(variants, experiments, strict=True):
        once = Extras(activations=extras.activations) if changes else extras
        lines = run_stretch(stretch, experiment, snapshot, num_ranks, once, variables=variables)
        if lines is None:
            return ExitCode.FAILED
        has_other_batches = any(change.startswith(_MICRO_BATCH) for change in [*overrides, *changes])
        replays.append(_replayed(changes, lines, _NUMBERS[1:] if has_other_batches else _NUMBERS))
    answer = replayed_steps.Replay(
        id=paths.folder.name,
        path=str(paths.folder),
        checkpoint=stretch.begin,
        ranks=num_ranks,
        ranks_of_run=stretch.ranks_of_run,
        replays=replays,
    )
    if options.as_json:
        put_json(answer)
    else:
        put(*replayed_steps.replay_text(answer))
    first = replays[0]
    differs = first["first_difference"] is not None or any(step["differs"] for step in first["steps"])
    is_bitwise = num_ranks == stretch.ranks_of_run and not stretch.earlier_ranks and not overrides
    return ExitCode.FAILED if is_bitwise and differs else ExitCode.DONE


def _refuse_fixed(overrides: Sequence[str]) -> None:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise UsageError(f"--set: {override} has no value; write KEY=VALUE")
        if key.partition(".")[0] not in _CHANGEABLE or key in _FIXED:
            raise UsageError(
                f"{key}: can't be changed in a replay, since the step would have other samples or another "
                f"model; other keys of {', '.join(_CHANGEABLE)} can"
            )


def _refuse_output(option: str, output: Path | None, suffix: str = "") -> None:
    if output is None:
        return
    if not output.name.endswith(suffix):
        raise UsageError(f"{option}: {output} must end in {suffix}")
    if output.exists():
        raise UsageError(f"{option}: {output} exists; give another name")
    refuse_target(output)


def _refuse_compiled(experiments: Sequence[Experiment]) -> None:
    if any(experiment.compile.enabled for experiment in experiments):
        raise UsageError(
            "--activations: a compiled model does not call its modules one by one; add compile=false, which "
            "replays without compilation"
        )


def _refuse_debugger(options: ReplayOptions, num_ranks: int) -> None:
    if num_ranks > 1:
        raise UsageError(
            f"--debugger: stops one rank, and this replay has {num_ranks}, which would wait for it; add "
            "--devices 1"
        )
    if options.changes:
        raise UsageError("--debugger: can't be combined with --set; write KEY=VALUE to debug a changed step")
    if options.as_json:
        raise UsageError("--debugger: can't be combined with --json, since pdb writes to stdout")


def _without_hang_limit(experiment: Experiment) -> Experiment:
    """Return the experiment with the longest limit: a rank that waits in the debugger does not hang."""
    recovery = experiment.recovery.model_copy(update={"hang_after_min": MAX_MINUTES})
    return experiment.model_copy(update={"recovery": recovery})


def _stretch(run: ReplayedRun, first: int, last: int) -> tuple[Stretch, int]:
    """Return the steps, from the newest checkpoint before ``first``, and the attempt that trained the last.

    Raises UsageError if there are none.
    """
    if last < first:
        raise UsageError(f"--to: {last} is before --step {first}; write {first} or a later step")
    total = read_status(run.paths).total_steps
    if total is not None and last > total:
        key = "--step" if first > total else "--to"
        raise UsageError(f"{key}: {max(first, last)} is past the last step of the run, {total}")
    begin = max((step for step in run.checkpoints if step < first), default=0)
    trained = run.trained(begin, last)
    rolled_back = any(rollback.step == last for rollback in read_rollbacks(run.paths))
    return replace(stretch_of(run, trained, first), rolled_back=rolled_back), trained[-1].attempt


def stretch_of(run: ReplayedRun, trained: Sequence[TrainedSteps], first: int) -> Stretch:
    """Return the stretch of these steps, of which those from ``first`` on are reported."""
    ranks = [part.ranks for part in trained]
    return Stretch(run.paths, trained[0].begin, first, trained[-1].last, ranks[-1], ranks[:-1])


def number_of_ranks(experiment: Experiment, stretch: Stretch) -> int:
    """Return the run's number of ranks, or the number of devices if that is lower."""
    num_gpus = 0 if experiment.device == "cpu" else count_gpus(os.environ)
    return min(stretch.ranks_of_run or 1, num_gpus or os.cpu_count() or 1)


def report_begin(stretch: Stretch, num_ranks: int) -> None:
    """Print the steps that are repeated, and how many ranks repeat them."""
    start = f"checkpoint {stretch.begin}" if stretch.begin else "the start"
    steps = counted(stretch.last - stretch.begin, "step")
    say(f"replay: {steps} from {start} of {run_name(stretch.run)}, on {counted(num_ranks, 'rank')}")
    if stretch.rolled_back:
        say(
            f"replay: the run rolled step {stretch.last} back; it is repeated with the data that the run has "
            f"skipped since, and with --to {stretch.last + 1} with those that it read instead"
        )
    if stretch.earlier_ranks:
        ranks = ", then ".join(str(ranks or "?") for ranks in (*stretch.earlier_ranks, stretch.ranks_of_run))
        say(
            f"replay: the run trained these steps on {ranks} ranks, so numbers are equal up to rounding, not "
            "bitwise"
        )
    elif stretch.ranks_of_run not in (num_ranks, None):
        say(
            f"replay: the run had {counted(stretch.ranks_of_run or 0, 'rank')}, so numbers are equal up to "
            f"rounding, not bitwise; --devices {stretch.ranks_of_run} starts as many"
        )


def run_stretch(
    stretch: Stretch,
    experiment: Experiment,
    snapshot: Path | None,
    num_ranks: int,
    extras: Extras = NO_EXTRAS,
    digests: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> list[list[dict[str, Any]]] | None:
    """Start the ranks and return the lines of each; None if they failed, which leaves their folder.

    ``digests``: ``trace`` and ``states`` of ``replay.json``. ``variables``: of the ranks' environment.
    ``python``: their interpreter; None: this one.
    """
    request: dict[str, Any] = {"begin": stretch.begin, "first": stretch.first, "last": stretch.last}
    if stretch.rolled_back:
        request["rolled_back"] = stretch.last
    run = replay_folder(stretch.run, experiment, snapshot, {**request, **extras.request(), **(digests or {})})
    launcher = LocalLauncher(
        None if python is None else [str(python), *default_command(run)[1:]],
        variables or {},
        has_terminal=extras.debugger,
    )
    if not replay_on_ranks(run, experiment, num_ranks, launcher):
        return None
    extras.move(run)
    lines = [replayed_lines(run.replay(rank)) for rank in range(num_ranks)]
    shutil.rmtree(run.folder.parent)
    return lines


def replay_folder(
    replayed: RunPaths, experiment: Experiment, snapshot: Path | None, request: Mapping[str, Any]
) -> RunPaths:
    """Create a temporary folder whose ranks repeat steps of ``replayed``. ``request``: of ``replay.json``."""
    run = ranks_folder("replay", replayed, experiment, snapshot)
    write_json(run.replayed_steps, {"version": 1, "run": str(replayed.folder.absolute()), **request})
    return run


def replay_on_ranks(
    run: RunPaths,
    experiment: Experiment,
    num_ranks: int,
    launcher: LocalLauncher,
    poll: Callable[[], None] = lambda: None,
) -> bool:
    """Start the ranks of such a folder and wait for their end; return False, and print it, if they failed."""
    ended = launcher.launch(LaunchRequest(run, experiment, 1, num_ranks), poll)
    if ended != ExitCode.DONE:
        say(f"replay: failed; the logs of its ranks are in {run.attempt(1).folder}")
    return ended == ExitCode.DONE


def _replayed(changes: list[str], lines: list[list[dict[str, Any]]], names: Sequence[str]) -> Replayed:
    """Merge the lines of the ranks, one per step; compare the numbers ``names``."""
    earlier: list[list[str]] = []
    first_difference: int | None = None
    steps = []
    for of_ranks in zip(*lines, strict=True):
        head = of_ranks[0]
        computed, recorded = parted_steps.step_digest(head), parted_steps.step_digest(head, "recorded")
        compared: list[str] = []
        differs = None
        if computed is not None and recorded is not None:
            compared = [name for name in names if None not in (head["digest"][name], head["recorded"][name])]
            differs = [name for name in recorded.differences(computed) if name in compared]
        if "micro_batches" in head:
            steps.append(_step(of_ranks, differs, compared))
        elif differs is not None:
            earlier.append(differs)
            if differs and first_difference is None:
                first_difference = head["step"]
    return Replayed(changes=changes, compared=len(earlier), first_difference=first_difference, steps=steps)


def _step(of_ranks: Sequence[dict[str, Any]], differs: list[str] | None, compared: list[str]) -> ReplayedStep:
    head = of_ranks[0]
    computed, recorded = (parted_steps.step_digest(head, key) for key in ("digest", "recorded"))
    assert computed is not None, "a replay has the loss of each step"
    squares: dict[str, float] = {}
    for line in of_ranks:
        for module, square in line["squares"].items():
            squares[module] = squares.get(module, 0.0) + square
    return ReplayedStep(
        step=head["step"],
        recorded=None
        if recorded is None
        else {**step_numbers(recorded), "attempt": head["recorded"]["attempt"]},
        differs=differs,
        compared=compared,
        learning_rate=head["learning_rate"],
        micro_batches=[
            finite({key: batch.get(key, []) for key in MicroBatch.__annotations__})
            for _, (_, batch) in sorted(parted_steps.micro_batches(of_ranks).items())
        ],
        grad_norms={
            module: finite(math.sqrt(square) if square >= 0 else square) for module, square in squares.items()
        },
        activations=_ranges([line.get("ranges", {}) for line in of_ranks]),
        non_finite=_first([line["non_finite"] for line in of_ranks]),
        **step_numbers(computed),
    )


def _ranges(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Range]:
    """Merge the ranks' minimum, maximum, sum of absolute values and number of each module's outputs."""
    by_module: dict[str, list[Sequence[float]]] = {}
    for ranges in of_ranks:
        for module, values in ranges.items():
            by_module.setdefault(module, []).append(values)
    merged = {}
    for module, parts in by_module.items():
        lows, highs, sums, counts = zip(*parts, strict=True)
        bounds = (min(lows), max(highs)) if math.isfinite(sum((*lows, *highs))) else (math.nan, math.nan)
        merged[module] = Range(
            minimum=finite(bounds[0]), maximum=finite(bounds[1]), mean_abs=finite(sum(sums) / sum(counts))
        )
    return merged


def _first(places: Iterable[dict[str, Any] | None]) -> NonFinite | None:
    """Return the first NaN or infinity: of the lowest micro-batch's forward, else of a backward."""
    non_finite = [place for place in places if place is not None]
    if not non_finite:
        return None
    place = min(non_finite, key=lambda place: (place["micro_batch"] is None, place["micro_batch"] or 0))
    keys = {key: key for key in NonFinite.__annotations__} | {"type": "class"}
    return cast("NonFinite", {key: place.get(recorded_as) for key, recorded_as in keys.items()})
