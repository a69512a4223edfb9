"""The checks before runs start, the same for ``validate``, ``plan``, ``submit``, ``resume`` and ``doctor``.

In this order: keys that don't fit the ranks, the user's own parts, weights, the launcher's keys, the layout
of the data, data that must be on this machine; then the batch scripts; then the budget; then the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpc_train.cli.command_options import LauncherOptions
from hpc_train.config.problems import Problem
from hpc_train.config.schema import Experiment
from hpc_train.config.training_sections import DataConfig
from hpc_train.console import say
from hpc_train.data_facts.built_in import DATA_SETS
from hpc_train.data_facts.by_name import data_facts, misplaced, missing_index
from hpc_train.errors import BadFileError, UsageError
from hpc_train.launchers.base import Launcher, StartRequest
from hpc_train.launchers.following import LOCAL
from hpc_train.launchers.lookup import DEFAULT, load_launcher
from hpc_train.paths import ExperimentPaths, RunPaths, expanded, runs_root
from hpc_train.plan.input_files import LIMIT_S, missing_pack, pack_files
from hpc_train.plan.planning import Plan, PlannedRun, make_plan
from hpc_train.run.code.work_tree import work_tree_around
from hpc_train.run.found_micro_batch import kept_size
from hpc_train.run.weight_source import KEY, source_facts
from hpc_train.topology.degrees import Ranks
from hpc_train.validate.loading import Loaded
from hpc_train.validate.own_parts import missing_parts
from hpc_train.validate.rules import check_start
from hpc_train.validate.task_rules import remarks


@dataclass(frozen=True)
class LauncherChoice:
    """The launcher that the options of a command select."""

    name: str
    launcher: Launcher
    #: Whether an option selects this machine: ``--local``, ``--launcher local`` or ``--devices``.
    on_this_machine: bool

    @classmethod
    def of(cls, options: LauncherOptions, *, starts: bool = True) -> LauncherChoice:
        """Load the launcher. Raises UsageError if the options exclude each other.

        ``starts``: whether runs will be started, which ``--devices`` alone must not do on this machine.
        """
        is_here = options.local or (options.devices is not None and options.launcher is None)
        if is_here and starts and not options.local:
            raise UsageError("--devices: is for this machine; add --local")
        name = options.launcher or (LOCAL if is_here else DEFAULT)
        on_this_machine = options.local or name == LOCAL or options.devices is not None
        launcher = load_launcher(name)
        if launcher.is_queue and on_this_machine:
            option = "--local" if options.local else "--devices"
            raise UsageError(f"{option}: is for this machine, launcher {name} is not; omit one of them")
        return cls(name, launcher, on_this_machine)

    def plan(
        self, loaded: Loaded, devices: int | None, trials: Sequence[Mapping[str, Any]] | None = None
    ) -> Plan:
        """Return the plan of the file for this launcher. ``trials``: the values that a search proposes."""
        return make_plan(
            loaded,
            lambda experiment: self.launcher.ranks(experiment, devices),
            on_this_machine=self.on_this_machine,
            trials=trials,
        )


def with_found_sizes(plan: Plan) -> Plan:
    """Return the plan with numbers for ``auto`` if the run exists and has found its size."""
    return replace(plan, runs=[_with_found_size(plan.name, run) for run in plan.runs])


def _with_found_size(name: str, run: PlannedRun) -> PlannedRun:
    optimization = run.experiment.optimization
    size = kept_size(RunPaths(runs_root() / name / run.id))
    if optimization.micro_batch_size != "auto" or size is None:
        return run
    return replace(run, micro_batches=optimization.global_batch_size // size)


def submittable(choice: LauncherChoice, loaded: Loaded) -> Plan:
    """Return the plan of a file that ``submit`` would accept, whatever the queue says.

    Raises BadFileError with all problems.
    """
    plan = with_found_sizes(choice.plan(loaded, None))
    checks = Preflight(choice.launcher, on_this_machine=choice.on_this_machine, needs_launcher=False)
    if problems := checks.of_plan(loaded, plan).problems:
        raise BadFileError(problems)
    return plan


class Candidate(NamedTuple):
    """A run to check, with the ranks that its launcher would start."""

    experiment: Experiment
    ranks: Ranks
    #: The size that ``micro_batch_size: auto`` found in an earlier attempt.
    micro_batch_size: int | None


class Checked(NamedTuple):
    """Lines of problems, empty if the runs can start."""

    problems: list[str]
    #: Why the budget or the queue refuses the runs; empty if there are problems.
    refused: list[str]
    scripts: list[str]


class Preflight:
    """The checks of runs that one launcher starts."""

    def __init__(self, launcher: Launcher, *, on_this_machine: bool, needs_launcher: bool = True) -> None:
        """``on_this_machine``: the data must be here. ``needs_launcher``: a file without the launcher's
        section has a problem, instead of being checked for any number of ranks on this machine.
        """
        self._launcher = launcher
        self._on_this_machine, self._needs_launcher = on_this_machine, needs_launcher
        #: By the section ``data``: many runs share one.
        self._layouts: dict[str, Problem | None] = {}

    def of_plan(
        self,
        loaded: Loaded,
        plan: Plan,
        *,
        budget: Callable[[], list[str]] = list,
        queue: Callable[[], list[str]] = list,
    ) -> Checked:
        """Check new runs; ``budget`` and ``queue`` return the lines of problems with these."""
        lacking = [loaded.problem(*problem) for problem in self._launcher.problems(loaded.experiment)]
        is_unknown = bool(lacking) and not self._needs_launcher
        folder = ExperimentPaths(runs_root() / plan.name)
        candidates, requests = [], []
        for run in plan.runs:
            paths = RunPaths(folder.folder / run.id)
            is_auto = run.experiment.optimization.micro_batch_size == "auto"
            size = kept_size(paths) if is_auto else None
            candidates.append(Candidate(run.experiment, Ranks() if is_unknown else run.size, size))
            requests.append(StartRequest(paths, run.experiment, loaded.problem))
        missing = [*lacking_parts(loaded, plan), *_missing_weights(loaded, plan)]
        problems = self._problems(loaded, candidates, missing, lacking)
        if problems or lacking:
            return Checked(problems, [], [])
        try:
            scripts = self._launcher.scripts(folder, requests)
        except BadFileError as error:
            return Checked(error.problems, [], [])
        return Checked([], budget() or queue(), scripts)

    def of_resumed(self, loaded: Loaded, run: Candidate, budget: Callable[[], list[str]]) -> list[str]:
        """Check a run that continues, with the code and weights that it has."""
        lacking = [loaded.problem(*problem) for problem in self._launcher.problems(loaded.experiment)]
        return self._problems(loaded, [run], [], lacking) or budget()

    def _problems(
        self, loaded: Loaded, runs: Sequence[Candidate], missing: Sequence[str], lacking: Sequence[str]
    ) -> list[str]:
        is_usable = not lacking or self._needs_launcher
        lines = [
            loaded.source.render(problem)
            for experiment, ranks, size in runs
            for problem in check_start(experiment, ranks.most, ranks.per_node, ranks.fewest, size)
        ]
        lines += [*missing, *(lacking if self._needs_launcher else ())]
        is_queued = is_usable and self._launcher.is_queue
        data = loaded.experiment.data
        key = f"{is_queued} {data.model_dump_json()}"
        if key not in self._layouts:
            self._layouts[key] = _layout_problem(data, is_queued=is_queued)
        problem = self._layouts[key]
        lines += [] if problem is None else [loaded.source.render(problem)]
        if self._on_this_machine or not is_usable:
            lines += missing_data(loaded)
        return list(dict.fromkeys(lines))


def _layout_problem(data: DataConfig, *, is_queued: bool) -> Problem | None:
    try:
        if data.root is None or not expanded(data.root).exists():
            return None
        root = expanded(data.root)
        is_empty = root.is_dir() and not any(root.iterdir())
        return None if is_queued and is_empty else misplaced(data)
    except OSError:  # the ranks may be able to read it
        return None


def missing_data(loaded: Loaded, remedy: str | None = None) -> list[str]:
    """Return the problem of a data root, or its pack, that is missing here: ranks fail only after imports."""
    data = loaded.experiment.data
    if data.root is not None and not expanded(data.root).exists():
        message = f"{data.root} does not exist on this machine"
        return [loaded.problem("data.root", message, remedy or _root_remedy(data), "data.root-absent")]
    return missing_pack_lines(loaded)


def _root_remedy(data: DataConfig) -> str:
    facts = data_facts(data.name)
    write = f"write {facts.root}"
    if facts.is_downloaded:
        return f"{write}, or fetch them with `hpc-train prepare FILE`"
    is_useless = data.name in DATA_SETS and not facts.needs_root
    return f"take it out; {data.name} needs none" if is_useless else write


def missing_pack_lines(loaded: Loaded) -> list[str]:
    """Return the line that reports that the pack, or the index, that ranks need is missing here."""
    data = loaded.experiment.data
    if (problem := missing_index(data)) is not None:
        return [loaded.source.render(problem)]
    if data.cache is None:
        return []
    try:
        files = possible_packs(data)
    except BadFileError as error:
        return error.problems
    if files is None or any(file.is_file() for file in files):
        return []
    return [loaded.problem("data.cache", *missing_pack(data), "data.pack-absent")]


def possible_packs(data: DataConfig) -> list[Path] | None:
    """Return the possible packs; None if images are not packed, or take too long to list before a start."""
    if not data_facts(data.name).is_packable:
        return None
    try:
        return pack_files(data, LIMIT_S)
    except OSError:
        return None


def _missing_weights(loaded: Loaded, plan: Plan) -> list[str]:
    """Return the problems of a ``model.init_from`` without weights. A run keeps the weights named now."""
    lines = []
    for text in dict.fromkeys(run.experiment.model.init_from for run in plan.runs):
        try:
            source_facts(text)
        except BadFileError as error:
            message, _, remedy = str(error).removeprefix(f"{KEY}: ").rpartition("; ")
            lines.append(loaded.problem(KEY, message, remedy, "weights.absent"))
    return lines


def lacking_parts(loaded: Loaded, plan: Plan) -> list[str]:
    """Return the problems with the user's own modules that the plan names and that are missing here."""
    experiments = [run.experiment for run in plan.runs]
    return [loaded.source.render(problem) for problem in missing_parts(experiments, _code_root)]


def _code_root() -> Path | None:
    tree = work_tree_around(Path.cwd())
    return None if tree is None else tree.root


def say_remarks(loaded: Loaded) -> None:
    """Print the remarks on settings that are valid but probably not intended."""
    for remark in remarks(loaded.experiment):
        say(loaded.source.render(remark))
