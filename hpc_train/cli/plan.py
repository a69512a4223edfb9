"""``plan``, and printing of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cli import plan_cost, queue_forecast
from hpc_train.cli.found_sizes import with_found_sizes
from hpc_train.cli.plan_memory import json_of_runs, predictions, show_predictions
from hpc_train.cli.searching import next_trials
from hpc_train.config.training_sections import DataConfig
from hpc_train.console import columns, put, put_json, say
from hpc_train.data_facts.built_in import DATA_SETS
from hpc_train.data_facts.by_name import data_facts, misplaced, missing_index
from hpc_train.errors import BadFileError, ExitCode, UsageError
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.paths import ExperimentPaths, RunPaths, expanded, runs_root
from hpc_train.plan.input_files import LIMIT_S, missing_pack, pack_files
from hpc_train.plan.planning import Plan, PlannedRun, make_plan
from hpc_train.plan.sweep import describe
from hpc_train.run.code.work_tree import work_tree_around
from hpc_train.run.weight_source import KEY, source_facts
from hpc_train.topology.degrees import in_words
from hpc_train.topology.strategy_traits import traits_of
from hpc_train.validate.child_process import one_child
from hpc_train.validate.loading import Loaded, load
from hpc_train.validate.own_parts import missing_parts
from hpc_train.validate.rules import check_start
from hpc_train.validate.task_rules import remarks

#: Bubble above which ``plan`` prints a remedy.
_LARGE_BUBBLE = 0.2  # assumed
_HEADS = (
    "run",
    "ranks",
    "micro-batches",
    "accumulation",
    "precision",
    "steps per epoch",
    "steps",
    "GPU-hours",
)


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """The options of ``plan`` and ``submit`` that select the launcher."""

    local: bool = False
    devices: int | None = None
    launcher: str | None = None

    @property
    def name(self) -> str:
        """The launcher's options."""
        return self.launcher or (LOCAL if self.local else DEFAULT)

    @property
    def on_this_machine(self) -> bool:
        """Whether an option selects this machine: ``--local``, ``--launcher local`` or ``--devices``."""
        return self.local or self.launcher == LOCAL or self.devices is not None

    def load(self) -> Launcher:
        """Return the launcher. Raises UsageError if the options exclude each other."""
        if self.devices is not None and not self.local and self.launcher is None:
            raise UsageError("--devices: is for this machine; add --local")
        launcher = load_launcher(self.name)
        if launcher.is_queue and self.on_this_machine:
            option = "--local" if self.local else "--devices"
            raise UsageError(f"{option}: is for this machine, launcher {self.name} is not; omit one of them")
        return launcher

    def plan(
        self,
        launcher: Launcher,
        loaded: Loaded,
        devices: int | None,
        trials: Sequence[Mapping[str, Any]] | None = None,
    ) -> Plan:
        """Return the plan of the file for this launcher. ``trials``: the values that a search proposes."""
        return make_plan(
            loaded,
            lambda experiment: launcher.ranks(experiment, devices),
            on_this_machine=self.on_this_machine,
            trials=trials,
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LauncherOptions):
    """The options of ``plan``."""

    as_json: bool = False
    script: bool = False
    #: Samples per second of one rank; None: predicted from earlier runs.
    throughput: float | None = None
    #: Whether memory is predicted, which takes seconds; None: the environment decides.
    memory: bool | None = None


@one_child()
def plan(file: Path, overrides: Sequence[str], options: PlanOptions) -> ExitCode:
    """Show the runs that would be started."""
    launcher, loaded = options.load(), load(file, overrides)
    devices = options.devices
    if devices is None:  # explicit devices need not exist here
        devices = launcher.choose_devices(loaded.experiment, None)
    search = next_trials(loaded)
    trials = search.starts if search else None
    made = with_found_sizes(options.plan(launcher, loaded, devices, trials))
    problems = start_problems(loaded, made)
    scripts: list[str] = []
    lacking = launcher_problems(launcher, loaded)
    if not problems and not lacking:
        try:
            scripts = batch_scripts(launcher, loaded, made)
        except BadFileError as error:
            problems += error.problems
    if options.script:
        problems += lacking
    cost = plan_cost.cost_of(made, options.name, options.throughput)
    refused = plan_cost.over_budget_lines(loaded, made, options.name, cost)
    queue = queue_forecast.QueueForecast(refused)
    if not problems and not lacking and not refused:
        queue = queue_forecast.ask(launcher, loaded, made)
    memory = predictions(made, launcher, is_wanted=options.memory, on_this_machine=options.on_this_machine)
    shown = scripts if options.script or options.as_json else ()
    more = queue.to_json() | cost.to_json(made) | {"runs": json_of_runs(made.runs, memory)}
    show(made, as_json=options.as_json, scripts=shown, more=more, more_columns=cost.columns())
    if not options.as_json:
        show_predictions(made.runs, memory)
    lines = problems or [*queue.refused, *_missing_pack(loaded)]
    for line in lines:
        say(line)
    say_remarks(loaded)
    plan_cost.say_cost(cost)
    queue_forecast.say_forecast(queue, made)
    if not lines:
        _say_pack(loaded.experiment.data)
    return ExitCode.BAD_FILE if queue.refused else ExitCode.DONE


def submit_problems(launcher: Launcher, loaded: Loaded, made: Plan) -> list[str]:
    """Return all lines with which ``submit`` would reject the plan, for ``validate``.

    A file without a job's section can be started with ``--local`` on any number of ranks, and reads its
    data here.
    """
    if launcher.problems(loaded.experiment):
        problems = start_problems(loaded, made, ranks_are_known=False)
        return problems + wrong_layout(loaded, is_queued=False) + missing_data(loaded)
    if problems := start_problems(loaded, made) + wrong_layout(loaded, is_queued=launcher.is_queue):
        return problems
    try:
        batch_scripts(launcher, loaded, made)
    except BadFileError as error:
        return error.problems
    return []


def missing_data(loaded: Loaded, remedy: str | None = None) -> list[str]:
    """Return the problem of a data root, or its pack, that is missing here: ranks fail only after imports."""
    data = loaded.experiment.data
    if data.root is not None and not expanded(data.root).exists():
        message = f"{data.root} does not exist on this machine"
        return [loaded.problem("data.root", message, remedy or _root_remedy(data), "data.root-absent")]
    return _missing_pack(loaded)


def wrong_layout(loaded: Loaded, *, is_queued: bool) -> list[str]:
    """Return the line on folders or files that the data root lacks.

    ``is_queued``: an empty folder here may be a mount point that only the nodes mount.
    """
    data = loaded.experiment.data
    try:
        is_here = data.root is not None and expanded(data.root).exists()
        if not is_here or (is_queued and _is_empty_folder(expanded(str(data.root)))):
            return []
        problem = misplaced(data)
    except OSError:  # the ranks may be able to read it
        return []
    return [] if problem is None else [loaded.source.render(problem)]


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _root_remedy(data: DataConfig) -> str:
    """Return the remedy for a ``data.root`` that is missing here."""
    facts, write = data_facts(data.name), "write the folder of the data"
    if facts.is_downloaded:
        return f"{write}, or fetch them with `hpc-train prepare FILE`"
    is_useless = data.name in DATA_SETS and not facts.needs_root
    return f"take it out; {data.name} needs none" if is_useless else write


def _missing_pack(loaded: Loaded) -> list[str]:
    """Return the line that reports that the pack, or the index, that ranks need is missing here."""
    data = loaded.experiment.data
    if (problem := missing_index(data)) is not None:
        return [loaded.source.render(problem)]
    if data.cache is None:
        return []
    try:
        files = _pack_files(data)
    except BadFileError as error:
        return error.problems
    if files is None or any(file.is_file() for file in files):
        return []
    return [loaded.problem("data.cache", *missing_pack(data), "data.pack-absent")]


def _pack_files(data: DataConfig) -> list[Path] | None:
    """Return the possible packs; None if images are not packed, or take too long to list before a start."""
    if not data_facts(data.name).is_packable:
        return None
    try:
        return pack_files(data, LIMIT_S)
    except OSError:
        return None


def _say_pack(data: DataConfig) -> None:
    """Print the path of the packed file that the ranks read."""
    if data.cache is None:
        return
    pack = next((file for file in _pack_files(data) or () if file.is_file()), None)
    if pack is not None:
        place = "its temporary folder" if data.stage is True else data.stage
        staged = f"; each node copies it to {place} first" if data.stage else ""
        say(f"data.cache: ranks read {pack} ({pack.stat().st_size} bytes){staged}")


def launcher_problems(launcher: Launcher, loaded: Loaded) -> list[str]:
    """Return the problems with keys that the launcher needs and the file lacks."""
    return [loaded.problem(*problem) for problem in launcher.problems(loaded.experiment)]


def batch_scripts(launcher: Launcher, loaded: Loaded, made: Plan) -> list[str]:
    """Return the scripts of all runs of the plan. Raises BadFileError if none can be made."""
    folder = ExperimentPaths(runs_root() / made.name)
    requests = [
        StartRequest(RunPaths(folder.folder / run.id), run.experiment, loaded.problem) for run in made.runs
    ]
    return launcher.scripts(folder, requests)


def show(
    made: Plan,
    *,
    as_json: bool,
    scripts: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    more_columns: Sequence[tuple[str, Sequence[str]]] = (),
) -> None:
    """Print the plan, and the batch scripts of its runs, to stdout.

    ``more``: further keys of the JSON. ``more_columns``: further heads and cells of the table.
    """
    if as_json:
        runs = {"runs": json_of_runs(made.runs, None)}
        put_json(made.to_json() | runs | {"scripts": list(scripts), **(more or {})})
        return
    for line in columns(_table(made.runs, more_columns)):
        put(line)
    for hint in dict.fromkeys(map(_hint, made.runs)):
        if hint:
            say(hint)
    for script in scripts:
        put("")
        put(script.rstrip("\n"))


def _table(
    runs: Sequence[PlannedRun], more_columns: Sequence[tuple[str, Sequence[str]]] = ()
) -> list[list[str]]:
    """Return heads and cells; columns without information are omitted."""
    rows = [[*_HEADS], *map(_cells, runs)]
    for head, cells in more_columns:
        _append(rows, head, cells)
    if any(len(traits_of(run.experiment.parallel.strategy).degrees) > 1 for run in runs):
        _append(rows, "degrees", ["misfit" if run.degrees is None else in_words(run.degrees) for run in runs])
    if any(run.stages for run in runs):
        _append(rows, "stages", [_stages(run) for run in runs])
        _append(rows, "bubble", [_bubble(run) for run in runs])
    if any(run.values for run in runs):
        _append(rows, "with", [describe(run.values) for run in runs])
    return rows


def _append(rows: list[list[str]], head: str, cells: Sequence[str]) -> None:
    for row, cell in zip(rows, (head, *cells), strict=True):
        row.append(cell)


def _stages(run: PlannedRun) -> str:
    if run.stages is None:
        return "1"
    return f"{run.stages}, {run.schedule or run.experiment.parallel.strategy}"


def _bubble(run: PlannedRun) -> str:
    if run.stages is None:
        return "0 %"
    return "unknown" if run.bubble is None else f"{run.bubble:.0%}".replace("%", " %")


def _hint(run: PlannedRun) -> str | None:
    """Return the remedy for a pipeline's bubble, if it is long."""
    if run.bubble is None or run.bubble <= _LARGE_BUBBLE:
        return None
    waits = f"ranks wait {_bubble(run)} of a step"
    strategy = run.experiment.parallel.strategy
    if not traits_of(strategy).has_schedule:
        return f"parallel.strategy: under {strategy} {waits}; pipeline keeps several micro-batches going"
    return (
        f"parallel.pipeline: {waits}, which has {run.accumulation} micro-batches per pipeline; "
        "a smaller micro_batch_size or a larger global_batch_size makes more of them"
    )


def _cells(run: PlannedRun) -> list[str]:
    is_auto = run.micro_batches is None
    by_trial = ("auto", "auto") if is_auto else (run.micro_batches, run.accumulation)
    cells = (run.ranks, *by_trial, run.experiment.precision, run.steps_per_epoch, run.total_steps)
    return [run.id, *("unknown" if cell is None else str(cell) for cell in cells), _hours(run)]


def _hours(run: PlannedRun) -> str:
    hours = run.size.gpu_hours
    if hours is None:
        return "unknown"
    return f"at most {hours:g}" if hours else "0"


def _code_root() -> Path | None:
    tree = work_tree_around(Path.cwd())
    return None if tree is None else tree.root


def start_problems(loaded: Loaded, made: Plan, *, ranks_are_known: bool = True) -> list[str]:
    """Return the lines on problems that prevent runs of the plan from being started."""
    lines = [
        loaded.source.render(problem)
        for run in made.runs
        for problem in check_start(
            run.experiment, run.ranks if ranks_are_known else None, run.size.per_node, run.size.fewest
        )
    ]
    return list(dict.fromkeys([*lines, *lacking_parts(loaded, made), *_missing_weights(loaded, made)]))


def _missing_weights(loaded: Loaded, made: Plan) -> list[str]:
    """Return the problems of a ``model.init_from`` without weights. A run keeps the weights named now."""
    lines = []
    for text in dict.fromkeys(run.experiment.model.init_from for run in made.runs):
        try:
            source_facts(text)
        except BadFileError as error:
            message, _, remedy = str(error).removeprefix(f"{KEY}: ").rpartition("; ")
            lines.append(loaded.problem(KEY, message, remedy, "weights.absent"))
    return lines


def say_remarks(loaded: Loaded) -> None:
    """Print the remarks on settings that are valid but probably not intended."""
    for remark in remarks(loaded.experiment):
        say(loaded.source.render(remark))


def lacking_parts(loaded: Loaded, made: Plan) -> list[str]:
    """Return the problems with the user's own modules that the plan names and that are missing here."""
    experiments = [run.experiment for run in made.runs]
    return [loaded.source.render(problem) for problem in missing_parts(experiments, _code_root)]
