"""``plan``, and printing of a plan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

from hpc_train.cli import plan_cost, preflight
from hpc_train.cli.command_options import PlanOptions
from hpc_train.cli.preflight import LauncherChoice, Preflight, missing_packs, say_remarks, with_found_sizes
from hpc_train.cli.search import next_trials
from hpc_train.console import columns, put, put_json, say
from hpc_train.errors import ExitCode
from hpc_train.experiment.plan.devices import Device, device_here
from hpc_train.experiment.plan.planning import Plan, PlannedRun
from hpc_train.experiment.plan.prediction import PARTS, StepPrediction, predict
from hpc_train.experiment.plan.staged_file import described, load_stages
from hpc_train.experiment.plan.sweep import describe
from hpc_train.experiment.topology.strategy_traits import traits_of
from hpc_train.experiment.validate.child_process import one_child
from hpc_train.experiment.validate.loading import Loaded, load
from hpc_train.experiment.workload import workload_of
from hpc_train.launchers.base import KnowsDevices, Launcher

#: Bubble above which ``plan`` prints a remedy.
_LARGE_BUBBLE = 0.2  # assumed
_HEADS = (
    "run", "ranks", "micro-batches", "accumulation", "precision", "steps per epoch", "steps", "GPU-hours",
)  # fmt: skip
_LEGEND = (
    "micro-batches: forward passes per optimizer step, of all ranks; accumulation: those of one rank; "
    "GPU-hours: GPUs × time limit"
)
#: Set to 1: ``plan`` predicts nothing without ``--memory``.
NO_MEMORY = "HPC_TRAIN_NO_MEMORY"
_NOT_ASKED = "not predicted"
_MEMORY_HEADS = (
    "run", "micro-batch", "peak GB", *PARTS, "fits", "largest micro-batch", "TFLOPs per step", "sent GB",
)  # fmt: skip
_MEMORY_LEGEND = (
    "peak GB: parameters to buffers together, on the rank that needs the most; largest micro-batch: that "
    "fits; TFLOPs: of all ranks; sent GB: by a rank per step"
)
#: GB below which a number is not shown.
_SHOWN = 0.001


class PlannedRunJson(TypedDict):
    """One run that a file plans; a number is null if it is not known before the start."""

    id: str
    #: The swept keys and their values.
    values: dict[str, Any]
    #: Of a range of nodes the maximum.
    ranks: int | None
    #: ``pipeline``, ``replicate``, ``shard`` and ``tensor``.
    degrees: dict[str, int] | None
    #: Of a pipeline: the stages, on all ranks.
    stages: int | None
    schedule: str | None
    #: The fraction of a step in which ranks of a pipeline wait, 0 to 1.
    bubble: float | None
    micro_batches: int | None
    #: Forward passes per rank and step.
    accumulation: int | None
    precision: str
    steps_per_epoch: int | None
    total_steps: int | None
    #: The upper bound given by the time limit; null without one.
    gpu_hours: float | None
    #: Predicted, of one rank; without ``memory`` nothing was predicted.
    peak_memory_gb: float | None
    #: In GB: ``parameters``, ``gradients``, ``optimizer``, ``activations`` and ``buffers``.
    memory: dict[str, float] | None
    #: Why activations are unknown, or that nothing was predicted.
    memory_problem: str | None
    #: An assumption about data that can't be read here.
    memory_assumption: str | None
    #: Null for an unknown device.
    device_memory_gb: float | None
    fits: bool | None
    largest_micro_batch_size: int | None
    #: Of all ranks.
    flops_per_step: int | float | None
    #: GB that a rank sends per step: ``all_reduce_gb``, ``all_gather_gb``, ``reduce_scatter_gb``,
    #: ``tensor_gb`` (activations, among ranks that share layers), ``pipeline_gb``; and of their sum
    #: ``within_node_gb`` and ``between_nodes_gb``.
    communication: dict[str, float] | None


class PlanJson(TypedDict):
    """The runs that a file would start."""

    version: int
    #: The experiment's.
    name: str
    runs: list[PlannedRunJson]
    #: The batch script of each job.
    scripts: list[str]
    cost: plan_cost.CostJson
    #: Lines on jobs that would never start, or exceed the budget.
    refused: list[str]
    #: Null if no scheduler was asked.
    jobs: list[preflight.JobForecastJson] | None


class StagesJson(TypedDict):
    """The stages of a file with ``stages``."""

    #: In the order in which they run.
    stages: list[PlanJson]


@dataclass(frozen=True)
class FullPlan:
    """Everything that ``plan`` shows."""

    loaded: Loaded
    plan: Plan
    scripts: Sequence[str]
    #: The lines on problems that prevent a start, except of keys that only another launcher does not need.
    problems: Sequence[str]
    #: Its ``refused`` also has the lines on the budget.
    queue: preflight.QueueForecast
    cost: plan_cost.PlanCost
    memory: list[StepPrediction] | None
    #: A line on each kind of job that several runs share.
    shared_jobs: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``plan --json``."""
        whole = _json_of(self.plan, self.scripts, self.memory)
        return whole | self.queue.to_json() | self.cost.to_json(self.plan)


@one_child()
def plan(options: PlanOptions) -> ExitCode:
    """Show the runs that would be started."""
    stages = load_stages(options.file, options.overrides)
    plans = [make_full_plan(options, loaded) for loaded in stages]
    if options.as_json and len(plans) > 1:
        put_json(StagesJson(stages=[cast("PlanJson", full.to_json()) for full in plans]))
    codes = []
    for full in plans:
        if full.loaded.stage is not None:
            say(f"{described(full.loaded)}:")
        codes.append(_show_full(full, options, is_json=options.as_json and len(plans) == 1))
    return max(codes)


def _show_full(full: FullPlan, options: PlanOptions, *, is_json: bool) -> ExitCode:
    """Print the plan of one experiment; return BAD_FILE if the queue would refuse it."""
    lines = full.problems or full.queue.refused or missing_packs(full.loaded)
    say(*lines)
    if is_json:
        put_json(full.to_json())
    elif not options.as_json:
        scripts = full.scripts if options.script else ()
        show(full.plan, as_json=False, scripts=scripts, more_columns=full.cost.columns())
        if any(run.parallel for run in full.plan.runs):
            say(_LEGEND)
        _show_predictions(full.plan.runs, full.memory)
    say_remarks(full.loaded)
    say(*full.shared_jobs)
    plan_cost.say_cost(full.cost)
    preflight.say_forecast(full.queue, full.plan)
    if not lines:
        say(*workload_of(full.loaded.experiment).notes(full.loaded.experiment))
    return ExitCode.BAD_FILE if full.queue.refused else ExitCode.DONE


def make_full_plan(options: PlanOptions, loaded: Loaded | None = None) -> FullPlan:
    """Plan the runs of the file, or of one of its stages; query the queue, predict cost and memory."""
    loaded = loaded or load(options.file, options.overrides)
    choice = LauncherChoice.of(options, starts=False)
    launcher, search = choice.launcher, next_trials(loaded)
    chooses = options.devices is None  # else they may be missing here
    trials = search.starts if search else None
    planned = with_found_sizes(choice.plan(loaded, options.devices, trials, chooses=chooses))
    cost = plan_cost.cost_of(planned, choice.name, options.throughput)
    queue = preflight.QueueForecast()

    def refused_by_queue() -> list[str]:
        nonlocal queue
        queue = preflight.forecast_queue(launcher, loaded, planned)
        return list(queue.refused)

    checks = Preflight(launcher, on_this_machine=choice.on_this_machine, needs_launcher=options.script)
    checked = checks.of_plan(
        loaded,
        planned,
        budget=lambda: plan_cost.over_budget_lines(loaded, planned, choice.name, cost),
        queue=refused_by_queue,
    )
    queue = replace(queue, refused=checked.refused)
    memory = _predictions(planned, launcher, is_wanted=options.memory, on_this_machine=choice.on_this_machine)
    shared = [] if checked.problems else preflight.shared_jobs(launcher, loaded, planned)
    return FullPlan(loaded, planned, checked.scripts, checked.problems, queue, cost, memory, shared)


def show(
    plan: Plan,
    *,
    as_json: bool,
    scripts: Sequence[str] = (),
    more_columns: Sequence[tuple[str, Sequence[str]]] = (),
) -> None:
    """Print the plan and its batch scripts. ``more_columns``: further heads and cells of the table."""
    if as_json:
        put_json(_json_of(plan, scripts))
        return
    rows = _table(plan.runs, more_columns)
    put(*columns(rows))
    say(*dict.fromkeys(filter(None, map(_hint, plan.runs))))
    for script in scripts:
        put("", *script.rstrip("\n").split("\n"))


def _table(
    runs: Sequence[PlannedRun], more_columns: Sequence[tuple[str, Sequence[str]]] = ()
) -> list[list[str]]:
    rows = [[*_HEADS], *map(_cells, runs)]
    if not any(run.parallel for run in runs):  # programs have no steps that we know
        rows = [[run, ranks, hours] for run, ranks, *_, hours in rows]
    more = list(more_columns)
    if any(run.has_degrees for run in runs):
        more.append(("degrees", ["misfit" if run.degrees is None else str(run.degrees) for run in runs]))
    if any(run.stages for run in runs):
        more += [("stages", [_stages(run) for run in runs]), ("bubble", [_bubble(run) for run in runs])]
    if any(run.values for run in runs):
        more.append(("with", [describe(run.values) for run in runs]))
    columns_to_add = ([head, *cells] for head, cells in more)
    return [[*row, *cells] for row, *cells in zip(rows, *columns_to_add, strict=True)]


def _stages(run: PlannedRun) -> str:
    if run.stages is None or run.parallel is None:
        return "1"
    return f"{run.stages}, {run.schedule or run.parallel.strategy}"


def _bubble(run: PlannedRun) -> str:
    if run.stages is None:
        return "0 %"
    return "unknown" if run.bubble is None else f"{run.bubble:.0%}".replace("%", " %")


def _hint(run: PlannedRun) -> str | None:
    if run.parallel is None or run.bubble is None or run.bubble <= _LARGE_BUBBLE:
        return None
    waits = f"ranks wait {_bubble(run)} of a step"
    strategy = run.parallel.strategy
    if not traits_of(strategy).has_schedule:
        return f"parallel.strategy: under {strategy} {waits}; pipeline keeps several micro-batches going"
    return (
        f"parallel.pipeline: {waits}, which has {run.accumulation} micro-batches per pipeline; "
        "a smaller micro_batch_size or a larger global_batch_size makes more of them"
    )


def _cells(run: PlannedRun) -> list[str]:
    is_auto = run.micro_batches is None
    by_trial = ("auto", "auto") if is_auto else (run.micro_batches, run.accumulation)
    hours = run.size.gpu_hours
    limit = "0" if hours == 0 else hours and f"at most {hours:g}"
    cells = (run.ranks, *by_trial, run.precision, run.steps_per_epoch, run.total_steps, limit)
    return [run.id, *("unknown" if cell is None else str(cell) for cell in cells)]


def say_layouts(runs: Sequence[PlannedRun]) -> None:
    """Print the step layout of the runs, each distinct one once."""
    for layout, number in Counter(str(run.layout) for run in runs if run.layout).items():
        say(f"  {layout}" if number == len(runs) else f"  {number} of {len(runs)} runs: {layout}")


def _predictions(
    plan: Plan, launcher: Launcher, *, is_wanted: bool | None, on_this_machine: bool
) -> list[StepPrediction] | None:
    """Return the prediction of each run's step; None if the user does not want to wait for it."""
    if not any(run.parallel for run in plan.runs):
        return None
    if is_wanted is None:
        is_wanted = os.environ.get(NO_MEMORY) != "1"
    if not is_wanted:
        return None

    def device_of(run: PlannedRun) -> Device:
        device = None
        if isinstance(launcher, KnowsDevices) and not on_this_machine:
            device = launcher.device(run.experiment, run.size)
        return device or device_here(run.experiment.device, run.size.per_node or run.ranks or 1)

    return predict(plan.runs, device_of)


def _json_of(
    plan: Plan, scripts: Sequence[str], steps: Sequence[StepPrediction] | None = None
) -> dict[str, Any]:
    """Return the keys of ``plan --json`` on runs and scripts. ``steps``: the predictions, if any."""
    keys = StepPrediction(Device("", is_gpu=False, memory_bytes=None)).to_json()
    unknown = dict.fromkeys(keys) | {"memory_problem": _NOT_ASKED}
    parts = [unknown] * len(plan.runs) if steps is None else [step.to_json() for step in steps]
    whole = plan.to_json()
    runs = [run | part for run, part in zip(whole["runs"], parts, strict=True)]
    return whole | {"runs": runs, "scripts": list(scripts)}


def _show_predictions(runs: Sequence[PlannedRun], steps: Sequence[StepPrediction] | None) -> None:
    if steps is None:
        return
    put("")
    rows = [_memory_cells(run, step) for run, step in zip(runs, steps, strict=True)]
    put(*columns([[*_MEMORY_HEADS], *rows]))
    say(_MEMORY_LEGEND)
    say(*dict.fromkeys(remark for step in steps for remark in _remarks(step)))


def _memory_cells(run: PlannedRun, step: StepPrediction) -> list[str]:
    peak, memory = step.peak_memory_gb, step.memory or {}
    at_least = "at least " if step.problem else ""
    parts = [_gb(memory.get(part)) for part in PARTS]
    if step.problem:
        parts[PARTS.index("activations")] = "unknown"
    sent = step.communication
    return [
        run.id,
        _or_unknown(step.micro_batch_size),
        "unknown" if peak is None else f"{at_least}{_gb(peak)}",
        *parts,
        {True: "yes", False: "no", None: "unknown"}[step.fits],
        _or_unknown(step.largest_micro_batch_size),
        "unknown" if step.flops_per_step is None else f"{step.flops_per_step / 1e12:.3g}",
        "unknown" if sent is None else f"{_gb(sent.within_node_gb + sent.between_nodes_gb)}",
    ]


def _remarks(step: StepPrediction) -> list[str]:
    device = step.device
    lines = []
    if step.problem:
        lines.append(f"memory: {step.problem}")
    if step.assumption:
        lines.append(f"memory: {step.assumption}")
    if device.memory_bytes is None:
        lines.append(f"memory: whether a step fits is unknown: {device.remedy}")
    elif step.fits is False:
        limit = (device.limit_bytes or 0) / 1e9
        lines.append(
            f"memory: a step may take {limit:.3g} of {device.memory_bytes / 1e9:.3g} GB of {device.name}; "
            'see the page "Out of memory" of the docs'
        )
    return lines


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _gb(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3g}" if value >= _SHOWN or value == 0 else f"<{_SHOWN:g}"
